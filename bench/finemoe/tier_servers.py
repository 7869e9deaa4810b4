"""Servers with experts in tiers, and what their own counters say of a window of requests.

    ZooModel, policy, Link --[tier_command]--> bench/common/load.py starts them, all at once
    a server without tiers --[layer_seconds]--> seconds of a layer, times r --> [link_of] -> Link
    url, asks --[window]--> Window: the client's times, and /metrics after minus before

A link of a given r is a throttle (`--expert-read-bandwidth`), so that r does not depend on the
disk, and what is fetched ahead is bounded by the same number (`--expert-loads-per-layer`). r is the
time to read one expert of the base, in times of a layer of a server that has all experts in memory:
the whole step over its layers. Reads of the base are aligned (`--expert-pack`); an adapter's
experts are not, and read up to twice as many pages where an expert is small.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from bench.common.load import ServerCommand
from bench.elasticmoe.load import Ask, Stream, make_asks, steady
from bench.elasticmoe.rounds import check_streams
from bench.elasticmoe.traffic import tpot, ttft
from sgl_esft import zoo
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.offload.pack import PackedLayout, pack_experts

_T = TypeVar("_T")
RESIDENT = "resident"  # a server that has all experts in memory
NONE = "lfu"  # nothing is fetched ahead
KEEPS_ONLY = ", nothing ahead"
NEW_TOKENS = range(16, 33)
_COMMON = ("--max-total-tokens", "16384", "--log-level", "warning", "--enable-metrics")


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo, and its base's experts in a file whose reads are aligned."""

    base: Path
    adapters: Mapping[str, Path]
    packed: Path

    @classmethod
    def of(cls, name: str, work: Path) -> ZooModel:
        """Packs into `work`. Raises SystemExit for one that was not trained yet."""
        base = zoo.base_path(name)
        if not (base / "config.json").exists():
            raise SystemExit(
                f"{base} is not there: python -m sgl_esft.zoo train --model {name} --out "
                f"{base.parent}, or use --model demo"
            )
        packed = work / "experts.esftpack"
        pack_experts(base, packed)
        return cls(base, zoo.adapter_paths(name), packed)

    @property
    def spec(self) -> MoeSpec:
        """Shapes of its experts."""
        return read_moe_spec(self.base)

    @property
    def read_bytes(self) -> int:
        """That one expert of the base is read with."""
        return PackedLayout(self.spec, 0).stride

    def asks(self, count: int, seed: int) -> list[Ask]:
        """Requests of base and adapters; other prompts and lengths for each seed."""
        return make_asks(list(self.adapters), count, NEW_TOKENS, seed)

    def arguments(self) -> list[str]:
        """Of the launcher, without tiers. Tiers read experts as the checkpoint has them."""
        named = [f"{name}={path}" for name, path in self.adapters.items()]
        adapters = ["--esft-adapters", *named] if named else []
        return ["--model-path", str(self.base), "--dtype", self.spec.dtype, *_COMMON, *adapters]


@dataclass(frozen=True)
class Link:
    """What reads experts."""

    r: float
    bytes_per_s: int


def link_of(model: ZooModel, r: float, layer_s: float) -> Link:
    """The throttle by which one expert takes r layers."""
    return Link(r, max(1, round(model.read_bytes / (r * layer_s))))


def tier_command(model: ZooModel, policy: str, link: Link, num_rows: int) -> ServerCommand:
    """`policy`: also RESIDENT, a server without tiers, and with KEEPS_ONLY behind one that predicts
    what to keep and fetches nothing ahead.
    """
    if policy == RESIDENT:
        return ServerCommand(model.arguments())
    loads = 0.0 if policy.endswith(KEEPS_ONLY) else 1 / link.r
    flags = ["--expert-cache", str(num_rows)]
    flags += ["--expert-policy", policy.removesuffix(KEEPS_ONLY)]
    flags += ["--expert-read-bandwidth", f"{link.bytes_per_s}B"]
    flags += ["--expert-loads-per-layer", f"{loads:g}", "--expert-pack", str(model.packed)]
    return ServerCommand([*model.arguments(), *flags])


# ---- what a server counted ----


@dataclass(frozen=True)
class Counted:
    """Of all ranks (sgl_esft/observe/expert_tier_metrics.py); all 0 without tiers."""

    asked: float = 0.0
    hits: float = 0.0
    demand: float = 0.0
    prefetched: float = 0.0
    useful: float = 0.0
    wasted: float = 0.0
    failures: float = 0.0
    stall_s: float = 0.0
    read_bytes: float = 0.0

    def minus(self, before: Counted) -> Counted:
        """What was counted since."""
        return Counted(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(Counted)))

    @property
    def hit_rate(self) -> float | None:
        """Of distinct experts of a step; None without tiers."""
        return self.hits / self.asked if self.asked else None


_NAMES = {
    ("expert_requests", ""): "asked",
    ("expert_hits", ""): "hits",
    ("expert_loads", "demand"): "demand",
    ("expert_loads", "prefetch"): "prefetched",
    ("expert_prefetches", "useful"): "useful",
    ("expert_prefetches", "wasted"): "wasted",
    ("expert_read_failures", ""): "failures",
    ("expert_stall_seconds", ""): "stall_s",
    ("expert_read_bytes", ""): "read_bytes",
}


def counted_in(text: str) -> Counted:
    """From the text of /metrics."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("sgl_esft:").removesuffix("_total")
            which = sample.labels.get("why", sample.labels.get("was", ""))
            field = _NAMES.get((name, which))
            if field is not None and sample.name.startswith("sgl_esft:"):
                found[field] = found.get(field, 0.0) + sample.value
    return Counted(**found)


def read_counted(url: str) -> Counted:
    """As of now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        return counted_in(response.read().decode())


# ---- a window of requests ----


@dataclass(frozen=True)
class Window:
    """What came of some requests: seconds of each, and the server's counters."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    tokens: int
    seconds: float
    counted: Counted

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def stall_per_token_s(self) -> float:
        return self.counted.stall_s / self.tokens


def window(url: str, asks: Sequence[Ask], concurrency: int) -> Window:
    """Ask them all, so many at a time. Raises ValueError when one fails."""
    before, began = read_counted(url), time.monotonic()
    streams = asyncio.run(steady(url, asks, concurrency))
    return window_of(streams, time.monotonic() - began, read_counted(url).minus(before))


def window_of(streams: Sequence[Stream], seconds: float, counted: Counted) -> Window:
    """From what a client saw. Raises ValueError for a stream, or a read, that failed."""
    check_streams(streams)
    if counted.failures:
        raise ValueError(f"{counted.failures:.0f} experts could not be read")
    return Window(
        tuple(map(ttft, streams)),
        tuple(map(tpot, streams)),
        tuple(stream.token_s[-1] - stream.sent_s for stream in streams),
        sum(len(stream.output_ids) for stream in streams),
        seconds,
        counted,
    )


def layer_seconds(url: str, model: ZooModel, num_asks: int) -> float:
    """Of a decoded token at batch 1; the dense layers are layers too."""
    window(url, model.asks(2, seed=1 << 20), 1)
    found = window(url, model.asks(num_asks, seed=1 << 21), 1)
    return statistics.median(found.tpot_s) / model.spec.num_layers


def in_turns(items: Sequence[_T], number: int) -> Sequence[_T]:
    """Forth in one round, back in the next."""
    return list(reversed(items)) if number % 2 else items
