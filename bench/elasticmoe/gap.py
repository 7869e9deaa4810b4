"""What running streams notice of an elastic scale, and what it costs in memory and copies.

    one server under a steady mixed load --[scale along WALK]--> for each scale
        longest gap between two tokens of any stream around it, over what is allowed
        new requests held, failed streams, bytes copied, and the peak of all devices' memory over
        that of the larger configuration
    --> elasticmoe_gap.json

Allowed are twice the 99th percentile of the gaps in the seconds before the scale, plus 100 ms.
Peaks are those of bounded KV on devices that have room: KV that fills every budget, as it does by
default, would hide them. They are over what the larger configuration needs, of all devices at one
time, and of the device for which it is the most.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.common.record import spread, write_result
from bench.elasticmoe.load import Stream, steady
from bench.elasticmoe.rounds import (
    SOME_KV,
    DeviceMemory,
    MemorySampler,
    demo_asks,
    elastic_server,
    measured_scale,
    options_of,
    wait_until_parked,
)

WALK = (1, 2, 3, 2, 1, 2, 4, 1)
QUICK_WALK = (1, 2, 1)
NUM_STREAMS = 8
STANDBYS = ("--standby-ranks", "8")
ROUNDS = 3
BEFORE_S = 8.0  # of steady load that a scale's gap is compared with
AROUND_S = 1.0  # a gap that ends so long after the scale is of its making
AFTER_S = 4.0  # until then the next standby's start may show
EXTRA_S = 0.1  # allowed beyond twice the steady gap


@dataclass(frozen=True)
class Seen:
    """One scale; times in seconds of the monotonic clock."""

    step: str
    began_s: float
    ended_s: float
    held_s: float
    phases: dict[str, float]
    copied_bytes: int
    peak_over_larger: float  # bytes of all devices together
    device_peak_over_larger: float  # the device for which it is the most


@dataclass(frozen=True)
class Gaps:
    """Of all streams around one scale."""

    steady_p99_s: float
    longest_s: float  # from the request to scale until AROUND_S after its end
    later_s: float  # the longest from then until AFTER_S

    @property
    def allowed_s(self) -> float:
        """What the longest may be."""
        return 2 * self.steady_p99_s + EXTRA_S


def gaps_around(streams: Sequence[Stream], began_s: float, ended_s: float) -> Gaps:
    """Raises ValueError where a window has no gap at all."""
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    before = _between(gaps, began_s - BEFORE_S, began_s)
    around = _between(gaps, began_s, ended_s + AROUND_S)
    later = _between(gaps, ended_s + AROUND_S, ended_s + AFTER_S)
    if len(before) < 2 or not around:
        raise ValueError("no tokens before or around the scale: is there any load?")
    p99_s = statistics.quantiles(before, n=100)[98]
    return Gaps(p99_s, max(around), max(later, default=0.0))


def _between(gaps: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[float]:
    return [seconds for at_s, seconds in gaps if begin_s <= at_s < end_s]


def rows_of(seen: Sequence[tuple[Seen, Gaps]]) -> list[dict[str, Any]]:
    """A row a kind of step, all rounds and repetitions together."""
    rows = []
    for step in dict.fromkeys(each.step for each, _ in seen):
        chosen = [(each, gaps) for each, gaps in seen if each.step == step]
        rows.append(
            {
                "step": step,
                "scales": len(chosen),
                "longest_over_allowed": spread([g.longest_s / g.allowed_s for _, g in chosen]),
                "longest_s": spread([g.longest_s for _, g in chosen]),
                "later_s": spread([g.later_s for _, g in chosen]),
                "steady_p99_s": spread([g.steady_p99_s for _, g in chosen]),
                "held_s": spread([each.held_s for each, _ in chosen]),
                "peak_over_larger": spread([each.peak_over_larger for each, _ in chosen]),
                "device_peak_over_larger": spread(
                    [each.device_peak_over_larger for each, _ in chosen]
                ),
                "copied_bytes": spread([each.copied_bytes for each, _ in chosen]),
            }
        )
    return rows


def device_ratio(peak: Mapping[int, int], *settled: Mapping[int, int]) -> float:
    """The largest of a device's peak over what it has in the configuration that needs more of it.

    A device that is there in neither has no ratio: it took memory that nobody needed. That raises
    ValueError.
    """
    needed = {d: max(each.get(d, 0) for each in settled) for d in peak}
    if not all(needed.values()):
        raise ValueError(f"memory of devices that are in no configuration: {peak} of {needed}")
    return max(peak[d] / needed[d] for d in peak)


async def one_scale(url: str, num_old: int, num_new: int, memory: DeviceMemory) -> Seen:
    """A scale that a standby waits for, after a while of steady load."""
    await asyncio.to_thread(wait_until_parked, url, num_new)
    await asyncio.sleep(BEFORE_S)
    before = memory.now()
    began_s = time.monotonic()
    with MemorySampler(memory) as sampler:
        scaled = await measured_scale(url, num_old, num_new)
    ended_s = time.monotonic()
    await asyncio.sleep(AFTER_S + 1.0)
    after = memory.now()
    return Seen(
        step=scaled.step,
        began_s=began_s,
        ended_s=ended_s,
        held_s=scaled.gap_s,
        phases=dict(scaled.phases),
        copied_bytes=scaled.copied_bytes,
        peak_over_larger=sampler.peak_bytes / max(sum(before.values()), sum(after.values())),
        device_peak_over_larger=device_ratio(sampler.device_peak_bytes, before, after),
    )


async def walked(url: str, sizes: Sequence[int]) -> tuple[list[Seen], list[Stream]]:
    """All scales of a walk, and all streams that ran meanwhile."""
    stop = asyncio.Event()
    load = asyncio.create_task(steady(url, demo_asks(), NUM_STREAMS, stop))
    seen, memory = [], DeviceMemory()
    memory.now()  # whose files are whose, before any is a peer's too
    try:
        for num_old, num_new in pairwise(sizes):
            seen.append(await one_scale(url, num_old, num_new, memory))
    finally:
        stop.set()
        streams = await load
    return seen, streams


def write(
    seen: Sequence[tuple[Seen, Gaps]], num_streams: int, failed: int, options: Any, done: int
) -> None:
    """bench/results/elasticmoe_gap.json, with the rounds so far."""
    figures = {
        "what": "What running streams notice of an elastic scale",
        "rounds": done,
        "is_complete": done == options.rounds,
        "streams": NUM_STREAMS,
        "requests": num_streams,
        "failed": failed,
        "rows": rows_of(seen),
    }
    write_result("elasticmoe_gap", figures, folder=options.out)


def main() -> None:
    """Walk, measure, write; after each round."""
    options: argparse.Namespace = options_of(__doc__.partition("\n")[0], ROUNDS)
    sizes = QUICK_WALK if options.quick else WALK
    found: list[tuple[Seen, Gaps]] = []
    num_streams = failed = 0
    for number in range(options.rounds):
        with elastic_server(STANDBYS, sizes[0], SOME_KV) as url:
            seen, streams = asyncio.run(walked(url, sizes))
        num_streams += len(streams)
        failed += sum(bool(stream.error) for stream in streams)
        for each in seen:
            gaps = gaps_around(streams, each.began_s, each.ended_s)
            found.append((each, gaps))
            print(f"  {each.step}: {gaps.longest_s:.3f} s of {gaps.allowed_s:.3f} s", flush=True)
        write(found, num_streams, failed, options, number + 1)


if __name__ == "__main__":
    main()
