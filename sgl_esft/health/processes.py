"""Processes as /proc shows them, and how those that this one has started end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from sgl_esft.health.faults import ProcessState

_KILL_WAIT_S = 2.0
_POLL_S = 0.02


def state_of(pid: int) -> ProcessState:
    """Whether a process runs. One that has ended may still wait for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessState.ENDED
    return parse_state(stat)


def parse_state(stat: str) -> ProcessState:
    """The state in a line of /proc/PID/stat; the name before it may hold anything."""
    letter = stat.rpartition(")")[2].split()[0]
    if letter in "ZX":
        return ProcessState.ENDED
    return ProcessState.STOPPED if letter in "Tt" else ProcessState.ALIVE


def kill_children() -> None:
    """SIGKILL to every process below this one; returns when they are gone, in 2 s at the latest."""
    found = descendants(os.getpid())
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < deadline and any(is_there(pid) for pid in found):
        time.sleep(_POLL_S)


def is_there(pid: int) -> bool:
    """Whether a process has not ended."""
    return state_of(pid) is not ProcessState.ENDED


def descendants(root: int) -> list[int]:
    """Processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            children.setdefault(parse_parent(path.read_text()), []).append(int(path.parent.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is read
        found += children.get(pid, ())
    return found


def parse_parent(stat: str) -> int:
    """The parent's process id in a line of /proc/PID/stat."""
    return int(stat.rpartition(")")[2].split()[1])
