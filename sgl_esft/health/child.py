"""What every process that the front starts does first.

Signals of a terminal, of a process group or of a systemd unit reach all processes. The front alone
decides how the server ends: its children do not hear SIGINT and SIGTERM, and end with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leave_to_front() -> None:
    """In a child of `multiprocessing`: ignore SIGINT and SIGTERM, die with the parent."""
    ignore_ends()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        sys.exit("the process that started this one is gone already")


def ignore_ends() -> None:
    """SIGINT and SIGTERM change nothing any more, here and in processes started from here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
