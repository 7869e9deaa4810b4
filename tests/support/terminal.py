"""A terminal whose other side is a test: what a person would see, and type."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.servers import ROOT

MOST_LINES = 15  # of a first `make serve`, until it is ready
OF_SETUP = 6  # of those


@dataclass
class Terminal:
    """The side of it that a person is on."""

    pid: int
    descriptor: int

    def read_until(self, what: bytes, timeout_s: float) -> bytes:
        """All since the last time, when it has the pattern `what`; b"" waits for the end."""
        shown, deadline = b"", time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([self.descriptor], [], [], 0.2)[0]:
                try:
                    more = os.read(self.descriptor, 1 << 16)
                except OSError:  # nobody has the other side any more
                    return shown
                shown += more
            if what and re.search(what, shown, re.DOTALL):
                return shown
        raise AssertionError(f"no {what!r} in {timeout_s:g} s, but {shown!r}")


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """The command as the foreground of a terminal of its own, outside of any make."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        # A make below another one says more than a person's.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        os.execvpe(command[0], command, environment)
    try:
        yield Terminal(pid, descriptor)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
