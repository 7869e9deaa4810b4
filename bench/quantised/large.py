"""DeepSeek-V2-Lite's shape with quantised experts and four adapters, served: its memory, counted.

    random checkpoint in --folder (large_checkpoint.py), ESFT's published configs as adapters
    each system: a server --> the base and all adapters asked one by one, then all at once
    /proc/PID/smaps_rollup of its processes --[MemoryWatch]--> bench/results/quantised_large.json

**Answers mean nothing**: weights are random. Bytes are those of the real model, 15.7 billion
parameters of which 14.4 are routed experts: 28.8 GB in bfloat16, 14.4 in int8, beside 2.6 GB of all
else, which stays in bfloat16. Systems: `int8`, `int4`, and `int8-tiers`, whose experts have as much
memory as --memory leaves (`--expert-cache`). One that this machine cannot hold is not started: its
row says what it would need. A loaded adapter is twice in memory without tiers, in its slots and in
the host cache.

What counts for the goal is the proportional set size of all of the server's processes, from their
start to their end: what they wrote, share, and map of files, the checkpoint too while it is loaded.
Beside it without mapped files (`own`), since the server was ready (`serving`), and by how much the
machine's page cache grew, whoever used it (`cached`), which the kernel takes back when it wants.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.common.load import NO_PREFIX_CACHE, end_on_sigterm
from bench.common.record import RESULTS, write_result
from bench.common.scaled_model import PUBLISHED
from bench.elasticmoe.load import Ask, Stream, ask_once
from bench.elasticmoe.rounds import check_streams
from bench.finemoe.large import (
    ANSWER_SECONDS,
    KV_BYTES,
    KV_TOKENS,
    PROCESS_BYTES,
    START_SECONDS,
)
from bench.finemoe.large_memory import Held, MemoryWatch
from bench.finemoe.large_model import LargeShape, adapter_experts, trunk_bytes
from bench.quantised.large_checkpoint import checkpoint_bytes, write_adapter, write_base
from sgl_esft.byte_size import gigabytes, parse_bytes
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.zoo import serving

PERIOD_S = 0.5
MEMORY_SHARE = "0.95"  # of the machine's: weights alone are more than SGLang's default leaves them
QUICK_SHAPE = LargeShape(
    num_layers=3,
    hidden_size=128,
    dense_width=256,
    expert_width=128,
    num_heads=4,
    kv_lora_rank=64,
    nope_dim=32,
    rope_dim=16,
    vocab_size=512,
)


@dataclass(frozen=True)
class System:
    """How experts are held."""

    scheme: str
    in_tiers: bool = False


SYSTEMS = {"int8": System("int8"), "int8-tiers": System("int8", True), "int4": System("int4")}


@dataclass(frozen=True)
class Plan:
    """What is served. `num_new`: tokens of each answer."""

    shape: LargeShape
    memory_bytes: int
    configs: tuple[Path, ...]
    num_new: int = 24
    rounds: int = 2  # in each, the base and all adapters at once

    def cache_bytes(self, spec: MoeSpec) -> int:
        """For experts in tiers: at most the base's. Raises SystemExit where nothing is left."""
        trunk = trunk_bytes(self.shape)
        left = self.memory_bytes - trunk - KV_BYTES - PROCESS_BYTES
        if left <= 0:
            raise SystemExit(f"--memory {gigabytes(self.memory_bytes)} leaves nothing for experts")
        return min(left, checkpoint_bytes(self.shape, spec) - trunk)


@dataclass(frozen=True)
class Site:
    """What is on the disk, of one scheme."""

    base: Path
    adapters: Mapping[str, Path]

    @property
    def spec(self) -> MoeSpec:
        return read_moe_spec(self.base)


def prepared(plan: Plan, scheme: str, folder: Path) -> Site:
    """What is in `folder` already stays. Raises SystemExit."""
    base = folder / scheme / "base"
    write_base(plan.shape, scheme, base)
    adapters = {}
    for config in plan.configs:
        adapters[config.stem] = folder / scheme / "adapters" / config.stem
        write_adapter(config, base, plan.shape, adapters[config.stem])
    return Site(base, adapters)


def arguments(site: Site, system: System, plan: Plan) -> list[str]:
    """Of the launcher."""
    named = [f"{name}={path}" for name, path in site.adapters.items()]
    found = ["--model-path", str(site.base), "--dtype", "bfloat16", "--esft-adapters", *named]
    found += ["--max-total-tokens", str(KV_TOKENS), "--log-level", "warning", *NO_PREFIX_CACHE]
    found += ["--mem-fraction-static", MEMORY_SHARE]
    if not system.in_tiers:
        return found
    return [*found, "--expert-cache", f"{plan.cache_bytes(site.spec)}B"]


def adapter_bytes(plan: Plan, spec: MoeSpec) -> int:
    """Of all adapters' experts, once."""
    tuned = [adapter_experts(config, plan.shape) for config in plan.configs]
    return sum(len(ids) for experts in tuned for ids in experts.values()) * spec.expert_bytes


def needed_bytes(plan: Plan, system: System, spec: MoeSpec) -> int:
    """About what a server takes."""
    if system.in_tiers:
        weights = trunk_bytes(plan.shape) + plan.cache_bytes(spec)
    else:
        weights = checkpoint_bytes(plan.shape, spec) + 2 * adapter_bytes(plan, spec)
    return weights + KV_BYTES + PROCESS_BYTES


# ---- serving ----


@dataclass(frozen=True)
class Served:
    """One server, from its start to its end."""

    ready_s: float
    peak: Held
    serving: Held
    peak_cached_bytes: int
    num_answers: int
    distinct_answers: int  # to one prompt, of the base and the adapters
    differing_together: int  # answers to that prompt that were others in a mixed batch


def served(site: Site, system: System, plan: Plan) -> Served:
    """Raises ValueError where a request failed."""
    with MemoryWatch(PERIOD_S) as watch:
        began = time.monotonic()
        with serving.server(arguments(site, system, plan), START_SECONDS) as url:
            ready_s, watch.is_serving = time.monotonic() - began, True
            asks = [Ask(prompt(0), name, plan.num_new) for name in (None, *site.adapters)]
            alone = [asyncio.run(asked(url, [ask]))[0] for ask in asks]
            together = [asyncio.run(asked(url, asks)) for _ in range(plan.rounds)]
            others = [replace(ask, text=prompt(i)) for i, ask in enumerate(asks * 2, 1)]
            mixed = asyncio.run(asked(url, others))
    streams = [*alone, *(s for each in together for s in each), *mixed]
    check_streams(streams)
    pairs = [(a, b) for each in together for a, b in zip(alone, each, strict=True)]
    return Served(
        ready_s,
        watch.peak,
        watch.serving,
        watch.peak_cached_bytes,
        len(streams),
        len({stream.output_ids for stream in alone}),
        sum(a.output_ids != b.output_ids for a, b in pairs),
    )


async def asked(url: str, asks: Sequence[Ask]) -> list[Stream]:
    """All at once, so that they share batches."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(ask_once(session, url, ask) for ask in asks))


def prompt(number: int) -> str:
    """16 tokens: a token is a letter."""
    return "".join(chr(ord("a") + (7 * number + 3 * place) % 26) for place in range(16))


# ---- rows ----


def row_of(name: str, plan: Plan, spec: MoeSpec, found: Served | None) -> dict[str, Any]:
    """One system; without `found` it does not fit this machine."""
    system = SYSTEMS[name]
    row: dict[str, Any] = {
        "system": name,
        "checkpoint_bytes": checkpoint_bytes(plan.shape, spec),
        "adapter_bytes": adapter_bytes(plan, spec),
        "cache_bytes": plan.cache_bytes(spec) if system.in_tiers else None,
        "needed_bytes": needed_bytes(plan, system, spec),
        "is_served": found is not None,
    }
    if found is None:
        return row
    return {
        **row,
        "ready_s": found.ready_s,
        "peak_bytes": found.peak.total,
        "peak_own_bytes": found.peak.own,
        "serving_bytes": found.serving.total,
        "peak_cached_bytes": found.peak_cached_bytes,
        "answers": found.num_answers,
        "distinct_answers": found.distinct_answers,
        "differing_together": found.differing_together,
        "is_within_memory": found.peak.total < plan.memory_bytes,
    }


def measure(plan: Plan, systems: Sequence[str], folder: Path, out: Path) -> None:
    """One server after another; the result is written after each."""
    rows: list[dict[str, Any]] = []
    for name in systems:
        site = prepared(plan, SYSTEMS[name].scheme, folder)
        needed, there = needed_bytes(plan, SYSTEMS[name], site.spec), available_bytes()
        print(f"{name}: about {gigabytes(needed)} of {gigabytes(there)}", flush=True)
        found = served(site, SYSTEMS[name], plan) if needed <= there else None
        rows.append(row_of(name, plan, site.spec, found))
        print(rows[-1], flush=True)
        write(plan, rows, len(rows) == len(systems), out)


def available_bytes() -> int:
    """Of the machine's memory, what processes can have now."""
    return int(psutil.virtual_memory().available)


def write(plan: Plan, rows: Sequence[Mapping[str, Any]], is_complete: bool, out: Path) -> None:
    """The result, with the systems so far."""
    figures = {
        "what": "memory of servers of DeepSeek-V2-Lite's shape with quantised experts and "
        "adapters, as the operating system counts it; weights are random, answers mean nothing",
        "shape": vars(plan.shape),
        "memory_bytes": plan.memory_bytes,
        "machine_bytes": int(psutil.virtual_memory().total),
        "adapters": [config.stem for config in plan.configs],
        "is_complete": is_complete,
        "rows": list(rows),
    }
    write_result("quantised_large", figures, folder=out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the checkpoints where they are missing, serve, and write after each server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; it is kept")
    parser.add_argument(
        "--configs",
        type=Path,
        nargs="+",
        default=list(PUBLISHED),
        metavar="FILE",
        help="expert_cfg.json of adapters (default: four of ESFT's authors)",
    )
    parser.add_argument("--layers", type=int, default=27, help="fewer for a smaller machine")
    parser.add_argument("--memory", default="20GB", help="for everything (default: %(default)s)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--quick", action="store_true", help="a tiny shape, one round")
    parser.add_argument("--write-only", action="store_true", help="write the checkpoints, and end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    shape = QUICK_SHAPE if options.quick else replace(LargeShape(), num_layers=options.layers)
    plan = Plan(shape, parse_bytes(options.memory, "--memory"), tuple(options.configs))
    plan = replace(plan, rounds=1) if options.quick else plan
    if options.write_only:
        for scheme in dict.fromkeys(SYSTEMS[name].scheme for name in options.systems):
            prepared(plan, scheme, options.folder.resolve())
        return
    measure(plan, options.systems, options.folder.resolve(), options.out)


if __name__ == "__main__":
    main()
