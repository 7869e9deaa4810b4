"""Processes as the kernel shows them, and how those that this one has started end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from sgl_esft.health.faults import ProcessState

_KILL_WAIT_S = 2.0
_POLL_S = 0.02
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # a zombie only waits for its parent
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def state_of(pid: int) -> ProcessState:
    """Whether a process runs. One that has ended may still wait for its parent."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ProcessState.ENDED
    if status in _ENDED:
        return ProcessState.ENDED
    return ProcessState.STOPPED if status in _STOPPED else ProcessState.ALIVE


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
    """Processes below this one; none when it has ended."""
    try:
        return [child.pid for child in psutil.Process(root).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
