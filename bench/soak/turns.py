"""What adapters that take turns on fewer slots cost, and how much of it is only the smaller batch.

    a plain and an elastic server, three slots each --[by turns]--> Served
        few:  three adapters, twelve streams      all run together
        many: six adapters, twelve streams        about six run together, the others wait for slots
        half: three adapters, six streams         as large a batch as `many` has
    Served of each round --[row_of]--> lifecycle_turns.json

`many` over `few` is what taking turns costs, `half` over `few` what the smaller batch does, and
`many` over `half` what is left: ours. Below 1 it is the price of turns themselves.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, spread, write_result
from bench.elasticmoe.load import Ask
from bench.elasticmoe.rounds import over
from bench.elasticmoe.traffic import Served, served
from sgl_esft import zoo
from sgl_esft.zoo import serving

NUM_SLOTS = 3
NUM_STREAMS = 12
NUM_TOKENS = 24
NUM_PROMPTS = 16
ROUNDS = 6
TURN_S, MARGIN_S = 10.0, 2.0
FEW, MANY, HALF = "few", "many", "half"
SERVERS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "elastic": ("--elastic", "--max-devices", "1", "--device-memory", "256MiB"),
}


def asks_of(names: Sequence[str]) -> list[Ask]:
    """Held-out prompts, each for the next adapter in turn."""
    texts = [e.prompt for task in zoo.tasks() for e in zoo.held_out(task, NUM_PROMPTS)]
    return [Ask(text, names[i % len(names)], NUM_TOKENS) for i, text in enumerate(texts)]


def arguments(name: str) -> list[str]:
    """The launcher's. Loaded adapters keep their slots where it is elastic: others come later."""
    paths = zoo.adapter_paths()
    loaded = dict(list(paths.items())[:NUM_SLOTS]) if name == "elastic" else paths
    root = str(next(iter(paths.values())).parent)
    slots = ("--adapter-root", root, "--max-adapters", str(NUM_SLOTS))
    return [*serving.woven_arguments(zoo.base_path(), loaded), *slots, *SERVERS[name]]


def one_round(url: str, reverse: bool) -> dict[str, Served]:
    """Each load once."""
    names = list(zoo.adapter_paths())
    few, many = asks_of(names[:NUM_SLOTS]), asks_of(names)
    loads = {FEW: (few, NUM_STREAMS), MANY: (many, NUM_STREAMS), HALF: (few, NUM_STREAMS // 2)}
    found = {}
    for name in reversed(loads) if reverse else loads:
        asks, num_streams = loads[name]
        found[name] = asyncio.run(served(url, asks, num_streams, TURN_S, MARGIN_S))
    return found


def row_of(server: str, rounds: Sequence[Mapping[str, Served]]) -> dict[str, Any]:
    """Ratios of tokens a second and of a token's processor time, round by round."""
    row: dict[str, Any] = {"server": server, "rounds": len(rounds)}
    for upper, lower in ((MANY, FEW), (HALF, FEW), (MANY, HALF)):
        pairs = [(each[upper], each[lower]) for each in rounds]
        rates = [(a.tokens_per_s, b.tokens_per_s) for a, b in pairs]
        costs = [(a.cpu_s_per_token, b.cpu_s_per_token) for a, b in pairs]
        for what, found in (("rate", rates), ("cpu", costs)):
            row[f"{upper}_over_{lower}_{what}"] = over(*zip(*found, strict=True))
    row["few_tokens_per_s"] = spread([each[FEW].tokens_per_s for each in rounds])
    return row


def main() -> None:
    """Measure, and write after each server."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    end_on_sigterm()
    rows = []
    for name in options.servers:
        with serving.server(arguments(name)) as url:
            rounds = []
            for number in range(options.rounds):
                rounds.append(one_round(url, number % 2 == 1))
                print(name, rounds[-1], flush=True)
        rows.append(row_of(name, rounds))
        figures = {
            "what": "Six adapters on three slots, beside three, and beside half as many streams",
            "slots": NUM_SLOTS,
            "streams": NUM_STREAMS,
            "is_complete": len(rows) == len(SERVERS),
            "rows": rows,
        }
        write_result("lifecycle_turns", figures, folder=options.out)


if __name__ == "__main__":
    main()
