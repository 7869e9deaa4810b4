"""Time of a decode step (TPOT), base and one adapter: this checkout and another, side by side.

    three demo servers: this, other, this again --steps.py: one batch each, by turns of a few
    steps--> ratios turn by turn, by the clock and by processor time -+-> token_time.json
    --call_counter.py: functions that a scheduler calls in a step, of two of them-+

`this again / this` is what the method itself is off by. Each server runs from its own checkout with
its own .venv. So a change of what a decode step does is measured as a client sees it. Times of two
servers differ by chance; calls do not, and say what a step does more, by name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, spread, write_result
from bench.expertweave import steps
from bench.expertweave.steps import Batch, Lane, Point, Server, Stream, System
from bench.soak import call_counter

ADAPTER = "reverse"
GOAL = 1.005  # what is not used may cost a token at most half a percent
THIS, OTHER, AGAIN = "this", "other", "this again"
ARGUMENTS = ("--log-level", "warning", "--disable-radix-cache")
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, STEPS_A_TURN = 8, 112, 6
VOCABULARY = 128  # of the demo
MIN_TURNS = 20
COUNTED_STEPS = 60
_SHOWN = 12  # functions that are called more often, or less
_WRITTEN_S = 30.0

Subject = tuple[str | None, int]  # adapter, requests together
SUBJECTS: Mapping[str, Subject] = {
    "base": (None, 1),
    "base, 8 requests": (None, 8),
    "adapter": (ADAPTER, 1),
}


def batch_of(number: int, size: int = 1) -> Batch:
    """Other prompts for each number."""
    return steps.make_batch(size, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, VOCABULARY, seed=number)


def measure(servers: dict[str, Server], subject: Subject, seconds: float) -> Point:
    """Decode steps of a batch in each server. Raises StepError where answers differ."""
    adapter, size = subject
    lanes = {name: Lane(server, adapter) for name, server in servers.items()}
    point = steps.measure_tpot(
        lanes, lambda number: batch_of(number, size), seconds, 2, STEPS_A_TURN
    )
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
            "wall": _ratios([mine.wall / theirs.wall for mine, theirs in pairs]),
            "cpu": _ratios([mine.cpu / theirs.cpu for mine, theirs in pairs]),
        }
    both = zip(turns[THIS], turns[AGAIN], turns[OTHER], strict=True)
    found["both / other"] = {
        "wall": _ratios([math.sqrt(a.wall * b.wall) / c.wall for a, b, c in both])
    }
    return found


def _ratios(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, and where the median lies with 95%, by the order of values alone."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half))
    return {**spread(values), "median_95": [ordered[low], ordered[high]]}


# ---- calls ----


@contextmanager
def counting() -> Iterator[Path]:
    """Servers that are started meanwhile can count; the folder is where they write."""
    before = os.environ.copy()
    with tempfile.TemporaryDirectory(prefix="token-calls-") as folder:
        shutil.copyfile(call_counter.__file__, Path(folder) / "sitecustomize.py")
        path = [folder, *filter(None, [before.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.environ[call_counter.FOLDER_VARIABLE] = str(Path(folder) / "calls")
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


def calls_a_step(server: Server, subject: Subject, folder: Path) -> Counter[str]:
    """By name, of one decode step on average."""
    adapter, size = subject
    written = folder / f"calls.{server.scheduler}"
    with server.turn():
        stream = Stream(Lane(server, adapter), batch_of(0, size))
        stream.start()
        stream.steps(STEPS_A_TURN)
        os.kill(server.scheduler, signal.SIGUSR2)
        stream.steps(COUNTED_STEPS)
        os.kill(server.scheduler, signal.SIGUSR2)
        stream.finish()
        until = time.monotonic() + _WRITTEN_S
        while not written.exists():
            if time.monotonic() > until:
                raise steps.StepError(f"{server.name} counted nothing")
            time.sleep(0.05)
    counts = json.loads(written.read_text())
    written.unlink()
    found: Counter[str] = Counter()
    for of in counts.values():
        if not of["times"]:
            raise steps.StepError(f"{server.name} made no step while it counted: {counts.keys()}")
        for name, calls in of["calls"].items():
            found[name] += calls / of["times"]
    return found


def compared(this: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    """Calls of a step, of both, and the functions that differ most."""
    off = {name: this.get(name, 0) - other.get(name, 0) for name in {*this, *other}}
    most = sorted(off, key=lambda name: (-abs(off[name]), name))
    totals = {THIS: sum(this.values()), OTHER: sum(other.values())}
    return {
        **totals,
        "this / other": totals[THIS] / totals[OTHER],
        "differ": {name: off[name] for name in most[:_SHOWN] if abs(off[name]) > 0.01},
    }


def main() -> None:
    """Measure, print and record."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--seconds", type=float, default=100.0, help="for each of --subjects")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    systems = [
        System(THIS, ARGUMENTS),
        System(OTHER, ARGUMENTS, options.other.resolve()),
        System(AGAIN, ARGUMENTS),
    ]
    result: dict[str, Any] = {"goal": GOAL, "subjects": options.subjects}
    with counting() as folder, steps.fleet(systems) as servers:
        for name in options.subjects:
            subject = SUBJECTS[name]
            calls = {n: calls_a_step(servers[n], subject, folder) for n in (THIS, OTHER)}
            found = figures(measure(servers, subject, options.seconds))
            result[name] = {**found, "calls": compared(calls[THIS], calls[OTHER])}
            print(name, json.dumps(result[name]["calls"], indent=1))
            for pair in (each for each in found if "/" in each):
                for clock, values in found[pair].items():
                    low, high = values["median_95"]
                    print(name, pair, clock, f"{values['median']:.4f} ({low:.4f} to {high:.4f})")
    print(write_result("token_time", result, folder=options.out))


if __name__ == "__main__":
    main()
