"""Processes that the runtime starts, wherever they run.

memory/control.py, instance/table.py --> [Process] <-- LocalProcess, CopiedProcess (here)
                                                   <-- RemoteProcess (nodes/cluster.py)
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil


class Process(Protocol):
    """What is used of subprocess.Popen, and what concerns the group that a process leads."""

    @property
    def pid(self) -> int:
        """Its number on its own machine."""

    @property
    def returncode(self) -> int | None:
        """How it ended, as `poll` last saw it; None while it runs."""

    def poll(self) -> int | None:
        """How it ended; None while it runs. Never waits."""

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, when it has. Raises subprocess.TimeoutExpired."""

    def terminate(self) -> None:
        """SIGTERM; harmless when it has ended."""

    def kill(self) -> None:
        """SIGKILL; harmless when it has ended."""

    def kill_group(self) -> None:
        """End its process group, and wait for it; harmless when they are gone."""

    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP; False when it is gone."""

    def give_way(self, how: str, at_most_s: float = 0.0) -> None:
        """Another priority for its group: see `give_way`, the function."""


UNKNOWN_STATUS = -255  # of a process whose parent has ended before it was asked


class LocalProcess(subprocess.Popen[bytes]):
    """A child of this process."""

    def kill_group(self) -> None:
        self.give_way("background")  # to take down all its memory is work too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def give_way(self, how: str, at_most_s: float = 0.0) -> None:
        give_way(self.pid, how, at_most_s)


class CopiedProcess:
    """A copy of another process of ours, and so that one's child: followed by its pidfd.

    `status_of` asks the parent how it has ended, once it has; None when nobody knows. The pidfd is
    closed then: this object may be kept for long, by an error's traceback for one.
    """

    def __init__(self, pid: int, pidfd: int, status_of: Callable[[int], int | None]) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status_of = status_of
        self._returncode: int | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if self._returncode is None:
            os.close(self._pidfd)

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def poll(self) -> int | None:
        with self._lock:
            if self._returncode is None and _has_ended(self._pidfd, 0.0):
                status = self._status_of(self.pid)
                self._returncode = UNKNOWN_STATUS if status is None else status
                os.close(self._pidfd)
            return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            self._await_end(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def _await_end(self, timeout_s: float | None) -> None:
        """By a descriptor of its own: another thread may see the end first, and close the other."""
        with self._lock:
            if self._returncode is not None:
                return
            pidfd = os.dup(self._pidfd)
        try:
            _has_ended(pidfd, timeout_s)
        finally:
            os.close(pidfd)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def kill_group(self) -> None:
        self.give_way("background")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def give_way(self, how: str, at_most_s: float = 0.0) -> None:
        give_way(self.pid, how, at_most_s)

    def _send(self, number: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._returncode is None:
                signal.pidfd_send_signal(self._pidfd, number)


def _has_ended(pidfd: int, timeout_s: float | None) -> bool:
    poll = select.poll()  # of any descriptor; `select` takes those below 1024
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False when it is gone."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


# Processor priority of an instance: what starts, parks or ends must not slow down what serves.
#
# standby starts                --[when_idle]--> SCHED_IDLE: only what others leave, for a while
# old instance parks or ends    --[background]--> nice 15: a small share in any case
# it is parked, or wanted now   --[foreground]--> as the front
#
# A rank that serves sleeps and wakes many times in a step. A thread of SCHED_IDLE gives way to it
# at once, one with a nice value only after some milliseconds. On a machine with processors to spare
# none of it shows. Only who may take a priority back lowers it (CAP_SYS_NICE, or RLIMIT_NICE): else
# a standby would stay slow when it serves.

BACKGROUND_NICE = 15
_CAP_SYS_NICE = 23  # linux/capability.h


@cache
def may_take_back() -> bool:
    """Whether this process may raise a priority that it has lowered."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False  # somebody chose a policy for all of the server
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - os.getpriority(os.PRIO_PROCESS, 0):
        return True
    status = Path("/proc/self/status").read_text()
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(capabilities.split()[1], 16) >> _CAP_SYS_NICE & 1)


@contextlib.contextmanager
def giving_way(process: Process, how: str, at_most_s: float = 0.0) -> Iterator[None]:
    """As `give_way`, for as long as the block takes; then the front's priority."""
    process.give_way(how, at_most_s)
    try:
        yield
    finally:
        process.give_way("foreground")


def give_way(group: int, how: str, at_most_s: float = 0.0) -> None:
    """Another priority for a process group; nothing where that could not be taken back.

    `background`: it gives way to others. `foreground`: it has the front's priority again.
    `when_idle`: it gets what nobody else wants, and after `at_most_s` a small share in any case: a
    busy machine may have no idle time. In the foreground meanwhile, it stays there.
    """
    if how == "when_idle":
        _set(group, os.SCHED_IDLE, BACKGROUND_NICE)
        timer = threading.Timer(at_most_s, _no_longer_idle, [group])
        timer.daemon = True
        timer.start()
        return
    own = os.getpriority(os.PRIO_PROCESS, 0)
    _set(group, os.SCHED_OTHER, BACKGROUND_NICE if how == "background" else own)


def _no_longer_idle(group: int) -> None:
    if any(_is_idle(thread_id) for thread_id in _threads(group)):
        give_way(group, "background")


def _is_idle(thread_id: int) -> bool:
    try:
        return os.sched_getscheduler(thread_id) == os.SCHED_IDLE
    except ProcessLookupError:  # it has just ended
        return False


def _set(group: int, policy: int, nice: int) -> None:
    """Linux keeps both for each thread; one that has just ended is passed over."""
    if not may_take_back():
        return
    for thread_id in _threads(group):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(thread_id, policy, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread_id, nice)


def _threads(group: int) -> list[int]:
    found: list[int] = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has just ended
            if os.getpgid(pid) == group:
                found += [thread.id for thread in psutil.Process(pid).threads()]
    return found
