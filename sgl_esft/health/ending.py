"""How a process of the server ends: the last step of the front, and the first of its children.

Imported by every process, so it knows nothing of the service (process.py does).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker

from sgl_esft.health.processes import kill_children

logger = logging.getLogger(__name__)


def leave_after(main: Callable[[], int]) -> None:
    """Run a program, and end with its status, also when it ends by `sys.exit`."""
    try:
        status = main()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    leave(status)


def leave_within(
    seconds: float,
    status: int,
    unless: threading.Event | None = None,
    exit_: Callable[[int], None] = os._exit,
) -> None:
    """Whatever hangs: this process and all below it are gone by then, `unless` it is set first."""
    closed = unless or threading.Event()

    def end() -> None:
        if closed.wait(seconds):
            return
        logger.error("health: no orderly end after %g s", seconds)
        kill_children()
        exit_(status)

    threading.Thread(target=end, name="health-exit", daemon=True).start()


def leave(status: int) -> None:
    """End this process, after what was registered for its end.

    `sys.exit` would also join threads and tear down modules, in which a message for a dead process
    can hang for ever. The thread that bounds the end (service.py) runs until the last line here.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# What every process that the front starts does first.
#
# Signals of a terminal, of a process group or of a systemd unit reach all processes. The front
# alone decides how the server ends: its children do not hear SIGINT and SIGTERM, and end with it.

_PR_SET_PDEATHSIG = 1


def leave_to_front() -> None:
    """In a child of `multiprocessing`: ignore SIGINT and SIGTERM, die with the parent."""
    ignore_ends()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        sys.exit("the process that started this one is gone already")


# Segments and semaphores are recorded, by who makes them, with a process of Python's that unlinks
# what is still recorded when the pipe to it is closed: when all who have it are gone, however they
# ended. As a child it would be killed with the others.
_TRACKER = """
import os
if os.fork():
    os._exit(0)
os.setsid()
from multiprocessing import resource_tracker
resource_tracker.main({fd})
"""


def track_apart() -> None:
    """Start that process for this one and its children, outside of its family and group.

    Before anything is shared. It says nothing of what it removes: there was no time to.
    """
    readable, writable = os.pipe()
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _TRACKER.format(fd=readable)]
    subprocess.run(command, pass_fds=(readable,), stdin=subprocess.DEVNULL, check=True)
    os.close(readable)
    resource_tracker._resource_tracker._fd = writable  # type: ignore[attr-defined]


def ignore_ends() -> None:
    """SIGINT and SIGTERM change nothing any more, here and in processes started from here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
