"""The part of `sgl-esft plan` that says how fast it will be, where it is asked for.

    --speed FILE ..., --trace DIR -> costs (offload/speed.py), requests (offload/step_work.py)
    --> [predicted]: batch size x rows x with and without adapters -> [table], [as_json]

memory_cli.py has the flags, and prints it below the memory's table. Needs safetensors, for traces.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sgl_esft.byte_size import parse_bytes
from sgl_esft.errors import ConfigError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.offload.policies import policy_of
from sgl_esft.offload.speed import Speed, SpeedPoint, StepCosts, fit, read_points
from sgl_esft.offload.step_work import TracedRequests, requests_of, work_of
from sgl_esft.offload.trace import read_header_of, read_trace

_BATCH_SIZES: Final = (1, 2, 4, 8)
_POLICY: Final = "lfu"


@dataclass(frozen=True)
class SpeedRow:
    """A batch size on a number of rows; `with_adapters` None: the trace has none."""

    batch_size: int
    num_rows: int
    base_only: Speed
    with_adapters: Speed | None


@dataclass(frozen=True)
class SpeedPlan:
    """What was predicted, and the batch sizes that were measured."""

    rows: tuple[SpeedRow, ...]
    measured_sizes: tuple[int, ...]

    def as_json(self) -> list[dict[str, object]]:
        """Rows; tokens a second."""
        return [asdict(row) for row in self.rows]

    def table(self) -> Iterator[str]:
        """Lines for a terminal."""
        yield "speed     tokens/s of all requests together while they decode, prompts not counted;"
        yield "          in brackets: where eight of ten measured windows would lie"
        yield ""
        yield f"batch    rows  {'base only':>27}  {'with adapters':>27}"
        for row in self.rows:
            yield (
                f"{row.batch_size:5}  {row.num_rows:6}  {_cell(row.base_only):>27}  "
                f"{_cell(row.with_adapters):>27}"
            ).rstrip()
        sizes = self.measured_sizes
        if any(not sizes[0] <= row.batch_size <= sizes[-1] for row in self.rows):
            yield f"batches of {sizes[0]} to {sizes[-1]} were measured, others follow from them"


def _cell(speed: Speed | None) -> str:
    if speed is None:
        return "-"
    return f"{speed.expected:,.1f} ({speed.low:,.1f} - {speed.high:,.1f})"


def plan_speed(arguments: argparse.Namespace, spec: MoeSpec) -> SpeedPlan:
    """By the flags of `--speed`. Raises ConfigError."""
    if arguments.trace is None:
        raise ConfigError("--speed without --trace: what is asked decides which experts are read")
    traced = _traced(arguments.trace, spec)
    points = [point for path in arguments.speed for point in read_points(path)]
    if any(point.num_layers != traced.header.num_layers for point in points):
        raise ConfigError(
            f"--speed: measured on {points[0].num_layers} MoE layers, the trace is of "
            f"{traced.header.num_layers}: calibrate a server of this base"
        )
    rows = arguments.expert_cache or _rows_of(points, traced)
    costs = fit(points)
    if arguments.expert_read_bandwidth is not None:
        bandwidth = parse_bytes(arguments.expert_read_bandwidth, "--expert-read-bandwidth")
        costs = costs.with_bandwidth(bandwidth)
    sizes = arguments.batch_sizes or _BATCH_SIZES
    policy = arguments.expert_policy or _POLICY
    return SpeedPlan(
        tuple(predicted(costs, traced, size, num, policy) for size in sizes for num in rows),
        tuple(sorted({point.num_tokens for point in points})),
    )


def _traced(folder: Path, spec: MoeSpec) -> TracedRequests:
    header = read_header_of(folder)
    of_trace = (header.num_layers, header.num_base)
    of_base = (len(spec.moe_layer_ids), spec.num_experts)
    if of_trace != of_base:
        raise ConfigError(
            f"--trace is of {of_trace[0]} MoE layers with {of_trace[1]} experts, the base has "
            f"{of_base[0]} with {of_base[1]}: record one of this base"
        )
    return requests_of(header, read_trace(folder))


def _rows_of(points: Sequence[SpeedPoint], traced: TracedRequests) -> list[int]:
    """Those that were measured, and a row for every slot."""
    return sorted({*(point.num_rows for point in points), traced.header.num_slots})


def predicted(
    costs: StepCosts, traced: TracedRequests, batch_size: int, num_rows: int, policy: str
) -> SpeedRow:
    """One row: what steps do, by the trace, and how long they take. Raises ConfigError."""

    def speed_of(requests: TracedRequests, *, with_adapters: bool) -> Speed:
        work = work_of(requests, batch_size, num_rows, policy_of(policy))
        return costs.speed(work, with_adapters=with_adapters)

    base_only = speed_of(traced.of_base(batch_size), with_adapters=False)
    mixed = speed_of(traced, with_adapters=True) if traced.has_adapters else None
    return SpeedRow(batch_size, num_rows, base_only, mixed)
