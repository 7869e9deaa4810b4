"""Time of a decode step (TPOT), base and one adapter: this checkout and another, side by side.

    three demo servers: this, other, this again --steps.py: one request each, by turns of a few
    steps--> ratios turn by turn, by the clock and by processor time -> token_time.json

`this again / this` is what the method itself is off by. Each server runs from its own checkout with
its own .venv. So a change of what a decode step does is measured as a client sees it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, spread, write_result
from bench.expertweave import steps
from bench.expertweave.steps import Batch, Lane, Point, Server, System

ADAPTER = "reverse"
GOAL = 1.01  # a change may cost a token at most 1%
THIS, OTHER, AGAIN = "this", "other", "this again"
ARGUMENTS = ("--log-level", "warning", "--disable-radix-cache")
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, STEPS_A_TURN = 8, 112, 6
VOCABULARY = 128  # of the demo
MIN_TURNS = 20


def batch_of(number: int) -> Batch:
    """One prompt, another for each number."""
    return steps.make_batch(1, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, VOCABULARY, seed=number)


def measure(servers: dict[str, Server], adapter: str | None, seconds: float) -> Point:
    """Decode steps of a request in each server. Raises StepError where answers differ."""
    lanes = {name: Lane(server, adapter) for name, server in servers.items()}
    point = steps.measure_tpot(lanes, batch_of, seconds, 2, STEPS_A_TURN)
    if point.num_equal != point.num_compared or len(point.turns[THIS]) < MIN_TURNS:
        raise steps.StepError(
            f"{point.num_equal} of {point.num_compared} answers alike, "
            f"{len(point.turns[THIS])} turns: both checkouts must decode the same, for longer"
        )
    return point


def figures(point: Point) -> dict[str, Any]:
    """Ratios of turns a moment apart, and seconds of a step."""
    turns = point.turns
    found: dict[str, Any] = {
        "num_pairs": len(turns[THIS]),
        "step_s": {name: spread([taken.wall for taken in turns[name]]) for name in turns},
    }
    for over, under in ((THIS, OTHER), (AGAIN, THIS), (AGAIN, OTHER)):
        pairs = list(zip(turns[over], turns[under], strict=True))
        found[f"{over} / {under}"] = {
            "wall": spread([mine.wall / theirs.wall for mine, theirs in pairs]),
            "cpu": spread([mine.cpu / theirs.cpu for mine, theirs in pairs]),
        }
    return found


def main() -> None:
    """Measure, print and record."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--seconds", type=float, default=100.0, help="for each, base and adapter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    systems = [
        System(THIS, ARGUMENTS),
        System(OTHER, ARGUMENTS, options.other.resolve()),
        System(AGAIN, ARGUMENTS),
    ]
    result: dict[str, Any] = {"goal": GOAL}
    with steps.fleet(systems) as servers:
        for subject, adapter in (("base", None), ("adapter", ADAPTER)):
            result[subject] = figures(measure(servers, adapter, options.seconds))
            for pair in (name for name in result[subject] if "/" in name):
                for clock, found in result[subject][pair].items():
                    print(subject, pair, clock, *(f"{k} {v:.4f}" for k, v in found.items()))
    print(write_result("token_time", result, folder=options.out))


if __name__ == "__main__":
    main()
