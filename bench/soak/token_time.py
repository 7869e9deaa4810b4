"""Time of a decode step (TPOT), base and one adapter: this checkout and another, side by side.

    three demo servers: this, other, this again, started several times
    --steps.py: one batch each, by turns of a few steps--> ratios of turns, their median by start
    --call_counter.py--> functions that a scheduler calls in a step
    -> mean over starts, with its interval; calls of both, and which differ -> token_time.json

Two servers of one commit differ by some percent for as long as they live, by where their memory
lies: so they are started several times, and what is said of a pair is the mean over starts and its
interval. `this again / this` is what the method itself is off by. Each server runs from its own
checkout with its own .venv. Calls do not differ by chance, and say what a step does more, by name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from bench.common.load import end_on_sigterm
from bench.common.record import RESULTS, spread, write_result
from bench.expertweave import steps
from bench.expertweave.steps import Batch, Lane, Point, Server, Stream, System
from bench.soak import call_counter

ADAPTER = "reverse"
GOAL = 1.005  # what is not used may cost a token at most half a percent
THIS, OTHER, AGAIN = "this", "other", "this again"
BOTH = "both / other"
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


Medians = dict[str, dict[str, float]]  # of one start: pair -> clock -> median ratio of its turns


def medians_of(point: Point) -> Medians:
    """Of turns a moment apart."""
    turns = point.turns
    found: Medians = {}
    for over, under in ((THIS, OTHER), (AGAIN, THIS), (AGAIN, OTHER)):
        pairs = list(zip(turns[over], turns[under], strict=True))
        found[f"{over} / {under}"] = {
            "wall": statistics.median(mine.wall / theirs.wall for mine, theirs in pairs),
            "cpu": statistics.median(mine.cpu / theirs.cpu for mine, theirs in pairs),
        }
    both = zip(turns[THIS], turns[AGAIN], turns[OTHER], strict=True)
    found[BOTH] = {
        "wall": statistics.median(math.sqrt(a.wall * b.wall) / c.wall for a, b, c in both)
    }
    return found


def over_starts(starts: Sequence[Medians]) -> dict[str, Any]:
    """Pair -> clock -> median and quartiles of its starts, and where their mean lies with 95%."""
    return {
        pair: {clock: _mean([each[pair][clock] for each in starts]) for clock in clocks}
        for pair, clocks in starts[0].items()
    }


def _mean(values: Sequence[float]) -> dict[str, Any]:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {**spread(values), "mean": mean, "mean_95": None}
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values)
    half /= math.sqrt(len(values))
    return {**spread(values), "mean": mean, "mean_95": [mean - half, mean + half]}


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


def calls_a_step(
    server: Server, others: Iterable[Server], subject: Subject, folder: Path
) -> Counter[str]:
    """By name, of one decode step on average. `others` go on: a rank that is stopped for long is
    given up by its server, and to count is slow.
    """
    adapter, size = subject
    written = folder / f"calls.{server.scheduler}"
    with ExitStack() as stack:
        for each in {server, *others}:
            stack.enter_context(each.turn())
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


def one_start(
    systems: Sequence[System], subjects: Sequence[str], seconds: float, calls: dict[str, Any]
) -> dict[str, Medians]:
    """By subject: medians of all pairs. `calls`: filled by the first start; others are alike."""
    medians = {}
    with counting() as folder, steps.fleet(systems) as servers:
        for name in subjects:
            subject = SUBJECTS[name]
            if name not in calls:
                calls[name] = compared(
                    *(
                        calls_a_step(servers[each], servers.values(), subject, folder)
                        for each in (THIS, OTHER)
                    )
                )
            medians[name] = medians_of(measure(servers, subject, seconds))
            print(name, medians[name][BOTH], calls[name]["this / other"], flush=True)
    return medians


def main() -> None:
    """Measure, print and record, after each start."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--starts", type=int, default=8, help="of the three servers")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each subject and start")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the result file")
    options = parser.parse_args()
    systems = [
        System(THIS, ARGUMENTS),
        System(OTHER, ARGUMENTS, options.other.resolve()),
        System(AGAIN, ARGUMENTS),
    ]
    starts: list[dict[str, Medians]] = []
    calls: dict[str, Any] = {}
    for number in range(options.starts):
        print(f"start {number + 1} of {options.starts}", flush=True)
        starts.append(one_start(systems, options.subjects, options.seconds, calls))
        result = {
            name: {"calls": calls[name], **over_starts([each[name] for each in starts])}
            for name in options.subjects
        }
        figures = {"goal": GOAL, "starts": len(starts), "subjects": result}
        write_result("token_time", figures, folder=options.out)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
