"""Is the autoscaler worth its scales? A day's load in ten minutes, with it and without.

    seed --[day_load]--> times of requests, the same for each run of a round
    static server of each size, autoscaled server --[run_day]--> Ran: answers, scale operations
    Ran by name --[rows_of]--> attainment, device-seconds, scales, wrong and failed answers
    static runs --[hindsight]--> the best schedule    rows --[claims_of]--> what holds, what not
    --> elasticmoe_day.json, of a run that is to be whole

A round is a seed. A request is in time by the definition of sgl_elastic/autoscale/slo.py, as its
client sees it; one that fails is not. Targets and rates are multiples of what the smallest size
showed at the start (bench/elasticmoe/traffic.py), and the autoscaler is given the same targets.
Device-seconds are of the day alone, by the operations' own times (device_time.py). A wrong answer
differs from what an idle server gave: batches round differently, so static runs may have some too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, write_result
from bench.elasticmoe.day_load import Day, day_of, spans
from bench.elasticmoe.device_time import Operation, device_seconds, devices_over_time, holdings
from bench.elasticmoe.hindsight import best_schedule
from bench.elasticmoe.load import Ask, Stream, differences, steady
from bench.elasticmoe.rounds import (
    ELASTIC,
    FEW_TOKENS,
    MODELS,
    Model,
    asks_of,
    check_streams,
    elastic_server,
    flags_of,
    result_name,
    wait_until_parked,
)
from bench.elasticmoe.traffic import (
    Calibration,
    Targets,
    arrivals,
    calibrate,
    met,
    play,
    tpot,
    ttft,
)
from sgl_elastic.autoscale.policy import AutoscalePolicy, parse_policy

SECONDS = 600.0
# Not those by which the policy was chosen.
SEEDS = (7, 8, 9)
NUM_WINDOWS = 60
# Of what the smallest size serves when it is busy. At 1.0 a burst at noon is beyond what two sizes
# serve where their devices share a processor's memory, and nothing can be told from late answers.
NIGHT, NOON = 0.2, 0.8
# The waits between two scales are an hour's in a day of ten minutes, not their defaults.
POLICY = '{"min_devices": 1, "max_devices": 2, "up_cooldown_s": 10, "down_cooldown_s": 20}'
# What we claim of the autoscaler, over static largest in the same round.
LEAST_ATTAINMENT = 0.95
MOST_DEVICE_SECONDS = 0.7
AUTOSCALE, SMALLEST, LARGEST = "autoscale", "static smallest", "static largest"
HINDSIGHT = "best schedule in hindsight"
_STATIC_FLAGS = ("--standby-ranks", "0", "--spare-ranks", "0")
_NUM_WARM = 8  # requests, before the day begins
_MAX_ERRORS = 5  # different ones of a run that are written down


@dataclass(frozen=True)
class Offered:
    """What is served, what it is asked, and what an idle server of the smallest size does."""

    model: Model
    asks: Sequence[Ask]
    known: Calibration
    expected: Mapping[Ask, tuple[int, ...]]


@dataclass(frozen=True)
class Run:
    """A server for a day: its devices at midnight, and flags."""

    name: str
    num_devices: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Ran:
    """What came of a day. `began_s` in Unix seconds, as the operations' times are."""

    num_devices: int  # at midnight
    streams: Sequence[Stream]  # in the order of the times
    began_s: float = 0.0
    operations: Sequence[Operation] = ()


@dataclass(frozen=True)
class Round:
    """All runs of one seed."""

    seed: int
    day: Day
    times: Sequence[float]
    ran: Mapping[str, Ran]

    def windows_met(self, name: str, targets: Targets) -> list[int]:
        """Requests in time, by the window in which they were to be sent: every run's the same."""
        counts = [0] * NUM_WINDOWS
        for at_s, stream in zip(self.times, self.ran[name].streams, strict=True):
            counts[self._window(at_s)] += met(stream, targets)
        return counts

    def windows_sent(self) -> list[int]:
        """All requests, by window."""
        places = [self._window(at_s) for at_s in self.times]
        return [places.count(number) for number in range(NUM_WINDOWS)]

    def _window(self, at_s: float) -> int:
        return min(NUM_WINDOWS - 1, int(at_s / self.day.seconds * NUM_WINDOWS))


def static_name(size: int, policy: AutoscalePolicy) -> str:
    """Of a server that keeps a size; those between have their number."""
    ends = {policy.min_devices: SMALLEST, policy.max_devices: LARGEST}
    return ends.get(size, f"static {size}")


def runs_of(policy: AutoscalePolicy, text: str, targets: Targets) -> list[Run]:
    """The autoscaled server, and one of each static size: hindsight chooses among all."""
    slo = ("--slo-ttft", str(targets.ttft_s), "--slo-tpot", str(targets.tpot_s))
    flags = (*flags_of(ELASTIC, policy.max_devices), "--autoscale", text, *slo)
    sizes = range(policy.min_devices, policy.max_devices + 1)
    static = [Run(static_name(size, policy), size, _STATIC_FLAGS) for size in sizes]
    return [Run(AUTOSCALE, policy.min_devices, flags), *static]


def offer(model: Model, size: int) -> Offered:
    """Measured on an idle server. Raises ValueError when a request of its failed."""
    asks = asks_of(model)
    with elastic_server(_STATIC_FLAGS, size, FEW_TOKENS, model) as url:
        known = asyncio.run(calibrate(url, asks))
        alone = asyncio.run(steady(url, asks, 1))
    check_streams(alone)
    return Offered(model, asks, known, {each.ask: each.output_ids for each in alone})


async def played(
    url: str, asks: Sequence[Ask], times: Sequence[float], seconds: float
) -> tuple[float, list[Stream]]:
    """When the day began, in Unix seconds, and its streams; not before the day is over."""
    await steady(url, asks[:_NUM_WARM], 1)
    began_s = time.time()
    streams = await play(url, asks, times)
    await asyncio.sleep(max(0.0, began_s + seconds - time.time()))
    return began_s, streams


def run_day(run: Run, offered: Offered, times: Sequence[float], seconds: float) -> Ran:
    """A server of its own, from midnight to midnight."""
    with elastic_server(run.flags, run.num_devices, FEW_TOKENS, offered.model) as url:
        if run.name == AUTOSCALE and not wait_until_parked(url, run.num_devices + 1):
            print("  no standby was parked in time: the first scale starts an instance", flush=True)
        began_s, streams = asyncio.run(played(url, offered.asks, times, seconds))
        with urlopen(f"{url}/v1/scale?limit=1000", timeout=30) as answer:
            operations = json.load(answer)["operations"]
    return Ran(run.num_devices, streams, began_s, operations)


def attainment(streams: Sequence[Stream], targets: Targets) -> dict[str, float]:
    """Shares of all requests sent, within each target and within both; a failed one is in none."""
    in_time = {
        "ttft": [not each.error and ttft(each) <= targets.ttft_s for each in streams],
        "tpot": [tpot(each) <= targets.tpot_s for each in streams],
        "both": [met(each, targets) for each in streams],
    }
    return {name: sum(found) / max(1, len(found)) for name, found in in_time.items()}


def row_of(name: str, found: Round, offered: Offered) -> dict[str, Any]:
    """What one run came to."""
    ran, targets = found.ran[name], offered.known.targets
    ended_s = ran.began_s + found.day.seconds
    held = holdings(ran.operations, ran.began_s, ran.num_devices)
    scales = [each for each in ran.operations if each["id"].startswith("scale-")]  # no recovery
    states = [each["state"] for each in scales if ran.began_s <= each["created_s"] < ended_s]
    return {
        "seed": found.seed,
        "run": name,
        "attainment": attainment(ran.streams, targets),
        "device_seconds": device_seconds(held, ran.began_s, ended_s),
        "scales": len(states),
        "scales_failed": len(states) - states.count("succeeded"),
        "wrong": len(differences(ran.streams, offered.expected)),
        "failed": sum(bool(each.error) for each in ran.streams),
        "errors": sorted({each.error for each in ran.streams if each.error})[:_MAX_ERRORS],
        "windows_met": found.windows_met(name, targets),
        "devices": devices_over_time(held, ran.began_s, ended_s),
    }


def hindsight_row(found: Round, targets: Targets) -> dict[str, Any]:
    """The best schedule's: composed of the static runs, so it has no answers of its own."""
    static = {name: ran for name, ran in found.ran.items() if name != AUTOSCALE}
    by_size = {ran.num_devices: found.windows_met(name, targets) for name, ran in static.items()}
    best = best_schedule(by_size, LEAST_ATTAINMENT * sum(found.windows_met(LARGEST, targets)))
    width_s = found.day.seconds / NUM_WINDOWS
    return {
        "seed": found.seed,
        "run": HINDSIGHT,
        "attainment": {"both": best.num_met / max(1, len(found.times))},
        "device_seconds": best.cost * width_s,
        "scales": best.num_scales,
        "windows_met": [by_size[size][place] for place, size in enumerate(best.sizes)],
        "devices": [(place * width_s, size) for place, size in enumerate(best.sizes)],
    }


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one round, each over its static largest; 0 where that has nothing."""
    base = next(row for row in rows if row["run"] == LARGEST)
    met_there, cost_there = base["attainment"]["both"], base["device_seconds"]
    return [
        {
            **row,
            "attainment_over_largest": _ratio(row["attainment"]["both"], met_there),
            "device_seconds_over_largest": _ratio(row["device_seconds"], cost_there),
        }
        for row in rows
    ]


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0


def rows_of(found: Round, offered: Offered) -> list[dict[str, Any]]:
    """A row a run, and the schedule in hindsight."""
    rows = [row_of(name, found, offered) for name in found.ran]
    return with_ratios([*rows, hindsight_row(found, offered.known.targets)])


def claims_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is claimed of the autoscaler, and whether it holds: two lines a seed."""
    return [
        {"seed": row["seed"], "claim": words, "measured": measured, "holds": holds}
        for row in rows
        if row["run"] == AUTOSCALE
        for words, measured, holds in _claims(row)
    ]


def _claims(row: Mapping[str, Any]) -> list[tuple[str, float, bool]]:
    met_ratio, cost_ratio = row["attainment_over_largest"], row["device_seconds_over_largest"]
    least = f"attainment at least {LEAST_ATTAINMENT} of {LARGEST}'s"
    most = f"device-seconds at most {MOST_DEVICE_SECONDS} of {LARGEST}'s"
    return [
        (least, met_ratio, met_ratio >= LEAST_ATTAINMENT),
        # That it serves nothing at all would be cheap: no device-seconds are no ratio.
        (most, cost_ratio, 0 < cost_ratio <= MOST_DEVICE_SECONDS),
    ]


def day_row(found: Round) -> dict[str, Any]:
    """What a seed's day offered, by window."""
    width_s = found.day.seconds / NUM_WINDOWS
    loads = [rate for _, rate in spans(found.day, width_s)]
    return {"seed": found.seed, "rate": loads, "windows_sent": found.windows_sent()}


def figures_of(
    rounds: Sequence[Round], offered: Offered, options: argparse.Namespace
) -> dict[str, Any]:
    """All that the result says."""
    rows = [row for each in rounds for row in rows_of(each, offered)]
    return {
        "what": "A day's load with the autoscaler, with static sizes, and in hindsight",
        "model": options.model,
        "is_complete": len(rounds) == len(options.seeds),
        "seconds": options.seconds,
        "policy": options.policy,
        "targets": vars(offered.known.targets),
        "requests_per_s": offered.known.requests_per_s,
        "night": options.night,
        "noon": options.noon,
        "claims": claims_of(rows),
        "days": [day_row(each) for each in rounds],
        "rows": rows,
    }


def one_round(
    seed: int, runs: Sequence[Run], offered: Offered, options: argparse.Namespace
) -> Round:
    """All runs of a seed, one after the other, in the order given."""
    served = offered.known.requests_per_s
    day = day_of(options.seconds, options.night * served, options.noon * served, seed)
    times = arrivals(spans(day), seed)
    ran: dict[str, Ran] = {}
    for run in runs:
        print(f"seed {seed}, {run.name}: {len(times)} requests", flush=True)
        ran[run.name] = run_day(run, offered, times, options.seconds)
        show(row_of(run.name, Round(seed, day, times, ran), offered))
    return Round(seed, day, times, ran)


def show(row: Mapping[str, Any]) -> None:
    """One line of one run."""
    shares = ", ".join(f"{name} {share:.3f}" for name, share in row["attainment"].items())
    counts = ", ".join(
        f"{row[name]} {name.replace('_', ' ')}"
        for name in ("scales", "scales_failed", "wrong", "failed")
        if name in row
    )
    print(f"  in time: {shares}; {row['device_seconds']:.0f} device-seconds; {counts}", flush=True)


def show_claims(figures: Mapping[str, Any]) -> None:
    """Every row's ratios, then each claim with what was measured."""
    for row in figures["rows"]:
        ratios = row["attainment_over_largest"], row["device_seconds_over_largest"]
        print(f"seed {row['seed']}, {row['run']}: {ratios[0]:.3f} of {LARGEST}'s attainment,")
        print(f"  {ratios[1]:.3f} of its device-seconds, {row['scales']} scales")
    for each in figures["claims"]:
        verdict = "holds" if each["holds"] else "DOES NOT HOLD"
        print(f"seed {each['seed']}: {each['claim']}: {each['measured']:.3f}: {verdict}")


def is_whole(options: argparse.Namespace) -> bool:
    """Whether a run is long enough to be a result: a shorter one is a trial."""
    return options.seconds >= SECONDS and len(set(options.seeds)) >= len(SEEDS)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises ElasticConfigError for a policy that is none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a day")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--policy", default=POLICY, help="the server's --autoscale")
    parser.add_argument("--night", type=float, default=NIGHT, help="rate, of what one serves")
    parser.add_argument("--noon", type=float, default=NOON)
    parser.add_argument("--model", choices=list(MODELS), default=next(iter(MODELS)))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.sizes = parse_policy(options.policy)
    if options.sizes.min_devices == options.sizes.max_devices:
        parser.error("min_devices is max_devices: give a policy that can scale")
    if not 0 < options.night <= options.noon:
        parser.error(f"--night {options.night:g} and --noon {options.noon:g}: 0 < night <= noon")
    return options


def main() -> None:
    """Measure; write bench/results/elasticmoe_day.json after each round of a whole run."""
    options = parsed()
    end_on_sigterm()  # servers go with the bench
    offered = offer(MODELS[options.model](), options.sizes.min_devices)
    runs = runs_of(options.sizes, options.policy, offered.known.targets)
    rounds = []
    for number, seed in enumerate(options.seeds):
        turn = runs if number % 2 == 0 else runs[::-1]
        rounds.append(one_round(seed, turn, offered, options))
        figures = figures_of(rounds, offered, options)
        show_claims(figures)
        if is_whole(options):
            write_result(result_name("elasticmoe_day", options.model), figures, folder=options.out)
    if not is_whole(options):
        print(f"Not written: a result takes {SECONDS:g} s and {len(SEEDS)} seeds.")


if __name__ == "__main__":
    main()
