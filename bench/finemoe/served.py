"""FineMoE's figures 10 and 11 on served models: times and hits by policy, and their distribution.

    one server a policy, all up, one busy at a time --[one_round]--> Window by phase and policy
        cold     the first requests after the start, one at a time: caches and map stores are empty
        online   requests that arrive when they arrive; the stores have cold's maps, and learn
        warm     one at a time again
    rounds, each with fresh servers --> finemoe_figure10.json, finemoe_figure11.json

Times mean nothing in themselves: ratios do, each within its round, to `lfu`, which fetches nothing
ahead, and to `resident`, which has all experts in memory. A link's speed is set by r
(tier_servers.py). ProMoE's predictor (`learned`) is trained beforehand, on a trace, and left out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm, servers
from bench.common.record import RESULTS, spread, write_result
from bench.elasticmoe import traffic
from bench.elasticmoe.load import Ask
from bench.finemoe.tier_servers import (
    KEEPS_ONLY,
    NONE,
    RESIDENT,
    Window,
    ZooModel,
    in_turns,
    layer_seconds,
    link_of,
    read_counted,
    tier_command,
    window,
    window_of,
)
from sgl_esft import zoo

INSTEAD_OF = {
    "stream": "DeepSpeed-Inference",
    "next-gate": "Mixtral-Offloading",
    "request-counts": "MoE-Infinity",
    "finemoe": "FineMoE",
}
SYSTEMS = (
    RESIDENT,
    *INSTEAD_OF,
    f"finemoe{KEEPS_ONLY}",
    "static",
    "lru",
    NONE,
    "auto",
)
PHASES = ("cold", "online", "warm")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
PAPER = {
    "figure10": "first token -74, -67, -56, -53%, each further one -46, -38, -27, -22%, against "
    "DeepSpeed-Inference, Mixtral-Offloading, ProMoE and MoE-Infinity; hit rate +14, +37, +68% "
    "over the last three; offline, batch 1, an iteration takes seconds",
    "figure11": "curves; 256 requests at 2.91 a second, the store empty at first",
}
_CALIBRATION_ASKS = 6
_WARM_UP = 2  # requests to each server that count nowhere


@dataclass(frozen=True)
class ServedPlan:
    """How much is asked."""

    model: str = "deep"
    link_speeds: tuple[float, ...] = (0.3, 1.0)  # r
    share_of_rows: float = 0.5
    rounds: int = 5
    num_asks: int = 8  # of a window at batch 1
    num_online: int = 24
    busy: float = 0.7  # requests a second, of what `lfu` would answer one at a time
    systems: tuple[str, ...] = SYSTEMS


Round = Mapping[str, Mapping[str, Window]]  # phase -> system -> window


def one_round(urls: Mapping[str, str], model: ZooModel, plan: ServedPlan, number: int) -> Round:
    """All phases, each on every server in turn; each round has prompts of its own."""
    seed = 100 * (number + 1)
    names = in_turns(list(urls), number)
    for name in names:
        window(urls[name], model.asks(_WARM_UP, seed), 1)

    def at_batch_one(seed: int) -> dict[str, Window]:
        return {name: window(urls[name], model.asks(plan.num_asks, seed), 1) for name in names}

    cold = at_batch_one(seed + 1)
    rate = plan.busy / statistics.median(cold[NONE].latency_s)
    asks = model.asks(plan.num_online, seed + 2)
    times = arrivals(rate, plan.num_online, seed)
    played = {name: online(urls[name], asks, times) for name in names}
    return {"cold": cold, "online": played, "warm": at_batch_one(seed + 3)}


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """The first `count` times of a Poisson process."""
    seconds = 4.0 * count / rate
    return traffic.arrivals([(seconds, rate)], seed)[:count]


def online(url: str, asks: Sequence[Ask], times: Sequence[float]) -> Window:
    """Requests at their times, whatever has become of the others."""
    before, began = read_counted(url), time.monotonic()
    streams = asyncio.run(traffic.play(url, asks, times))
    return window_of(streams, time.monotonic() - began, read_counted(url).minus(before))


def rounds_of(
    model: ZooModel, plan: ServedPlan, r: float, layer_s: float, write: Callable[[Round], None]
) -> None:
    """Fresh servers for each round; `write` is called with what came of it."""
    link = link_of(model, r, layer_s)
    num_rows = max(4, round(plan.share_of_rows * model.spec.num_experts))
    commands = {name: tier_command(model, name, link, num_rows) for name in plan.systems}
    for number in range(plan.rounds):
        print(f"r {r:g}, round {number + 1} of {plan.rounds}", flush=True)
        with servers(commands) as urls:
            write(one_round(urls, model, plan, number))


# ---- rows ----

Rounds = Mapping[float, Sequence[Round]]  # r -> rounds


def figure10(rounds: Rounds, systems: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each r, phase at batch 1 and system."""
    return [
        {"r": r, "phase": phase, "system": system, **_times(of_r, phase, system)}
        for r, of_r in rounds.items()
        for phase in ("cold", "warm")
        for system in systems
    ]


def _times(rounds: Sequence[Round], phase: str, system: str) -> dict[str, Any]:
    mine = [each[phase][system] for each in rounds]
    row: dict[str, Any] = {
        "ttft_s": spread([statistics.median(w.ttft_s) for w in mine]),
        "tpot_s": spread([statistics.median(w.tpot_s) for w in mine]),
    }
    for name in (NONE, RESIDENT):
        if name in rounds[0][phase]:
            base = [each[phase][name] for each in rounds]
            row[f"ttft_over_{name}"] = _over(mine, base, lambda w: statistics.median(w.ttft_s))
            row[f"tpot_over_{name}"] = _over(mine, base, lambda w: statistics.median(w.tpot_s))
    return row if system == RESIDENT else row | _experts(mine)


def _experts(windows: Sequence[Window]) -> dict[str, Any]:
    """What the server counted, a token."""

    def per_token(field: str) -> dict[str, float]:
        return spread([getattr(w.counted, field) / w.tokens for w in windows])

    return {
        "hit_rate": spread([w.counted.hit_rate or 0.0 for w in windows]),
        "stall_s_per_token": per_token("stall_s"),
        "demand_per_token": per_token("demand"),
        "prefetched_per_token": per_token("prefetched"),
        "wasted_per_token": per_token("wasted"),
        "bytes_per_token": per_token("read_bytes"),
    }


def _over(
    mine: Sequence[Window], base: Sequence[Window], of: Callable[[Window], float]
) -> dict[str, float]:
    return spread([of(one) / of(other) for one, other in zip(mine, base, strict=True)])


def figure11(rounds: Rounds, systems: Sequence[str]) -> list[dict[str, Any]]:
    """Latencies of the online phase, of all rounds together, over `lfu`'s median of them."""
    rows = []
    for r, of_r in rounds.items():
        base = statistics.median(_latencies(of_r, NONE))
        for system in systems:
            mine = sorted(_latencies(of_r, system))
            rows.append(
                {
                    "r": r,
                    "system": system,
                    "requests": len(mine),
                    "latency_over_median_of_lfu": {
                        f"p{100 * q:g}": quantile(mine, q) / base for q in QUANTILES
                    },
                    "median_over_lfu": spread([_median_over(each, system) for each in of_r]),
                }
            )
    return rows


def _latencies(rounds: Sequence[Round], system: str) -> list[float]:
    return [seconds for each in rounds for seconds in each["online"][system].latency_s]


def _median_over(each: Round, system: str) -> float:
    of = each["online"]
    return statistics.median(of[system].latency_s) / statistics.median(of[NONE].latency_s)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of ascending values: the one below which a share of `q` lies."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def write(rounds: Rounds, plan: ServedPlan, layer_s: float, out: Path) -> None:
    """Both results, with the rounds so far."""
    done = {r: each for r, each in rounds.items() if each}
    common = {
        "plan": vars(plan),
        "layer_s": layer_s,
        "instead_of": INSTEAD_OF,
        "rounds": {f"{r:g}": len(each) for r, each in rounds.items()},
        "is_complete": all(len(rounds.get(r, ())) == plan.rounds for r in plan.link_speeds),
    }
    for name, rows in (("figure10", figure10), ("figure11", figure11)):
        figures = {"what": rows.__doc__, "paper": PAPER[name], **common}
        write_result(f"finemoe_{name}", {**figures, "rows": rows(done, plan.systems)}, folder=out)


def plan_of(options: argparse.Namespace) -> ServedPlan:
    """What the command line asks for."""
    systems = [name for name in SYSTEMS if name in (NONE, RESIDENT, *options.policies)]
    plan = ServedPlan(
        options.model, tuple(options.r), options.share, options.rounds, systems=tuple(systems)
    )
    few = (RESIDENT, NONE, "finemoe", "auto")
    quick = replace(plan, rounds=1, num_asks=2, num_online=4, systems=few)
    return quick if options.quick else plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write, after each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(zoo.MODELS), default="deep")
    parser.add_argument("--r", type=float, nargs="+", default=[0.3, 1.0], help="link speeds")
    parser.add_argument("--share", type=float, default=0.5, help="of experts that have rows")
    parser.add_argument("--policies", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, few policies")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    plan = plan_of(options)
    rounds: dict[float, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="finemoe-served-") as work:
        model = ZooModel.of(plan.model, Path(work))
        layer_s = calibrated(model)
        for r in plan.link_speeds:
            found = rounds.setdefault(r, [])

            def keep(each: Round, found: list[Round] = found) -> None:
                found.append(each)
                print("\n".join(said(each)), flush=True)
                write(rounds, plan, layer_s, options.out)

            rounds_of(model, plan, r, layer_s, keep)


def said(each: Round) -> Iterator[str]:
    """A round's lines, to be read: over `lfu`."""
    base = {phase: of[NONE] for phase, of in each.items()}
    for name in each["warm"]:
        parts = []
        for phase, of in each.items():
            ratio = statistics.median(of[name].tpot_s) / statistics.median(base[phase].tpot_s)
            parts.append(f"{phase} {ratio:.3f}, hits {of[name].counted.hit_rate or 1:.2f}")
        yield f"  {name}: time per token {'; '.join(parts)}"


def calibrated(model: ZooModel) -> float:
    """Seconds of a layer where all experts are in memory."""
    command = tier_command(model, RESIDENT, link_of(model, 1.0, 1.0), 0)
    with servers({RESIDENT: command}) as urls:
        return layer_seconds(urls[RESIDENT], model, _CALIBRATION_ASKS)


if __name__ == "__main__":
    main()
