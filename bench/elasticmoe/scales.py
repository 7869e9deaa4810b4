"""ElasticMoE's figures 7, 8, 11 and 12: seconds and memory of scales up and down, by strategy.

    strategies, sizes --[walk, under a light load]--> Scaled of each step and round
    --> elasticmoe_figure7.json (up), _figure12 (down), _figure8 (memory), _figure11 (where
        elastic's own time goes)

Each round starts a server for each strategy and walks 1 -> 2 -> 3 -> 2 -> 4 -> 2 -> 1; horizontal
scaling can only double and halve. Ratios are to cold restart in the same round. The paper's latency
is until the new instance is ready: `ready`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common.record import spread, write_result
from bench.elasticmoe.rounds import (
    COLD,
    ELASTIC,
    HORIZONTAL,
    SOME_KV,
    STRATEGIES,
    Scaled,
    elastic_server,
    has_standbys,
    in_turn,
    options_of,
    over,
    walk,
)

WALK = (1, 2, 3, 2, 4, 2, 1)
FLAGS = {**STRATEGIES, "horizontal": HORIZONTAL}
WALKS = {"horizontal": ((1, 2, 1), (2, 4, 2))}  # of the others: WALK
NUM_STREAMS = 2
ROUNDS = 3
# ElasticMoE 7.4, 10.2: latency over the best baseline's; peak memory over cold restart's.
PAPER = {"up": 0.11, "down": 0.15, "memory": 1.03}


@dataclass
class Rounds:
    """All scales, by strategy and step, a value a round."""

    found: dict[tuple[str, str], list[Scaled]] = field(default_factory=dict)

    def add(self, strategy: str, scales: Sequence[Scaled]) -> None:
        """The scales of one walk. Of a step that comes twice in it the first counts."""
        firsts: dict[str, Scaled] = {}
        for each in scales:
            firsts.setdefault(each.step, each)
        for step, each in firsts.items():
            self.found.setdefault((strategy, step), []).append(each)

    def rows(self, is_wanted: Callable[[Scaled], bool]) -> list[dict[str, Any]]:
        """A row a strategy and step that cold restart has too."""
        return [
            _row(strategy, scales, self.found[COLD, step])
            for (strategy, step), scales in self.found.items()
            if is_wanted(scales[0]) and len(self.found.get((COLD, step), ())) == len(scales)
        ]

    def breakdown(self) -> list[dict[str, Any]]:
        """Elastic's phases and memory steps, as shares of the time until it is ready."""
        return [
            {
                "step": step,
                "ready_s": spread([each.ready_s for each in scales]),
                "phases": _shares(scales, [each.phases for each in scales]),
                "steps": _shares(scales, [each.steps for each in scales]),
            }
            for (strategy, step), scales in self.found.items()
            if strategy == ELASTIC
        ]


def _row(strategy: str, scales: Sequence[Scaled], cold: Sequence[Scaled]) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "step": scales[0].step,
        "ready_over_cold": over([s.ready_s for s in scales], [s.ready_s for s in cold]),
        "gap_over_cold": over([s.gap_s for s in scales], [s.gap_s for s in cold]),
        "peak_over_cold": over([s.peak_bytes for s in scales], [s.peak_bytes for s in cold]),
        "ready_s": spread([s.ready_s for s in scales]),
        "gap_s": spread([s.gap_s for s in scales]),
        "peak_bytes": spread([s.peak_bytes for s in scales]),
    }


def _shares(
    scales: Sequence[Scaled], seconds: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    names = dict.fromkeys(name for each in seconds for name in each)
    return {
        name: spread(
            [
                each.get(name, 0.0) / scale.ready_s
                for each, scale in zip(seconds, scales, strict=True)
            ]
        )
        for name in names
    }


def is_up(scale: Scaled) -> bool:
    """Whether devices join."""
    return scale.num_new > scale.num_old


def write(rounds: Rounds, num_rounds: int, options: argparse.Namespace) -> None:
    """The four results, with the rounds so far."""
    common: dict[str, Any] = {
        "rounds": num_rounds,
        "is_complete": num_rounds == options.rounds,
        "streams": NUM_STREAMS,
        "over": COLD,
        "paper": PAPER,
    }
    up, down = rounds.rows(is_up), rounds.rows(lambda scale: not is_up(scale))
    results: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "elasticmoe_figure7": ("Time until a larger instance serves", up),
        "elasticmoe_figure12": ("Time until a smaller instance serves", down),
        "elasticmoe_figure8": ("Peak memory while scaling up", up),
        "elasticmoe_figure11": ("Where the time of an elastic scale goes", rounds.breakdown()),
    }
    for name, (what, rows) in results.items():
        write_result(name, {"what": what, **common, "rows": rows}, folder=options.out)


def one_walk(strategy: str, sizes: Sequence[int]) -> list[Scaled]:
    """A server of the strategy, scaled along the sizes."""
    flags = FLAGS[strategy]
    print(strategy, flush=True)
    with elastic_server(flags, sizes[0], SOME_KV) as url:
        return asyncio.run(
            walk(url, sizes, NUM_STREAMS, has_standbys=has_standbys(flags), settle_s=1.0)
        )


def main() -> None:
    """Measure and write the four results, after each round."""
    options = options_of(__doc__.partition("\n")[0], ROUNDS)
    names = options.strategies or ([ELASTIC, COLD] if options.quick else list(FLAGS))
    rounds = Rounds()
    for number in range(options.rounds):
        for name in in_turn(names, number):
            for sizes in [(1, 2, 1)] if options.quick else WALKS.get(name, [WALK]):
                rounds.add(name, one_walk(name, sizes))
        write(rounds, number + 1, options)


if __name__ == "__main__":
    main()
