"""Has a process of the server died or hung? Values in, values out.

    parts (state, silence, how long stopped), limits --> [first_fault] --> why the server must end

A long batch is no fault: only silence for `hang_s` is, and that is a user's to set. A process that
is stopped, as by SIGSTOP, computes nothing, so it is given up sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

STOPPED_S = 6.0  # somebody may look at a process for a moment


class ProcessState(StrEnum):
    """What the kernel says."""

    ALIVE = "alive"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class Part:
    """A process of the server. `silent_s` is since its loop turned; None where it has no loop."""

    name: str
    pid: int
    state: ProcessState
    stopped_s: float = 0.0
    silent_s: float | None = None


def first_fault(parts: Iterable[Part], hang_s: float) -> str | None:
    """What is wrong with the first part that has a fault; None if none has."""
    return next((fault for part in parts if (fault := _fault(part, hang_s))), None)


def _fault(part: Part, hang_s: float) -> str | None:
    who = f"{part.name} (process {part.pid})"
    stopped_s = min(STOPPED_S, hang_s)
    if part.state is ProcessState.ENDED:
        return f"{who} has died"
    if part.state is ProcessState.STOPPED and part.stopped_s >= stopped_s:
        return f"{who} has been stopped for {stopped_s:g} s"
    if part.silent_s is not None and part.silent_s >= hang_s:
        return f"{who} has given no sign of life for {hang_s:g} s, which is --hang-timeout"
    return None
