"""Does an instance serve as much after a scale as one of its size that was started fresh?

    servers on 1 and on 2 devices --[load, a window]--> Served of the fresh instance
    the same servers --[scale to the other's size, settle, load, a window]--> Served of the scaled
    Served of each round --[rows_of]--> elasticmoe_after.json: scaled over fresh of the same size

Both hold the same: a standby of the other size is parked and nothing is being started while a
window runs. Each round has both directions; the order of its servers alternates. Beside tokens a
second stands the processor time of each token, of all of the server's processes, which other work
on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.record import spread, write_result
from bench.elasticmoe.rounds import (
    ELASTIC,
    FEW_TOKENS,
    MODELS,
    Model,
    asks_of,
    elastic_server,
    flags_of,
    measured_scale,
    options_of,
    over,
    result_name,
    wait_until_parked,
)
from bench.elasticmoe.traffic import Served, served

SMALL, LARGE = 1, 2  # devices
NUM_STREAMS = 16
ROUNDS = 5
WINDOW_S = 40.0
QUICK_WINDOW_S = 5.0
# The least that a scaled instance is to serve of a fresh one's tokens a second.
WANTED = 0.97


@dataclass(frozen=True)
class Walk:
    """One server: started on so many devices, then scaled to the other size."""

    fresh: Served
    scaled: Served


def one_walk(model: Model, num_old: int, num_new: int, window_s: float) -> Walk:
    """A fresh server, and what a scale makes of it. Raises ValueError without its standby."""
    flags = flags_of(ELASTIC, max(num_old, num_new))
    with elastic_server(flags, num_old, FEW_TOKENS, model) as url:
        park(url, num_new)
        fresh = asyncio.run(served(url, asks_of(model), NUM_STREAMS, window_s))
        asyncio.run(measured_scale(url, num_old, num_new))
        park(url, num_old)
        scaled = asyncio.run(served(url, asks_of(model), NUM_STREAMS, window_s))
    print(f"  fresh {num_old}: {fresh}\n  {num_old} -> {num_new}: {scaled}", flush=True)
    return Walk(fresh, scaled)


def park(url: str, num_ranks: int) -> None:
    """Wait for a standby of this size, and for quiet."""
    if not wait_until_parked(url, num_ranks):
        raise ValueError(f"no standby of {num_ranks} ranks was parked in time")


def rows_of(rounds: Sequence[Mapping[int, Walk]]) -> list[dict[str, Any]]:
    """A row a direction; rounds[i] has the walk of each size at its start."""
    return [
        {
            "step": f"{old} -> {new}",
            "scaled_over_fresh": over(
                [walks[old].scaled.tokens_per_s for walks in rounds],
                [walks[new].fresh.tokens_per_s for walks in rounds],
            ),
            "cpu_over_fresh": over(
                [walks[old].scaled.cpu_s_per_token for walks in rounds],
                [walks[new].fresh.cpu_s_per_token for walks in rounds],
            ),
            "tokens_per_s": spread([walks[old].scaled.tokens_per_s for walks in rounds]),
        }
        for old, new in ((SMALL, LARGE), (LARGE, SMALL))
    ]


def write(rounds: Sequence[Mapping[int, Walk]], options: argparse.Namespace) -> None:
    """The result, with the rounds so far."""
    figures = {
        "what": "What an instance serves after a scale, over a fresh one of its size",
        "model": options.model,
        "streams": NUM_STREAMS,
        "wanted": WANTED,
        "rounds": len(rounds),
        "is_complete": len(rounds) == options.rounds,
        "rows": rows_of(rounds),
    }
    write_result(result_name("elasticmoe_after", options.model), figures, folder=options.out)


def main() -> None:
    """Measure and write, after each round."""
    options = options_of(__doc__.partition("\n")[0], ROUNDS, has_models=True)
    options.rounds = 1 if options.quick else options.rounds
    window_s = QUICK_WINDOW_S if options.quick else WINDOW_S
    model = MODELS[options.model]()
    rounds: list[dict[int, Walk]] = []
    for number in range(options.rounds):
        print(f"round {number + 1}", flush=True)
        sizes = (SMALL, LARGE) if number % 2 == 0 else (LARGE, SMALL)
        walks = {old: one_walk(model, old, SMALL + LARGE - old, window_s) for old in sizes}
        rounds.append(walks)
        write(rounds, options)


if __name__ == "__main__":
    main()
