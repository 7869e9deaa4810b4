"""What `sgl-esft offload` prints: a trace replayed, a machine or a server measured.

    offload_cli.py -> [simulate_lines], [advise_lines] -> lines of a table, or JSON
                   -> [calibrate_lines] -> lines as it goes, a file for `sgl-esft plan --speed`

Imports torch, so it is imported when one of them is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.config import DEFAULT_MAP_STORE_BYTES
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import read_moe_spec, refuse_quantised
from sgl_esft.formats.strict_json import read_object
from sgl_esft.offload.advise import Advice, Machine, advise, measure_machine
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import ExpertPolicy, policy_of
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.learned import train
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.offload.recall import Recall
from sgl_esft.offload.simulate import Replayed, Timeline, belady_hits, needs_of, replay
from sgl_esft.offload.speed import MIN_SETTINGS, SpeedPoint, StepCosts, write_speed
from sgl_esft.offload.trace import TraceHeader, TraceStep, read_header_of, read_trace
from sgl_esft.support import TIER_SCHEMES
from sgl_esft.tools import decode_windows, server_client


def simulate_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Raises ConfigError for a trace or a cache that cannot be."""
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
    text = arguments.expert_map_memory
    num_bytes = parse_bytes(text, "--expert-map-memory") if text else DEFAULT_MAP_STORE_BYTES
    if policy.predictor == "regression":
        moments = RouterMoments(header.num_layers, header.num_experts, num_bytes)
        return RegressionPredictor(moments, header.top_k)
    if policy.predictor == "finemoe":
        store = MapStore(
            header.num_layers, header.num_experts, header.embedding_size, distance, num_bytes
        )
        by_adapter = arguments.store_by == "adapter"
        return FineMoEPredictor(store, header.top_k, distance, by_adapter=by_adapter)
    if policy.predictor == "request-counts":
        return RequestCountsPredictor(
            header.num_layers, header.num_experts, header.top_k, reach=distance
        )
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
        "recall": _recall_rows(found.recall),
        "belady_hit_rate": best[cache],
    }


def _recall_rows(recall: Recall) -> list[dict[str, float]]:
    """By MoE layer, from 0, and distance."""
    return [
        {
            "layer": layer,
            "distance": distance,
            "num_asked": recall.num_asked[layer],
            **asdict(row),
            "recall": row.recall(recall.num_asked[layer]),
        }
        for (layer, distance), row in sorted(recall.rows.items())
    ]


def train_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Raises ConfigError for a trace without decoded tokens."""
    header = read_header_of(arguments.trace)
    steps = (event for event in read_trace(arguments.trace) if isinstance(event, TraceStep))
    maps = [step.probs.swapaxes(0, 1) for step in steps if step.request_ids]
    if not maps:
        raise ConfigError(f"{arguments.trace} has no decoded tokens: record a server that answers")
    every = np.concatenate(maps)
    distance = min(arguments.prefetch_distance, header.num_layers - 1)
    train(every, distance, arguments.ridge, top_k=header.top_k).save(arguments.out)
    yield f"trained {header.num_layers - distance} probes on {len(every):,} tokens: {arguments.out}"


def advise_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Raises ConfigError, UnsupportedModelError."""
    spec = read_moe_spec(arguments.base)
    refuse_quantised(spec, "--expert-cache", TIER_SCHEMES)
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


def calibrate_lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Raises ConfigError, ServerAnswerError, ServerUnreachableError; then nothing is written."""
    server = server_client.read_flags(arguments)
    _check_calibrate(arguments)
    rows = decode_windows.served_rows(server)
    adapters = [] if arguments.base_only else decode_windows.loaded_adapters(server)
    yield (
        f"{server.url}: {rows.num_rows} rows in each of {rows.num_layers} layers, {rows.policy}; "
        f"adapters: {', '.join(adapters) or 'none'}"
    )
    points = []
    sizes, seconds = arguments.batch_sizes, arguments.seconds
    for point in decode_windows.windows_of(server, rows, adapters, sizes, seconds):
        points.append(point)
        yield _point_line(point)
    yield from _costs_lines(write_speed(arguments.out, points, _this_machine(server.url)))
    yield f"wrote {len(points)} windows to {arguments.out}"


def _check_calibrate(arguments: argparse.Namespace) -> None:
    """Before minutes are spent."""
    sizes = arguments.batch_sizes
    if len(set(sizes)) < MIN_SETTINGS or min(sizes) < 1:
        raise ConfigError(f"--batch-sizes {sizes}: give {MIN_SETTINGS} different ones or more")
    if not arguments.seconds > 0:
        raise ConfigError(f"--seconds is {arguments.seconds}, not a positive number")
    if arguments.out.exists():
        raise ConfigError(f"{arguments.out} exists: name another --out, or remove it")


def _point_line(point: SpeedPoint) -> str:
    return (
        f"batch {point.num_tokens:3}, {'with adapters' if point.with_adapters else 'base only':13}"
        f"{point.num_tokens / point.step_s:9.1f} tokens/s: a step {point.step_s * 1e3:.1f} ms, "
        f"{point.stall_s * 1e3:.1f} of it stalled, {point.num_needed:.1f} experts, "
        f"{point.num_loads:.1f} read"
    )


def _costs_lines(costs: StepCosts) -> Iterator[str]:
    link = "nothing was read"
    if costs.byte_s is not None:
        speed = f"{gigabytes(1 / costs.byte_s)} a second" if costs.byte_s else "no time by size"
        link = f"a read {costs.latency_s * 1e3:.2f} ms and {speed}"
    yield (
        f"a step takes {costs.fixed_s * 1e3:.2f} ms, {costs.token_s * 1e3:.2f} a token, "
        f"{costs.expert_s * 1e3:.3f} an expert, {costs.contended_s * 1e3:.3f} more where its layer "
        f"reads, {costs.load_s * 1e3:.3f} a load; {link}; "
        f"windows lie {costs.off_low:+.1%} to {costs.off_high:+.1%} off"
    )


def _this_machine(url: str) -> dict[str, object]:
    """Where it was measured from; a server elsewhere has its address."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    cpu = models[0] if models else platform.machine()
    return {"name": platform.node(), "cpu": cpu, "cores": len(os.sched_getaffinity(0)), "url": url}
