"""Does an instance serve as much after a scale as one of its size that was started fresh?

    a server of a size, and one of the other size --[scale]--> two of one size
    both, in turns --[load, a window]--> Served of the scaled and of the fresh one, side by side
    Pairs of each round --[rows_of]--> elasticmoe_after.json: scaled over fresh of the same size

Both hold the same: a standby of the other size is parked, and nothing is being started while a
window runs; the one whose turn it is not is idle. A shared machine drifts by more than what is
looked for, within a minute: so windows are short, neighbours are compared, and who goes first
alternates. Beside tokens a second stands the processor time of each token, of all of the server's
processes, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
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

DIRECTIONS = ((1, 2), (2, 1))  # devices
NUM_STREAMS = 16
ROUNDS = 5
PAIRS = 4  # of windows in a round, for each direction
WINDOW_S = 12.0
WARM_S = 4.0  # before each window
QUICK_WINDOW_S = 5.0
# The least that a scaled instance is to serve of a fresh one's tokens a second.
WANTED = 0.97


@dataclass(frozen=True)
class Pair:
    """Two windows, one after the other."""

    scaled: Served
    fresh: Served


@dataclass(frozen=True)
class Servers:
    """Two URLs, of servers of one size."""

    scaled: str
    fresh: str


@contextmanager
def two_servers(
    model: Model, num_old: int, num_new: int, *, fresh_first: bool
) -> Iterator[Servers]:
    """One that was scaled, and one that was started so large. Raises ValueError: no standby."""
    flags = flags_of(ELASTIC, max(num_old, num_new))
    sizes = (num_new, num_old) if fresh_first else (num_old, num_new)
    with (
        elastic_server(flags, sizes[0], FEW_TOKENS, model) as first,
        elastic_server(flags, sizes[1], FEW_TOKENS, model) as second,
    ):
        found = Servers(second, first) if fresh_first else Servers(first, second)
        park(found.scaled, num_new)
        asyncio.run(measured_scale(found.scaled, num_old, num_new))
        for url in (found.scaled, found.fresh):
            park(url, num_old)
        yield found


def park(url: str, num_ranks: int) -> None:
    """Wait for a standby of this size, and for quiet."""
    if not wait_until_parked(url, num_ranks):
        raise ValueError(f"no standby of {num_ranks} ranks was parked in time")


def pair_of(servers: Servers, model: Model, window_s: float, *, fresh_first: bool) -> Pair:
    """One window of each."""

    urls = (servers.fresh, servers.scaled) if fresh_first else (servers.scaled, servers.fresh)
    found = {
        url: asyncio.run(served(url, asks_of(model), NUM_STREAMS, window_s, WARM_S)) for url in urls
    }
    return Pair(scaled=found[servers.scaled], fresh=found[servers.fresh])


def one_direction(
    model: Model, direction: tuple[int, int], window_s: float, number: int
) -> list[Pair]:
    """A round of one direction; `number` alternates who is started and asked first."""
    with two_servers(model, *direction, fresh_first=number % 2 == 0) as servers:
        pair_of(servers, model, QUICK_WINDOW_S, fresh_first=True)  # both are warm
        pairs = [
            pair_of(servers, model, window_s, fresh_first=(number + turn) % 2 == 0)
            for turn in range(PAIRS)
        ]
    for pair in pairs:
        print(f"  {direction[0]} -> {direction[1]}: {pair}", flush=True)
    return pairs


def ratio_of(pairs: Sequence[Pair], figure: str) -> float:
    """A figure of Served, of a round's windows: scaled over fresh."""
    of = attrgetter(figure)
    return float(sum(of(p.scaled) for p in pairs) / sum(of(p.fresh) for p in pairs))


def rows_of(rounds: Sequence[Mapping[str, Sequence[Pair]]]) -> list[dict[str, Any]]:
    """A row a direction; a value a round."""
    return [
        {
            "step": step,
            "scaled_over_fresh": spread([ratio_of(each[step], "tokens_per_s") for each in rounds]),
            "cpu_over_fresh": spread([ratio_of(each[step], "cpu_s_per_token") for each in rounds]),
            "pairs_over_fresh": over(
                [pair.scaled.tokens_per_s for each in rounds for pair in each[step]],
                [pair.fresh.tokens_per_s for each in rounds for pair in each[step]],
            ),
            "tokens_per_s": spread(
                [pair.scaled.tokens_per_s for each in rounds for pair in each[step]]
            ),
        }
        for step in rounds[0]
    ]


def write(rounds: Sequence[Mapping[str, Sequence[Pair]]], options: argparse.Namespace) -> None:
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
    window_s = QUICK_WINDOW_S if options.quick else WINDOW_S
    model = MODELS[options.model]()
    rounds: list[dict[str, list[Pair]]] = []
    for number in range(options.rounds):
        print(f"round {number + 1}", flush=True)
        found = {
            f"{old} -> {new}": one_direction(model, (old, new), window_s, number)
            for old, new in DIRECTIONS
        }
        rounds.append(found)
        write(rounds, options)


if __name__ == "__main__":
    main()
