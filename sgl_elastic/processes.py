"""Processes that the runtime starts, wherever they run.

memory/control.py, instance/table.py --> [Process] <-- LocalProcess (here)
                                                   <-- RemoteProcess (nodes/cluster.py)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sgl_elastic.instance import priority


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

    def foreground(self) -> None:
        """Its group has its parent's priority again."""

    def in_background(self) -> AbstractContextManager[None]:
        """For as long as the block takes, its group gives way to others."""

    def when_idle(self, at_most_s: float) -> AbstractContextManager[None]:
        """For the block, at most so long, its group gets what nobody else wants."""


class LocalProcess(subprocess.Popen[bytes]):
    """A child of this process."""

    def kill_group(self) -> None:
        priority.background(self.pid)  # to take down all its memory is work too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def foreground(self) -> None:
        priority.foreground(self.pid)

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        with priority.in_background(self.pid):
            yield

    @contextlib.contextmanager
    def when_idle(self, at_most_s: float) -> Iterator[None]:
        with priority.when_idle(self.pid, at_most_s):
            yield


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
