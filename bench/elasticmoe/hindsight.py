"""The best schedule of sizes in hindsight, composed of what static servers were measured to do.

    requests in time of each window, by static size --[best_schedule]--> a size for each window

What it is to be compared with: nobody can have it, since it knows the day before it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Met = Mapping[int, Sequence[int]]  # size -> requests in time, a number a window


@dataclass(frozen=True)
class Schedule:
    """A size for each window of the day, and how many requests it answers in time."""

    sizes: tuple[int, ...]
    num_met: int

    @property
    def num_scales(self) -> int:
        """How often the size changes."""
        return sum(one != other for one, other in zip(self.sizes, self.sizes[1:], strict=False))

    @property
    def cost(self) -> int:
        """Devices, summed over windows."""
        return sum(self.sizes)


def best_schedule(met: Met, needed: float) -> Schedule:
    """The schedule of the fewest devices, summed over windows, with `needed` requests in time.

    Of those that cost the same, one with the most requests in time. Raises ValueError where no
    schedule has so many.

    How it is computed: exactly, over all schedules of the given sizes, by the most requests in time
    for each sum of devices. From what: static servers of each size were sent the same requests at
    the same times; a window counts what the static server of its size answered in time of the
    requests that were sent in it. What that leaves out: scales are free and take no time, which
    favours the schedule; and a window's queue is the static server's own. So a window after a
    larger size counts the queue that the small static server had built up (against the schedule),
    and one of a large size after a small one counts none (for it). It is a yardstick from
    measurements, not a bound, and no server was run by it.
    """
    num_windows = len(next(iter(met.values())))
    best = {0: Schedule((), 0)}  # sum of devices -> the most in time with it
    for window in range(num_windows):
        longer: dict[int, Schedule] = {}
        for cost, known in best.items():
            for size, counts in met.items():
                one = Schedule((*known.sizes, size), known.num_met + counts[window])
                other = longer.get(cost + size)
                if other is None or one.num_met > other.num_met:
                    longer[cost + size] = one
        best = longer
    for cost in sorted(best):
        if best[cost].num_met >= needed:
            return best[cost]
    raise ValueError(f"no schedule of sizes {list(met)} has {needed:g} requests in time")
