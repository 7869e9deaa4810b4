"""ElasticMoE's figures 9 and 10: requests in time around a load step, and by rate, by strategy.

    a server of each strategy, load that steps up (or down) --[scale at that moment]-->
    share of requests in time, by time    --> elastic_figure9.json
    the same by request rate              --> elastic_figure10.json

Each device has KV for a few requests only (`--max-total-tokens`), so that more devices serve more
though the machine's cores stay the same. Rates are multiples of what one device serves, targets of
what an idle one needs (bench/elastic_traffic.py), measured once, on the first elastic server.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.elastic_bench import (
    ELASTIC,
    FEW_TOKENS,
    STRATEGIES,
    demo_asks,
    elastic_server,
    flags_of,
    has_standbys,
    measured_scale,
    options_of,
    wait_until_parked,
)
from bench.elastic_load import Stream
from bench.elastic_traffic import (
    Calibration,
    arrivals,
    calibrate,
    play,
    share_met,
    windows,
)
from bench.record import write_result
from sgl_elastic.coordinator.strategies import ScaleStrategy, devices_needed

WIDTH_S = 5.0
GOAL = 0.9  # the paper's target for the share of requests in time


@dataclass(frozen=True)
class Step:
    """A load step and the scale that answers it; rates over what one device serves."""

    name: str
    num_old: int
    num_new: int
    rate_before: float
    rate_after: float


STEPS = (Step("up", 1, 2, 0.5, 1.2), Step("down", 2, 1, 1.0, 0.4))


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    before_s: float = 15.0
    after_s: float = 45.0
    rates: tuple[float, ...] = (0.5, 1.0, 1.5)
    rate_s: float = 30.0
    scale_at_s: float = 5.0
    steps: tuple[Step, ...] = STEPS


QUICK = Plan(before_s=5.0, after_s=15.0, rates=(0.5,), rate_s=10.0, scale_at_s=2.0, steps=STEPS[:1])


@dataclass(frozen=True)
class Played:
    """What came of a trace with a scale in it. Times in seconds of the monotonic clock."""

    streams: list[Stream]
    scale_s: float
    ready_s: float  # seconds of the scale


async def play_and_scale(
    url: str, times: Sequence[float], at_s: float, num_old: int, num_new: int
) -> Played:
    """Play a trace, and scale `at_s` seconds after its beginning."""
    load = asyncio.create_task(play(url, demo_asks(), times))
    await asyncio.sleep(at_s)
    began = time.monotonic()
    scaled = await measured_scale(url, num_old, num_new)
    return Played(await load, began, scaled.ready_s)


def figure9_rows(
    strategy: str, step: Step, played: Played, known: Calibration
) -> list[dict[str, Any]]:
    """A row a window: share of requests in time, and the same for each device that is held."""
    needed = devices_needed(ScaleStrategy(strategy), step.num_old, step.num_new)
    rows = []
    for window in windows(played.streams, known.targets, played.scale_s, WIDTH_S):
        held = step.num_old if window.at_s < 0 else needed
        held = step.num_new if window.at_s > played.ready_s else held
        rows.append(
            {
                "strategy": strategy,
                "step": step.name,
                "at_s": window.at_s,
                "requests": window.num_requests,
                "share": window.share,
                "share_per_device": window.share / held,
            }
        )
    return rows


async def prepared(url: str, strategy: str, num_new: int) -> None:
    """The standby is there, where the strategy has any."""
    if has_standbys(STRATEGIES[strategy]):
        await asyncio.to_thread(wait_until_parked, url, num_new)


async def measure_step(
    url: str, strategy: str, step: Step, plan: Plan, known: Calibration
) -> list[dict[str, Any]]:
    """One strategy's part of figure 9, for one load step."""
    await prepared(url, strategy, step.num_new)
    served = known.requests_per_s
    spans = [
        (plan.before_s, step.rate_before * served),
        (plan.after_s, step.rate_after * served),
    ]
    times = arrivals(spans, seed=1)
    played = await play_and_scale(url, times, plan.before_s, step.num_old, step.num_new)
    return figure9_rows(strategy, step, played, known)


async def measure_rates(
    url: str, strategy: str, plan: Plan, known: Calibration
) -> list[dict[str, Any]]:
    """One strategy's part of figure 10: a scale 1 -> 2 at each rate, and back again."""
    rows = []
    for rate in plan.rates:
        await prepared(url, strategy, 2)
        times = arrivals([(plan.rate_s, rate * known.requests_per_s)], seed=2)
        played = await play_and_scale(url, times, plan.scale_at_s, 1, 2)
        share = share_met(played.streams, known.targets)
        rows.append({"strategy": strategy, "rate": rate, "requests": len(times), "share": share})
        await measured_scale(url, 2, 1)
    return rows


def calibration() -> Calibration:
    """Of one device."""
    with elastic_server(("--standby-ranks", "0"), 1, FEW_TOKENS) as url:
        return asyncio.run(calibrate(url, demo_asks()))


def write(name: str, what: str, rows: list[dict[str, Any]], common: Mapping[str, Any]) -> None:
    """One result."""
    figures = {key: value for key, value in common.items() if key != "out"}
    write_result(name, {"what": what, **figures, "rows": rows}, folder=common["out"])


def main() -> None:
    """Measure and write both results, after each strategy."""
    options: argparse.Namespace = options_of(__doc__.partition("\n")[0], 1)
    plan = QUICK if options.quick else Plan()
    names = options.strategies or ([ELASTIC] if options.quick else list(STRATEGIES))
    known = calibration()
    common = {
        "out": options.out,
        "goal": GOAL,
        "targets": vars(known.targets),
        "requests_per_s": known.requests_per_s,
        "plan": {"before_s": plan.before_s, "after_s": plan.after_s, "rate_s": plan.rate_s},
    }
    over_time: list[dict[str, Any]] = []
    by_rate: list[dict[str, Any]] = []
    for name in names:
        print(name, flush=True)
        for step in plan.steps:
            flags = flags_of(name, step.num_new)
            with elastic_server(flags, step.num_old, FEW_TOKENS) as url:
                over_time += asyncio.run(measure_step(url, name, step, plan, known))
        with elastic_server(flags_of(name, 2), 1, FEW_TOKENS) as url:
            by_rate += asyncio.run(measure_rates(url, name, plan, known))
        done = {**common, "is_complete": name == names[-1]}
        write("elastic_figure9", "Requests in time around a load step", over_time, done)
        write("elastic_figure10", "Requests in time by request rate", by_rate, done)


if __name__ == "__main__":
    main()
