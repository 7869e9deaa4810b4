"""How large a cache, and which policy: from what a machine was measured to do, and a trace.

base checkpoint --[measure_machine]--> seconds to read an expert, to compute one
+ memory, trace --[advise]--> a row for each cache size: loads and seconds a token, policy
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from sgl_esft.errors import ConfigError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.link import THREAD_COUNTS, measured_link
from sgl_esft.offload.loader import LoadJob
from sgl_esft.offload.policies import ExpertPolicy, LeastFrequentlyUsed, auto_policy
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.simulate import replay
from sgl_esft.offload.source import ExpertSource
from sgl_esft.offload.trace import TraceEvent, TraceHeader
from sgl_esft.platform.moe import weighted_sum
from sgl_esft.platform.quantised_moe import experts_in

_SHARES: Final = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
_COMPUTE_REPEATS: Final = 5


@dataclass(frozen=True)
class Machine:
    """What was measured, in seconds of one expert."""

    read_s: float  # where num_threads read at a time
    compute_s: float  # for one token
    num_threads: int
    read_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.read_bytes / self.read_s


@dataclass(frozen=True)
class Advice:
    """One cache size: rows of each layer."""

    num_rows: int
    num_bytes: int  # of all layers
    hit_rate: float  # of distinct experts; measured on the trace, else as if routing were uniform
    loads_per_token: float
    seconds_per_token: float  # of the experts alone: the larger of reading and computing, a layer
    policy: str
    fits: bool


def measure_machine(base: Path, num_threads: int | None, seconds: float) -> Machine:
    """Read experts for about `seconds`, and compute one. Raises UnsupportedModelError.

    num_threads: that read at a time; None = as a server would choose.
    """
    source = ExpertSource(base)
    spec = source.spec
    counts = THREAD_COUNTS if num_threads is None else (num_threads,)
    rows = _rows(spec, max(counts))
    reader = ExpertReader(range(spec.expert_intermediate_size), False, rows[0].dtype)
    places = [
        source.place(None, layer, expert)
        for expert in range(spec.num_experts)
        for layer in spec.moe_layer_ids
    ]

    def read(job: LoadJob) -> None:
        reader.read(job.place, *(tensor[job.row] for tensor in rows))

    link = measured_link(read, places, max(counts), counts, seconds / len(counts))
    assert link.load_s is not None
    return Machine(link.load_s, _compute_s(spec, rows), link.num_threads, spec.expert_bytes)


def _rows(spec: MoeSpec, num_rows: int) -> list[torch.Tensor]:
    """As a layer has them on one rank: w13, w2 and, of quantised experts, their scales."""
    width, hidden = spec.expert_intermediate_size, spec.hidden_size
    weight, *scales = spec.expert_parts("gate")
    shapes = [((2 * width, hidden), weight), ((hidden, width), weight)]
    shapes += [((rows, 1), scale) for scale in scales for rows in (2 * width, hidden)]
    return [
        torch.zeros((num_rows, *shape), dtype=getattr(torch, part.dtype)) for shape, part in shapes
    ]


def _compute_s(spec: MoeSpec, rows: Sequence[torch.Tensor]) -> float:
    experts = experts_in(rows)
    num_rows = rows[0].shape[0]
    hidden = torch.zeros((1, spec.hidden_size), dtype=getattr(torch, spec.dtype))
    ids = torch.arange(num_rows, dtype=torch.int32).view(1, -1)
    weights = torch.ones(ids.shape)
    times = []
    for _ in range(_COMPUTE_REPEATS):
        began = time.perf_counter()
        weighted_sum(hidden, experts, weights, ids)
        times.append((time.perf_counter() - began) / num_rows)
    return min(times)


def advise(
    spec: MoeSpec,
    top_k: int,
    machine: Machine,
    memory_bytes: int,
    trace: tuple[TraceHeader, Sequence[TraceEvent]] | None = None,
) -> list[Advice]:
    """A row for each share of the experts that could be kept. Raises ConfigError.

    Without a trace routing is taken as uniform, which real routers are not: they do better.
    """
    if trace is not None:
        _check_same(spec, trace[0])
    loads_per_layer = top_k * machine.compute_s / machine.read_s
    policy = auto_policy(loads_per_layer, can_predict=True, load_s=machine.read_s)
    sizes = sorted({max(top_k, round(share * spec.num_experts)) for share in _SHARES})
    return [_advice(spec, top_k, machine, memory_bytes, trace, policy, size) for size in sizes]


def _check_same(spec: MoeSpec, header: TraceHeader) -> None:
    of_trace = (header.num_layers, header.num_base)
    of_base = (len(spec.moe_layer_ids), spec.num_experts)
    if of_trace != of_base:
        raise ConfigError(
            f"the trace is of {of_trace[0]} MoE layers with {of_trace[1]} experts, the base has "
            f"{of_base[0]} with {of_base[1]}: record one of this base"
        )


def _advice(
    spec: MoeSpec,
    top_k: int,
    machine: Machine,
    memory_bytes: int,
    trace: tuple[TraceHeader, Sequence[TraceEvent]] | None,
    policy: ExpertPolicy,
    num_rows: int,
) -> Advice:
    num_layers = len(spec.moe_layer_ids)
    if trace is None:
        hit_rate, loads = num_rows / spec.num_experts, 0.0
        loads = num_layers * top_k * (1 - hit_rate)
    else:
        hit_rate, loads = _replayed(*trace, num_rows)
    layer_s = max(top_k * machine.compute_s, loads / num_layers * machine.read_s)
    num_bytes = num_rows * num_layers * spec.expert_bytes
    return Advice(
        num_rows,
        num_bytes,
        hit_rate,
        loads,
        num_layers * layer_s,
        policy.name,
        num_bytes <= memory_bytes,
    )


def _replayed(
    header: TraceHeader, events: Iterable[TraceEvent], num_rows: int
) -> tuple[float, float]:
    """(hit rate, loads a token) by frequency alone, adapters' experts among them."""
    policy = ExpertPolicy("lfu", "", LeastFrequentlyUsed)
    decisions = Decisions(
        header.num_layers, header.num_slots, num_rows, policy, num_base=header.num_base
    )
    found = replay(header, events, decisions)
    asked = max(1, found.counts.num_asked)
    return found.counts.num_hits / asked, found.counts.num_loads / max(1, found.num_tokens)
