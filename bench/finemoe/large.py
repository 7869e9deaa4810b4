"""A model larger than the memory, served with experts in tiers: V2-Lite's sizes, real routing.

    random checkpoint in --folder, 31.4 GB (large_model.py); routing of --trace (replay_plugin.py):
        every second sequence is replayed, the others are known to who predicts
    one server after the other, a round each --[measured]--> start, memory, decode, prefill
    bytes a token / bandwidth, and a server that finds every expert --> the bound
    bandwidth: of the same reads, right before and after what is decoded, since storage that others
    share gives now this, now that

**Answers mean nothing**: weights are random and routers are overruled. Bytes, reads, memory and
computing are those of the real model. The base's files are aligned, as those of `sgl-esft pack`.
Systems: `stream`, `lru`, `lfu` (nothing is fetched ahead), `auto`; `mapped`, whose experts are
computed straight from the mapped checkpoint, with all of the machine's page cache; `found`, whose
trace is one token over and over, so that after the first every expert is there: the time of
computing.

Memory is what the operating system counts: a control group of --memory holds the server's processes
and what they read through the page cache, and the processes' proportional set sizes (smaps_rollup)
are watched beside it. Reads of experts go past the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from bench.common.load import NO_PREFIX_CACHE, end_on_sigterm
from bench.common.record import RESULTS, spread, write_result
from bench.elasticmoe.load import Ask, Stream, ask_once
from bench.finemoe.large_memory import MemoryLimit, MemoryWatch
from bench.finemoe.large_model import LargeShape, trunk_bytes, write_adapter, write_base
from bench.finemoe.replay_plugin import MAPPED, REPLAY, distributions, install, write_replay
from bench.finemoe.tier_servers import Window, read_counted, window_of
from bench.finemoe.traces import NUM_EXPERTS, tasks_of
from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.config import DEFAULT_MAP_STORE_BYTES
from sgl_esft.offload.advise import Machine, measure_machine
from sgl_esft.offload.predictors.moments import RouterMoments, logits_of
from sgl_esft.plugin.tier_predictors import base_line
from sgl_esft.zoo import serving

ROOT = Path(__file__).resolve().parents[2]
MAPPED_SYSTEM, FOUND = "mapped", "found"
POLICIES = ("stream", "lru", "lfu", "auto")
SYSTEMS = (FOUND, *POLICIES, MAPPED_SYSTEM)
KV_TOKENS = 4096
KV_BYTES = KV_TOKENS * 31_104  # DeepSeek-V2-Lite's
PROCESS_BYTES = 2_300_000_000  # of everything else: three processes, buffers, the system
SPARE_BYTES = 400_000_000  # less than the budget, in which the trunk's files are read too
PREFILL_TOKENS = 1024
EDGES = 1.02  # an unaligned read fetches some blocks more than it needs
START_SECONDS = 1800.0
ANSWER_SECONDS = 1800.0
STORAGE_SECONDS = 3.0  # of measuring it


@dataclass(frozen=True)
class Asks:
    """What a server is asked: tokens that do not count, answers at batch 1, a mix of adapters."""

    num_first: int = 12
    num_answers: int = 2
    num_new: int = 32
    num_mixed: int = 16  # of the base and each adapter


FEW = {MAPPED_SYSTEM: Asks(12, 1, 24, 0)}  # of which each reads most of its experts anew
QUICK = Asks(4, 1, 8, 8)


@dataclass(frozen=True)
class LargePlan:
    """How much is measured."""

    shape: LargeShape
    memory_bytes: int
    rounds: int = 3
    is_quick: bool = False
    systems: tuple[str, ...] = SYSTEMS

    def asks_of(self, system: str) -> Asks:
        """Of one server."""
        return QUICK if self.is_quick else FEW.get(system, Asks())

    @property
    def cache_bytes(self) -> int:
        """For experts. Raises SystemExit where one token's do not fit."""
        shape = self.shape
        others = trunk_bytes(shape) + KV_BYTES + PROCESS_BYTES + SPARE_BYTES
        left = self.memory_bytes - others
        least = (shape.num_layers - 1) * shape.top_k * shape.expert_bytes
        if left < least:
            raise SystemExit(
                f"--memory {gigabytes(self.memory_bytes)} leaves {gigabytes(left)} for experts, "
                f"and one token needs {gigabytes(least)}: give more, or fewer --layers"
            )
        return min(left, shape.routed_bytes)


@dataclass(frozen=True)
class Site:
    """What is on the disk."""

    base: Path
    adapters: Mapping[str, Path]
    work: Path  # the plugin, and traces

    def arguments(self, system: str, plan: LargePlan) -> list[str]:
        """Of the launcher."""
        named = [f"{name}={path}" for name, path in self.adapters.items()]
        found = ["--model-path", str(self.base), "--dtype", "bfloat16", "--enable-metrics"]
        found += ["--max-total-tokens", str(KV_TOKENS), "--log-level", "warning", *NO_PREFIX_CACHE]
        found += ["--chunked-prefill-size", str(2 * PREFILL_TOKENS)]
        # SGLang's own first request would read as many experts as ten tokens need.
        found += ["--weight-loader-drop-cache-after-load", "--skip-server-warmup"]
        # A prompt that is computed from mapped files is one long step.
        found += ["--hang-timeout", f"{ANSWER_SECONDS:g}"]
        if named and system != MAPPED_SYSTEM:
            found += ["--esft-adapters", *named]
        cache, policy = f"{plan.cache_bytes}B", system
        if system == MAPPED_SYSTEM:  # rows that nobody reads
            cache, policy = str(plan.shape.top_k), "lru"
        policy = "lru" if system == FOUND else policy
        known = ["--expert-map-file", str(self.work / "moments")] if system == "auto" else []
        return [*found, "--expert-cache", cache, "--expert-policy", policy, *known]

    def environment(self, system: str) -> dict[str, str]:
        """By which every process of the server replays."""
        path = os.pathsep.join(
            [str(self.work / "plugin"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        name = "one_token" if system == FOUND else "tokens"
        found = {"PYTHONPATH": path, REPLAY: str(self.work / f"{name}.npz")}
        return found | ({MAPPED: str(self.base)} if system == MAPPED_SYSTEM else {})


def prepared(
    plan: LargePlan, folder: Path, work: Path, configs: Sequence[Path], traces: Sequence[Path]
) -> Site:
    """Everything on the disk; what is in `folder` already stays. Raises SystemExit."""
    replayed, known = (routing_of(traces, plan.shape, of) for of in (0, 1))
    base = folder / "base"
    write_base(plan.shape, base)
    adapters = {}
    for config in configs:
        adapters[config.stem] = folder / "adapters" / config.stem
        write_adapter(config, base, plan.shape, adapters[config.stem])
    install(work / "plugin")
    write_replay(work / "tokens.npz", *replayed, first_layer=1)
    write_replay(work / "one_token.npz", *(part[:, :1] for part in replayed), first_layer=1)
    write_moments(work / "moments", base, *known)
    return Site(base, adapters, work)


def write_moments(path: Path, base: Path, ids: Any, weights: Any) -> None:
    """A file for --expert-map-file of `base`: what tokens [L, N, k] that were seen before teach."""
    layers = zip(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights), strict=True)
    of_layers = [distributions(i, w.float(), NUM_EXPERTS) for i, w in layers]
    maps = torch.stack(of_layers, dim=1).numpy()  # [N, L, J]
    maps /= maps.sum(axis=2, keepdims=True)
    moments = RouterMoments(*maps.shape[1:], DEFAULT_MAP_STORE_BYTES, base=base_line(base))
    moments.add(logits_of(maps))
    moments.save(path)


def routing_of(traces: Sequence[Path], shape: LargeShape, which: int) -> tuple[Any, Any]:
    """ids and weights [L, N, k] of all tasks, of as many layers as the model has.

    which: of every two sequences, 0 = the first, 1 = the second.
    """
    parts: list[tuple[Any, Any]] = []
    for path in traces:
        with np.load(path) as file:
            for task in tasks_of(path):
                lengths = file[f"{task}_lengths"]
                mine = np.repeat(np.arange(len(lengths)) % 2 == which, lengths)
                parts.append((file[f"{task}_ids"][:, mine], file[f"{task}_weights"][:, mine]))
    ids, weights = (np.concatenate([p[i] for p in parts], axis=1) for i in (0, 1))
    if ids.shape[2] != shape.top_k or len(ids) < shape.num_layers - 1:
        raise SystemExit(f"a trace of {ids.shape} ids for {shape}: give DeepSeek-V2-Lite's")
    return ids[: shape.num_layers - 1], weights[: shape.num_layers - 1]


# ---- measuring ----


@dataclass(frozen=True)
class Measured:
    """One server, from its start to its end."""

    ready_s: float
    peak_process_bytes: int
    peak_cached_bytes: int  # the page cache's growth since before the start
    peak_limited_bytes: int | None  # of the control group; None = there was none
    decode: Window
    prefill: Window
    mixed: Window | None  # base and adapters in turn
    storage: tuple[Machine, Machine]  # before and after `decode`

    @property
    def bytes_per_s(self) -> float:
        """What the storage gave while it decoded."""
        return statistics.fmean(each.bytes_per_s for each in self.storage)


def measured(site: Site, system: str, plan: LargePlan, number: int) -> Measured:
    """Raises ValueError where a request failed, or routing was not replayed."""
    limit = MemoryLimit(plan.memory_bytes)
    with limit, MemoryWatch() as memory, environment(site.environment(system)):
        began = time.monotonic()
        with serving.server(site.arguments(system, plan), START_SECONDS) as url:
            ready_s = time.monotonic() - began
            asks = plan.asks_of(system)
            asked(url, [decoding(None, asks.num_first)])
            before = storage_of(site)
            decode = asked(url, [decoding(None, asks.num_new)] * asks.num_answers)
            after = storage_of(site)
            prefill = asked(url, [Ask(text(PREFILL_TOKENS, number), None, 1)])
            mixed = None
            if site.adapters and asks.num_mixed and system != MAPPED_SYSTEM:
                names = (None, *site.adapters)
                mixed = asked(url, [decoding(name, asks.num_mixed) for name in names])
    peaks = (memory.peak.total, memory.peak_cached_bytes, limit.peak_bytes)
    found = Measured(ready_s, *peaks, decode, prefill, mixed, (before, after))
    check(found, system)
    return found


def storage_of(site: Site) -> Machine:
    """As a server reads, while none does."""
    return measure_machine(site.base, None, STORAGE_SECONDS)


def asked(url: str, asks: Sequence[Ask]) -> Window:
    """One after the other, each as long as it takes."""

    async def all_of_them() -> list[Stream]:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return [await ask_once(session, url, ask) for ask in asks]

    before, began = read_counted(url), time.monotonic()
    streams = asyncio.run(all_of_them())
    return window_of(streams, time.monotonic() - began, read_counted(url).minus(before))


def decoding(adapter: str | None, num_tokens: int) -> Ask:
    """A prompt of one token, so that all passes are of one."""
    return Ask("a", adapter, num_tokens)


def text(num_tokens: int, number: int) -> str:
    """A token is a letter."""
    return "".join(chr(ord("a") + (number + index) % 26) for index in range(num_tokens))


def check(found: Measured, system: str) -> None:
    """What the figures take for granted."""
    counted = found.decode.counted
    if system == MAPPED_SYSTEM and counted.asked:
        raise ValueError("tiers were asked: experts are not computed from the mapped files")
    if system == FOUND and counted.hits != counted.asked:
        raise ValueError(f"{counted.hits} hits of {counted.asked}: routing is not replayed")


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """What the server inherits."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ---- rows ----

Rounds = Mapping[str, Sequence[Measured]]  # system -> a server of each round


def row_of(system: str, rounds: Rounds, plan: LargePlan) -> dict[str, Any]:
    """One system; the bound is of its own bytes, and of what computing takes."""
    mine = rounds[system]
    row: dict[str, Any] = {
        "system": system,
        "ready_s": spread([each.ready_s for each in mine]),
        "peak_process_bytes": max(each.peak_process_bytes for each in mine),
        "peak_cached_bytes": max(each.peak_cached_bytes for each in mine),
        "peak_limited_bytes": max(each.peak_limited_bytes or 0 for each in mine) or None,
        "decode_s_per_token": spread([median_tpot(each.decode) for each in mine]),
        "prefill_s": spread([each.prefill.ttft_s[0] for each in mine]),
        "read_bytes_per_s": spread([each.bytes_per_s for each in mine]),
        "read_threads": sorted({of.num_threads for each in mine for of in each.storage}),
    }
    if all(each.mixed for each in mine):
        row["mixed_s_per_token"] = spread([median_tpot(each.mixed) for each in mine if each.mixed])
    if system == MAPPED_SYSTEM:
        return row
    return {
        **row,
        **_counted(mine),
        **_prefill(mine, plan.shape),
        **_bound(mine, rounds.get(FOUND, ())),
    }


def median_tpot(of: Window) -> float:
    """Seconds of a token at batch 1."""
    return statistics.median(of.tpot_s)


def _counted(mine: Sequence[Measured]) -> dict[str, Any]:
    decode = [each.decode for each in mine]
    return {
        "hit_rate": spread([w.counted.hit_rate or 0.0 for w in decode]),
        "demand_per_token": spread([w.counted.demand / w.tokens for w in decode]),
        "prefetched_per_token": spread([w.counted.prefetched / w.tokens for w in decode]),
        "bytes_per_token": spread([w.counted.read_bytes / w.tokens for w in decode]),
        "stall_s_per_token": spread([w.stall_per_token_s for w in decode]),
    }


def _prefill(mine: Sequence[Measured], shape: LargeShape) -> dict[str, Any]:
    """Of one prompt in one chunk: distinct experts of each layer, and how often each was read."""
    counted = [each.prefill.counted for each in mine]
    reads = [c.read_bytes / (c.asked * shape.expert_bytes) for c in counted]
    return {
        "prefill_experts": spread([c.asked for c in counted]),
        "prefill_reads_per_expert": spread(reads),
        "prefill_reads_each_at_most_once": max(reads) <= EDGES,
    }


def _bound(mine: Sequence[Measured], found: Sequence[Measured]) -> dict[str, Any]:
    """Round by round: max(computing, reading), and how far above it a token is."""
    if len(found) < len(mine):
        return {}
    bounds = [
        max(
            median_tpot(computed.decode),
            each.decode.counted.read_bytes / each.decode.tokens / each.bytes_per_s,
        )
        for each, computed in zip(mine, found, strict=False)
    ]
    over = [median_tpot(each.decode) / bound for each, bound in zip(mine, bounds, strict=True)]
    return {"bound_s_per_token": spread(bounds), "decode_over_bound": spread(over)}


def write(rounds: Rounds, plan: LargePlan, site: Site, out: Path) -> None:
    """The result, with the servers so far."""
    done = [name for name in plan.systems if rounds[name]]
    figures = {
        "what": "V2-Lite's sizes with experts in tiers; answers mean nothing: weights are random, "
        "routing is replayed",
        "shape": vars(plan.shape),
        "memory_bytes": plan.memory_bytes,
        "cache_bytes": plan.cache_bytes,
        "routed_bytes": plan.shape.routed_bytes,
        "adapters": list(site.adapters),
        "rounds": {name: len(rounds[name]) for name in plan.systems},
        "is_complete": all(len(rounds[name]) == plan.rounds for name in plan.systems),
        "rows": [row_of(name, rounds, plan) for name in done],
    }
    write_result("finemoe_large", figures, folder=out)


def measure(plan: LargePlan, site: Site, out: Path) -> None:
    """All systems, round by round: one server at a time, because two do not fit."""
    rounds: dict[str, list[Measured]] = {name: [] for name in plan.systems}
    for number in range(plan.rounds):
        for system in reversed(plan.systems) if number % 2 else plan.systems:
            found = measured(site, system, plan, number)
            rounds[system].append(found)
            print(
                f"round {number + 1}, {system}: ready in {found.ready_s:.0f} s, "
                f"{median_tpot(found.decode):.3f} s a token, peak "
                f"{gigabytes(found.peak_process_bytes)}, storage "
                f"{gigabytes(int(found.bytes_per_s))}/s",
                flush=True,
            )
            write(rounds, plan, site, out)


def plan_of(options: argparse.Namespace) -> LargePlan:
    """What the command line asks for."""
    shape = replace(LargeShape(), num_layers=options.layers)
    systems = tuple(name for name in SYSTEMS if name in options.systems)
    plan = LargePlan(shape, parse_bytes(options.memory, "--memory"), systems=systems)
    if options.quick:
        plan = replace(plan, rounds=1, is_quick=True)
    return plan if options.rounds is None else replace(plan, rounds=options.rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model where it is missing, measure, and write after each server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model; it is kept")
    parser.add_argument("--trace", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--configs", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--layers", type=int, default=27, help="fewer for a smaller machine")
    parser.add_argument("--memory", default="20GB", help="for everything (default: %(default)s)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round, few tokens")
    parser.add_argument("--write-only", action="store_true", help="write the model, and end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    plan = plan_of(options)
    print(f"{gigabytes(plan.cache_bytes)} for {gigabytes(plan.shape.routed_bytes)} of experts")
    with tempfile.TemporaryDirectory(prefix="finemoe-large-") as work:
        folder = options.folder.resolve()
        site = prepared(plan, folder, Path(work), options.configs, options.trace)
        if not options.write_only:
            measure(plan, site, options.out)


if __name__ == "__main__":
    main()
