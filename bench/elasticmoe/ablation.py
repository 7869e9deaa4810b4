"""ElasticMoE's ablation tables: a scale up and down with one more part turned off in each row.

    rows of parts --[walk 3 -> 4 -> 3, under a light load]--> Scaled of each row and round
    --> elasticmoe_ablation_up.json, elasticmoe_ablation_down.json

Ratios are to the row with all parts, in the same round; the gap is in seconds, because that of all
parts is nearly nothing. What each switch turns off here: docs/elastic.md.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.record import spread, write_result
from bench.elasticmoe.rounds import (
    ABLATIONS,
    SOME_KV,
    Scaled,
    elastic_server,
    has_standbys,
    in_turn,
    options_of,
    over,
    walk,
)

SIZES = (3, 4, 3)
QUICK_SIZES = (1, 2, 1)
NUM_STREAMS = 2
ROUNDS = 3
ALL = next(iter(ABLATIONS))


def rows_of(found: Mapping[str, Sequence[Scaled]]) -> list[dict[str, Any]]:
    """A row of the table for each set of parts; `found` has a scale a round for each."""
    return [
        {
            "parts": parts,
            "ready_over_all": over([s.ready_s for s in scales], [s.ready_s for s in found[ALL]]),
            "peak_over_all": over(
                [s.peak_bytes for s in scales], [s.peak_bytes for s in found[ALL]]
            ),
            "ready_s": spread([s.ready_s for s in scales]),
            "gap_s": spread([s.gap_s for s in scales]),
            "peak_bytes": spread([s.peak_bytes for s in scales]),
        }
        for parts, scales in found.items()
    ]


def one_walk(parts: str, sizes: Sequence[int]) -> list[Scaled]:
    """A server with these parts, scaled up and down."""
    flags = ABLATIONS[parts]
    print(parts, flush=True)
    with elastic_server(flags, sizes[0], SOME_KV) as url:
        return asyncio.run(
            walk(url, sizes, NUM_STREAMS, has_standbys=has_standbys(flags), settle_s=1.0)
        )


def write(walks: Mapping[str, list[list[Scaled]]], num_rounds: int, options: Any) -> None:
    """Both results, with the rounds so far: walks[parts][round] is (up, down)."""
    for place, direction in enumerate(("up", "down")):
        found = {parts: [each[place] for each in rounds] for parts, rounds in walks.items()}
        figures = {
            "what": f"A scale {direction} with one more part of elastic scaling off in each row",
            "rounds": num_rounds,
            "is_complete": num_rounds == options.rounds,
            "streams": NUM_STREAMS,
            "step": found[ALL][0].step,
            "rows": rows_of(found),
        }
        write_result(f"elasticmoe_ablation_{direction}", figures, folder=options.out)


def main() -> None:
    """Measure and write both tables, after each round."""
    options: argparse.Namespace = options_of(__doc__.partition("\n")[0], ROUNDS)
    sizes = QUICK_SIZES if options.quick else SIZES
    names = [ALL, *(n for n in ABLATIONS if n != ALL)]
    if options.quick:
        names = [ALL, names[2]]
    walks: dict[str, list[list[Scaled]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in in_turn(names, number):
            walks[name].append(one_walk(name, sizes))
        write(walks, number + 1, options)


if __name__ == "__main__":
    main()
