"""A day's load, compressed: low at night, high at noon, with bursts that nobody announced.

    seconds, rates, seed --[day_of]--> Day --[spans]--> traffic.arrivals --> times of requests

The rate is a cosine from midnight to midnight, and bursts on top of it whose times are the seed's.
`Day.load` is the rate's integral in closed form: how many requests a span of time is offered.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

NUM_BURSTS = 4
BURST_SHARE = 1 / 40  # of the day: 36 minutes of one of 24 hours, 15 seconds of one of ten minutes
BURST_HEIGHT = 0.4  # of the way from night to noon, on top of what there is


@dataclass(frozen=True)
class Burst:
    """`rate` more requests a second, for a while."""

    at_s: float
    seconds: float
    rate: float

    def load(self, begin_s: float, end_s: float) -> float:
        """Its requests within a span."""
        shared_s = min(end_s, self.at_s + self.seconds) - max(begin_s, self.at_s)
        return self.rate * max(0.0, shared_s)


@dataclass(frozen=True)
class Day:
    """Requests a second over a day; it begins at midnight."""

    seconds: float
    night: float
    noon: float
    bursts: tuple[Burst, ...] = ()

    def rate(self, at_s: float) -> float:
        """Requests a second at a moment."""
        swing = (1 - math.cos(2 * math.pi * at_s / self.seconds)) / 2
        there = [each for each in self.bursts if 0 <= at_s - each.at_s < each.seconds]
        return self.night + (self.noon - self.night) * swing + sum(each.rate for each in there)

    def load(self, begin_s: float, end_s: float) -> float:
        """Requests that a span is offered: the integral of `rate` over it."""
        smooth = self._smooth_load(end_s) - self._smooth_load(begin_s)
        return smooth + sum(each.load(begin_s, end_s) for each in self.bursts)

    def _smooth_load(self, until_s: float) -> float:
        """Without bursts, from midnight on."""
        turn = 2 * math.pi / self.seconds
        swing = (until_s - math.sin(turn * until_s) / turn) / 2
        return self.night * until_s + (self.noon - self.night) * swing


def day_of(seconds: float, night: float, noon: float, seed: int) -> Day:
    """The day of a seed: the shape is every seed's, the bursts' times are its own."""
    rng = random.Random(seed)
    length, height = seconds * BURST_SHARE, (noon - night) * BURST_HEIGHT
    begins = sorted(rng.uniform(0, seconds - length) for _ in range(NUM_BURSTS))
    return Day(seconds, night, noon, tuple(Burst(at, length, height) for at in begins))


def spans(day: Day, width_s: float = 1.0) -> list[tuple[float, float]]:
    """(seconds, requests a second) of equal spans of about `width_s`, as `arrivals` takes them."""
    count = max(1, round(day.seconds / width_s))
    width = day.seconds / count
    edges = [width * number for number in range(count + 1)]
    return [(width, day.load(begin, begin + width) / width) for begin in edges[:-1]]
