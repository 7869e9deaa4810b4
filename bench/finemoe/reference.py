"""Windows beside windows of one server that stays as it is: how fast the machine is meanwhile.

    Reference: one server, the same requests again and again --[beside]--> a window of it before and
    after windows of another one -> TimedWindows: those, and its seconds of computing a step
    of a whole run --[at_usual_speed]--> as if the machine had always been as fast as it usually was

A shared machine is slower for minutes, by more than what is compared. What is waited for on a link
that is held to a bandwidth takes as long on a slow one, so computing alone is put right.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgl_esft.offload.speed import SpeedPoint


@dataclass(frozen=True)
class TimedWindows:
    """Some windows in a row, and the reference's `compute_s` a step around them."""

    windows: tuple[SpeedPoint, ...]
    compute_s: float


class Reference:
    """Takes a window of the server that all others are compared with."""

    def __init__(self, window: Callable[[], SpeedPoint]) -> None:
        """window: of that server, always of the same requests. One is taken, which warms it."""
        self._window = window
        window()
        self._last_s = window().compute_s

    def beside(self, windows: Callable[[], Sequence[SpeedPoint]]) -> TimedWindows:
        """These, and a window after them; the one before them is that of the last ones."""
        found, before_s = tuple(windows()), self._last_s
        self._last_s = self._window().compute_s
        return TimedWindows(found, (before_s + self._last_s) / 2)


def usual_s(every: Sequence[TimedWindows]) -> float:
    """Seconds of computing a step of the reference, at the median of a run."""
    return statistics.median(each.compute_s for each in every)


def at_usual_speed(timed: TimedWindows, usual: float) -> list[SpeedPoint]:
    """Their computing as long as where a step of the reference computes for `usual` seconds."""
    return [
        replace(each, step_s=each.stall_s + each.compute_s * usual / timed.compute_s)
        for each in timed.windows
    ]
