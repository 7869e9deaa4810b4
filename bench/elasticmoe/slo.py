"""ElasticMoE's figures 9 and 10: requests in time around a load step, and by rate, by strategy.

    a server of each strategy, load that steps up (or down) --[scale at that moment]-->
    share of requests in time, by time    --> elasticmoe_figure9.json
    the same by request rate              --> elasticmoe_figure10.json

Each device has KV for a few requests only (`--max-total-tokens`), so that more devices serve more
though the machine's cores stay the same. Of the scaled model they do; of the demo's, whose steps
are all overhead, two devices on two cores serve less than one (`--model demo`). Rates are multiples
of what one device serves, targets of what an idle one needs (bench/elasticmoe/traffic.py), measured
once, on the first elastic server.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.record import write_result
from bench.elasticmoe.load import Ask, Stream
from bench.elasticmoe.rounds import (
    ELASTIC,
    FEW_TOKENS,
    MODELS,
    STRATEGIES,
    Model,
    asks_of,
    elastic_server,
    flags_of,
    has_standbys,
    in_turn,
    measured_scale,
    options_of,
    result_name,
    wait_until_parked,
)
from bench.elasticmoe.traffic import Calibration, arrivals, calibrate, play, share_met, windows
from sgl_elastic.baselines.strategies import ScaleStrategy, devices_needed

ROUNDS = 3
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
class Offered:
    """What is served, what it is asked, and what one idle device of it can do."""

    model: Model
    asks: Sequence[Ask]
    known: Calibration


@dataclass(frozen=True)
class Played:
    """What came of a trace with a scale in it. Times in seconds of the monotonic clock."""

    streams: list[Stream]
    scale_s: float
    ready_s: float  # seconds of the scale


async def play_and_scale(
    url: str, asks: Sequence[Ask], times: Sequence[float], at_s: float, sizes: tuple[int, int]
) -> Played:
    """Play a trace, and scale `at_s` seconds after its beginning."""
    load = asyncio.create_task(play(url, asks, times))
    await asyncio.sleep(at_s)
    began = time.monotonic()
    scaled = await measured_scale(url, *sizes)
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
    url: str, strategy: str, step: Step, plan: Plan, offered: Offered, seed: int
) -> list[dict[str, Any]]:
    """One strategy's part of figure 9, for one load step."""
    await prepared(url, strategy, step.num_new)
    served = offered.known.requests_per_s
    spans = [
        (plan.before_s, step.rate_before * served),
        (plan.after_s, step.rate_after * served),
    ]
    times = arrivals(spans, seed=seed)
    sizes = (step.num_old, step.num_new)
    played = await play_and_scale(url, offered.asks, times, plan.before_s, sizes)
    return figure9_rows(strategy, step, played, offered.known)


async def measure_rates(
    url: str, strategy: str, plan: Plan, offered: Offered, seed: int
) -> list[dict[str, Any]]:
    """One strategy's part of figure 10: a scale 1 -> 2 at each rate, and back again."""
    rows = []
    for rate in plan.rates:
        await prepared(url, strategy, 2)
        times = arrivals([(plan.rate_s, rate * offered.known.requests_per_s)], seed=seed)
        played = await play_and_scale(url, offered.asks, times, plan.scale_at_s, (1, 2))
        share = share_met(played.streams, offered.known.targets)
        rows.append({"strategy": strategy, "rate": rate, "requests": len(times), "share": share})
        await measured_scale(url, 2, 1)
    return rows


def offer(model: Model) -> Offered:
    """Measured on one device."""
    asks = asks_of(model)
    with elastic_server(("--standby-ranks", "0"), 1, FEW_TOKENS, model) as url:
        return Offered(model, asks, asyncio.run(calibrate(url, asks)))


def measure(
    strategy: str, plan: Plan, offered: Offered, number: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A strategy's rows of figures 9 and 10 in one round, whose arrivals are all strategies'.

    There is a server for each load step, and one for all rates.
    """
    figure9_seed, figure10_seed = 2 * number + 1, 2 * number + 2
    over_time: list[dict[str, Any]] = []
    for step in plan.steps:
        flags = flags_of(strategy, step.num_new)
        with elastic_server(flags, step.num_old, FEW_TOKENS, offered.model) as url:
            over_time += asyncio.run(measure_step(url, strategy, step, plan, offered, figure9_seed))
    with elastic_server(flags_of(strategy, 2), 1, FEW_TOKENS, offered.model) as url:
        return over_time, asyncio.run(measure_rates(url, strategy, plan, offered, figure10_seed))


def write(name: str, what: str, rows: list[dict[str, Any]], common: Mapping[str, Any]) -> None:
    """One result."""
    figures = {key: value for key, value in common.items() if key != "out"}
    named = result_name(name, common["model"])
    write_result(named, {"what": what, **figures, "rows": rows}, folder=common["out"])


def main() -> None:
    """Measure and write both results, after each round."""
    options: argparse.Namespace = options_of(__doc__.partition("\n")[0], ROUNDS, has_models=True)
    plan = QUICK if options.quick else Plan()
    names = options.strategies or ([ELASTIC] if options.quick else list(STRATEGIES))
    offered = offer(MODELS[options.model]())
    common = {
        "out": options.out,
        "model": options.model,
        "goal": GOAL,
        "targets": vars(offered.known.targets),
        "requests_per_s": offered.known.requests_per_s,
        "plan": {"before_s": plan.before_s, "after_s": plan.after_s, "rate_s": plan.rate_s},
    }
    over_time: list[dict[str, Any]] = []
    by_rate: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name in in_turn(names, number):
            print(f"round {number + 1}: {name}", flush=True)
            more_over_time, more_by_rate = measure(name, plan, offered, number)
            over_time += [{"round": number, **row} for row in more_over_time]
            by_rate += [{"round": number, **row} for row in more_by_rate]
        done = {**common, "rounds": number + 1, "is_complete": number + 1 == options.rounds}
        write("elasticmoe_figure9", "Requests in time around a load step", over_time, done)
        write("elasticmoe_figure10", "Requests in time by request rate", by_rate, done)


if __name__ == "__main__":
    main()
