"""ElasticMoE's table 1: requests a second before, during and after a scale, by strategy.

    a server of each strategy, as many streams as it can serve --[scale]--> when answers ended
    --[three windows, the same for all strategies]--> elasticmoe_table1.json

"Before" begins five seconds after the load does; "during" is from five seconds before the scale
until five after the longest scale of all strategies has ended, as in the paper. Ratios are to what
elastic serves before its scale, in the same round.

Each device has KV for a few requests only, as in bench/elasticmoe/slo.py. The model is the scaled
one, of which two devices serve more than one: a rank computes on one core. `--model demo` is the
other case: its steps are all overhead, and on shared cores the wider configuration is the slower.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.record import write_result
from bench.elasticmoe.load import Ask, Stream, steady
from bench.elasticmoe.rounds import (
    ELASTIC,
    FEW_TOKENS,
    MODELS,
    STRATEGIES,
    asks_of,
    check_streams,
    elastic_server,
    flags_of,
    has_standbys,
    in_turn,
    measured_scale,
    options_of,
    over,
    result_name,
    wait_until_parked,
)
from bench.elasticmoe.traffic import finished_per_s

SIZES = (1, 2)
NUM_STREAMS = 16
ROUNDS = 2
MARGIN_S = 5.0
# ElasticMoE, table 1: requests a second before, during, after.
PAPER = {
    "colocated": (1.338, 0.467, 2.268),
    "cold_restart": (6.002, 2.064, 7.818),
    "elastic": (6.002, 3.943, 7.818),
}


@dataclass(frozen=True)
class Run:
    """One strategy's run; times in seconds from the scale."""

    streams: list[Stream]
    scale_s: float  # of the monotonic clock
    begin_s: float  # negative
    end_s: float
    ready_s: float


def throughputs(run: Run, longest_s: float) -> tuple[float, float, float]:
    """Requests a second before, during and after. Raises ValueError for too short a run."""
    edges = (run.begin_s, -MARGIN_S, longest_s + MARGIN_S, run.end_s)
    if list(edges) != sorted(set(edges)):
        raise ValueError(f"windows {edges} leave nothing before or after: run for longer")
    first, second, third, last = (run.scale_s + edge for edge in edges)
    spans = ((first, second), (second, third), (third, last))
    before, during, after = (finished_per_s(run.streams, *span) for span in spans)
    return before, during, after


def rows_of(rounds: Sequence[Mapping[str, Run]]) -> list[dict[str, Any]]:
    """A row a strategy; each figure over elastic's before, round by round."""
    seen: dict[str, list[tuple[float, float, float]]] = {}
    for runs in rounds:
        longest = max(run.ready_s for run in runs.values())
        for name, run in runs.items():
            seen.setdefault(name, []).append(throughputs(run, longest))
    base = [each[0] for each in seen[ELASTIC]]
    return [
        {
            "strategy": name,
            **{
                window: over([each[place] for each in found], base)
                for place, window in enumerate(("before", "during", "after"))
            },
            "paper": PAPER.get(name),
        }
        for name, found in seen.items()
    ]


async def one_run(
    url: str, flags: Sequence[str], asks: Sequence[Ask], before_s: float, after_s: float
) -> Run:
    """Keep a server busy for a while on both sides of a scale."""
    if has_standbys(flags):
        await asyncio.to_thread(wait_until_parked, url, SIZES[1])
    stop = asyncio.Event()
    began = time.monotonic()
    load = asyncio.create_task(steady(url, asks, NUM_STREAMS, stop))
    await asyncio.sleep(before_s)
    scale_s = time.monotonic()
    scaled = await measured_scale(url, *SIZES)
    await asyncio.sleep(max(0.0, scale_s + after_s - time.monotonic()))
    ended = time.monotonic()
    stop.set()
    streams = await load
    check_streams(streams)
    return Run(streams, scale_s, began + MARGIN_S - scale_s, ended - scale_s, scaled.ready_s)


def main() -> None:
    """Measure and write bench/results/elasticmoe_table1.json, after each round."""
    options: argparse.Namespace = options_of(__doc__.partition("\n")[0], ROUNDS, has_models=True)
    names = options.strategies or ([ELASTIC] if options.quick else list(STRATEGIES))
    before_s, after_s = (15.0, 20.0) if options.quick else (60.0, 90.0)
    model = MODELS[options.model]()
    rounds: list[dict[str, Run]] = []
    for number in range(options.rounds):
        runs: dict[str, Run] = {}
        for name in in_turn(names, number):
            print(name, flush=True)
            flags = flags_of(name, SIZES[1])
            with elastic_server(flags, SIZES[0], FEW_TOKENS, model) as url:
                run = one_run(url, flags, asks_of(model), before_s, after_s)
                runs[name] = asyncio.run(run)
        rounds.append(runs)
        write(rounds, options)


def write(rounds: Sequence[Mapping[str, Run]], options: argparse.Namespace) -> None:
    """elasticmoe_table1.json, or elasticmoe_table1_demo.json, with the rounds so far."""
    figures = {
        "what": "Requests a second before, during and after a scale",
        "model": options.model,
        "step": f"{SIZES[0]} -> {SIZES[1]}",
        "streams": NUM_STREAMS,
        "rounds": len(rounds),
        "is_complete": len(rounds) == options.rounds,
        "rows": rows_of(rounds),
    }
    write_result(result_name("elasticmoe_table1", options.model), figures, folder=options.out)


if __name__ == "__main__":
    main()
