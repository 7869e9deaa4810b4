"""Alternatives measured in turns: drift of a shared machine then hits all of them alike.

    runs by name -> [interleave] -> a measurement of each run a round -> [ratios] to one of them

The order within a round alternates, and a ratio is taken within its round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.common.record import spread


@dataclass(frozen=True)
class Taken:
    """Seconds of one run, by the wall clock and by processor time of all threads."""

    wall: float
    cpu: float


def nothing() -> None:
    """For a device that works while it is called: there is nothing to wait for."""


def timed(work: Callable[[], object], wait: Callable[[], object] = nothing) -> Taken:
    """Run `work`; `wait` is for a device that works on after the call has returned."""
    wait()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wait()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def interleave(
    runs: Mapping[str, Callable[[], Taken]], rounds: int, *, warm_up: int = 2
) -> dict[str, list[Taken]]:
    """Each run once a round, forth and back in turn; the first `warm_up` rounds do not count."""
    taken: dict[str, list[Taken]] = {name: [] for name in runs}
    for number in range(-warm_up, rounds):
        for name in list(runs) if number % 2 else reversed(list(runs)):
            measured = runs[name]()
            if number >= 0:
                taken[name].append(measured)
    return taken


def ratios(runs: Sequence[Taken], base: Sequence[Taken]) -> dict[str, dict[str, float]]:
    """Spread of run over base, round by round: `wall` and `cpu`."""
    pairs = list(zip(runs, base, strict=True))
    return {
        "wall": spread([run.wall / other.wall for run, other in pairs]),
        "cpu": spread([run.cpu / max(other.cpu, 1e-9) for run, other in pairs]),
    }
