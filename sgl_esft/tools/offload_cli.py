"""`sgl-esft offload`: what experts in tiers would do, before a server is started.

cli.py -> [configure, run] -> simulate: a recorded trace against caches and policies
                           -> advise: a machine, measured, and a base
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.config import (
    DEFAULT_MAP_STORE_BYTES,
    DEFAULT_PREFETCH_DISTANCE,
    DEFAULT_READ_THREADS,
)
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.advise import Advice, Machine, advise, measure_machine
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import POLICIES, ExpertPolicy, policy_of
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.simulate import Replayed, Timeline, belady_hits, needs_of, replay
from sgl_esft.offload.trace import TraceHeader, read_header_of, read_trace

_EXIT_OK: Final = 0
_MEASURED_S: Final = 20.0
SIMULATED: Final = tuple(
    name
    for name, policy in POLICIES.items()
    if policy.predictor in (None, "finemoe", "request-counts")
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The two commands below `sgl-esft offload`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    simulate = commands.add_parser(
        "simulate",
        help="replay a trace of --record-routing against a cache and a policy",
        description="The counts are exactly those of a server with the same flags: it decides by "
        "the same code. Stall is in layers' computing times, for a load that takes R of one.",
    )
    _add_simulate(simulate)
    advised = commands.add_parser(
        "advise",
        help="measure this machine, and propose a cache and a policy for a base",
        description="Reads experts and computes one for some seconds. With --trace hit rates are "
        "those of the trace; without, as if all experts were asked for alike.",
    )
    _add_advise(advised)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="folder of --record-routing")
    parser.add_argument(
        "--cache", type=int, nargs="+", required=True, metavar="N", help="rows of each layer"
    )
    parser.add_argument(
        "--policy", nargs="+", choices=SIMULATED, default=["lfu"], help="default: lfu"
    )
    parser.add_argument(
        "--loads-per-layer",
        type=float,
        default=1.0,
        metavar="X",
        help="as --expert-loads-per-layer (default: %(default)s)",
    )
    parser.add_argument(
        "--prefetch-distance", type=int, default=DEFAULT_PREFETCH_DISTANCE, metavar="D"
    )
    parser.add_argument("--expert-map-memory", metavar="SIZE", help="default: 64MiB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(do=_simulate)


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, metavar="BASE", help="base checkpoint")
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="for experts on the device, such as 16GiB"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="folder of --record-routing")
    parser.add_argument("--threads", type=int, default=DEFAULT_READ_THREADS, metavar="N")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_MEASURED_S,
        metavar="S",
        help="read for so long (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(do=_advise)


def run(arguments: argparse.Namespace) -> int:
    """One of them."""
    lines: Iterator[str] = arguments.do(arguments)
    print("\n".join(lines))
    return _EXIT_OK


# ---- simulate ----


def _simulate(arguments: argparse.Namespace) -> Iterator[str]:
    header = read_header_of(arguments.trace)
    rows = [
        (name, cache, _replayed(arguments, header, policy_of(name), cache))
        for cache in arguments.cache
        for name in arguments.policy
    ]
    best = {cache: _belady(arguments.trace, header, cache) for cache in arguments.cache}
    if arguments.json:
        yield json.dumps([_as_json(name, cache, found, best) for name, cache, found in rows])
        return
    yield f"{'policy':16}{'rows':>6}{'hits':>9}{'loads':>10}{'ahead':>10}{'useful':>9}{'stall':>9}"
    for name, cache, found in rows:
        yield _row(name, cache, found)
    for cache, hit_rate in best.items():
        yield f"{'(nothing beats)':16}{cache:6}{hit_rate:9.1%}"


def _replayed(
    arguments: argparse.Namespace, header: TraceHeader, policy: ExpertPolicy, cache: int
) -> Replayed:
    if cache < header.top_k:
        raise ConfigError(f"--cache {cache}: one token needs {header.top_k} experts of a layer")
    decisions = Decisions(
        header.num_layers,
        header.num_slots,
        min(cache, header.num_slots),
        policy,
        num_base=header.num_base,
        loads_per_layer=arguments.loads_per_layer,
    )
    timeline = Timeline(1.0 / arguments.loads_per_layer) if arguments.loads_per_layer else None
    predictor = _predictor(arguments, header, policy)
    return replay(header, read_trace(arguments.trace), decisions, predictor, timeline)


def _predictor(
    arguments: argparse.Namespace, header: TraceHeader, policy: ExpertPolicy
) -> Predictor | None:
    distance = min(arguments.prefetch_distance, header.num_layers)
    if policy.predictor == "finemoe":
        text = arguments.expert_map_memory
        num_bytes = parse_bytes(text, "--expert-map-memory") if text else DEFAULT_MAP_STORE_BYTES
        store = MapStore(
            header.num_layers, header.num_experts, header.embedding_size, distance, num_bytes
        )
        return FineMoEPredictor(store, header.top_k, distance)
    if policy.predictor == "request-counts":
        return RequestCountsPredictor(header.num_layers, header.num_experts, header.top_k)
    return None


def _belady(trace: Path, header: TraceHeader, cache: int) -> float:
    needs = needs_of(header, read_trace(trace))
    asked = sum(len(step) for layer in needs for step in layer)
    return sum(belady_hits(layer, cache) for layer in needs) / max(1, asked)


def _row(name: str, cache: int, found: Replayed) -> str:
    counts, steps = found.counts, max(1, found.num_steps)
    return (
        f"{name:16}{cache:6}{counts.num_hits / max(1, counts.num_asked):9.1%}"
        f"{counts.num_loads:10,}{counts.num_prefetches:10,}"
        f"{counts.num_useful / max(1, counts.num_prefetches):9.1%}"
        f"{found.stall_layers / steps:9.2f}"
    )


def _as_json(name: str, cache: int, found: Replayed, best: dict[int, float]) -> dict[str, object]:
    return {
        "policy": name,
        "rows": cache,
        **asdict(found.counts),
        "num_steps": found.num_steps,
        "num_tokens": found.num_tokens,
        "stall_layers": found.stall_layers,
        "belady_hit_rate": best[cache],
    }


# ---- advise ----


def _advise(arguments: argparse.Namespace) -> Iterator[str]:
    spec = read_moe_spec(arguments.base)
    top_k = read_object(arguments.base / "config.json", UnsupportedModelError).get(
        "num_experts_per_tok"
    )
    if not isinstance(top_k, int):
        raise UnsupportedModelError(f"{arguments.base}: config.json has no num_experts_per_tok")
    trace = None
    if arguments.trace is not None:
        trace = (read_header_of(arguments.trace), list(read_trace(arguments.trace)))
    machine = measure_machine(arguments.base, arguments.threads, arguments.seconds)
    memory_bytes = parse_bytes(arguments.memory, "--memory")
    found = advise(spec, top_k, machine, memory_bytes, trace)
    if arguments.json:
        yield json.dumps({"machine": asdict(machine), "rows": [asdict(each) for each in found]})
        return
    yield from _advice_lines(machine, found)


def _advice_lines(machine: Machine, found: Sequence[Advice]) -> Iterator[str]:
    yield (
        f"one expert is read in {machine.read_s * 1e3:.2f} ms "
        f"({gigabytes(int(machine.bytes_per_s))} a second, {machine.num_threads} threads), "
        f"computed in {machine.compute_s * 1e3:.2f} ms"
    )
    yield f"{'rows':>6}{'memory':>12}{'hits':>8}{'loads/token':>13}{'experts s/token':>17}"
    for each in found:
        yield (
            f"{each.num_rows:6}{gigabytes(each.num_bytes):>12}{each.hit_rate:8.1%}"
            f"{each.loads_per_token:13.1f}{each.seconds_per_token:17.3f}"
            f"{'' if each.fits else '  too large'}"
        )
    fitting = [each for each in found if each.fits]
    if not fitting:
        yield "nothing fits: quantise the base, or give more memory"
        return
    best = fitting[-1]
    yield f"proposed: --expert-cache {best.num_rows} --expert-policy auto (here: {best.policy})"
