"""Seconds until a target serves that nobody predicted, by what is kept ready for it.

    what is ready --[real server, light load, TARGETS one after the other]--> Scaled of each
    --> elasticmoe_targets.json: over cold restart in the same round

No standby is parked, so each scale starts an instance: from nothing, or as a copy of a spare. What
a parked standby gives instead is in scales.py. Subsets and victims are such as no planner chooses.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from bench.common.record import spread, write_result
from bench.elasticmoe import load as elastic_load
from bench.elasticmoe.rounds import (
    COLD,
    SOME_KV,
    STRATEGIES,
    check_streams,
    demo_asks,
    elastic_server,
    in_turn,
    options_of,
    over,
    scaled_of,
)

NUM_STREAMS = 2
ROUNDS = 3
SETTLE_S = 1.0
SCALE_TIMEOUT_S = 600.0
NOTHING, SPARE = "nothing ready", "a spare"
READY: Mapping[str, tuple[str, ...]] = {
    COLD: STRATEGIES[COLD],
    NOTHING: ("--standby-ranks", "0", "--spare-ranks", "0"),
    SPARE: ("--standby-ranks", "0"),
}
TARGETS: Mapping[str, Mapping[str, Any]] = {
    "0 -> 0-1": {"dp_size": 2},
    "0-1 -> 1, 3": {"dp_size": 2, "device_ids": [1, 3]},
    "1, 3 -> 0-3": {"dp_size": 4},
    "0-3 -> 3": {"dp_size": 1, "device_ids": [3]},
    "3 -> 0, 2-3": {"dp_size": 3, "device_ids": [0, 2, 3]},
}
# The largest ratio to cold restart that a spare is there for.
WANTED = 0.2


async def walk(url: str, targets: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds until ready, and of requests held, of each target under a steady load."""
    stop = asyncio.Event()
    load = asyncio.create_task(elastic_load.steady(url, demo_asks(), NUM_STREAMS, stop))
    found, num_old = {}, 1
    try:
        for name, body in targets.items():
            await asyncio.sleep(SETTLE_S)
            operation = await elastic_load.scale(url, body, SCALE_TIMEOUT_S)
            scaled = scaled_of(operation, num_old, body["dp_size"], 0)
            found[name] = {"ready_s": scaled.ready_s, "gap_s": scaled.gap_s, **scaled.phases}
            num_old = scaled.num_new
            print(f"  {name}: {scaled.ready_s:.2f} s, held {scaled.gap_s:.3f} s", flush=True)
    finally:
        stop.set()
        streams = await load
    check_streams(streams)
    return found


def row_of(ready: str, target: str, seen: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """One target with one thing ready; `seen` has a value a round of each thing that is ready."""
    own = seen[ready]
    seconds = [each["ready_s"] for each in own]
    names = [name for name in own[0] if not name.endswith("_s")]
    return {
        "ready": ready,
        "target": target,
        "ready_s": spread(seconds),
        "over_cold": over(seconds, [each["ready_s"] for each in seen[COLD]]),
        "gap_s": spread([each["gap_s"] for each in own]),
        "phases": {name: spread([each.get(name, 0.0) for each in own]) for name in names},
    }


def write(
    rounds: list[dict[str, dict[str, dict[str, float]]]], options: argparse.Namespace
) -> None:
    """The result, with the rounds so far: of each the seconds by what is ready, then by target."""
    rows = [
        row_of(ready, target, {name: [each[name][target] for each in rounds] for name in rounds[0]})
        for ready in rounds[0]
        for target in rounds[0][ready]
    ]
    figures = {
        "what": "Time until a target serves that was not predicted",
        "rounds": len(rounds),
        "is_complete": len(rounds) == options.rounds,
        "streams": NUM_STREAMS,
        "over": COLD,
        "wanted": WANTED,
        "rows": rows,
    }
    write_result("elasticmoe_targets", figures, folder=options.out)


def main() -> None:
    """Measure and write, after each round."""
    options = options_of(__doc__.partition("\n")[0], ROUNDS)
    targets = dict(list(TARGETS.items())[:2]) if options.quick else TARGETS
    names = [COLD, *(name for name in options.strategies or READY if name != COLD)]
    rounds: list[dict[str, dict[str, dict[str, float]]]] = []
    for number in range(options.rounds):
        found = {}
        for name in in_turn(names, number):
            print(name, flush=True)
            with elastic_server(READY[name], 1, SOME_KV) as url:
                found[name] = asyncio.run(walk(url, targets))
        rounds.append({name: found[name] for name in names})
        write(rounds, options)


if __name__ == "__main__":
    main()
