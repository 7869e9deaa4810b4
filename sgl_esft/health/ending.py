"""The last step of a process that has served."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from sgl_esft.errors import InvariantError
from sgl_esft.health.processes import kill_children
from sgl_esft.health.service import Service


def leave_after(main: Callable[[], int]) -> None:
    """Run a program, and end with its status, also when it ends by `sys.exit`."""
    try:
        status = main()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    leave(status)


def leave_within(seconds: float, status: int) -> None:
    """Whatever hangs: this process and all below it are gone by then."""

    def end() -> None:
        time.sleep(seconds)
        kill_children()
        os._exit(status)

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
# alone
# decides how the server ends: its children do not hear SIGINT and SIGTERM, and end with it.

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


# The one service of the process that serves HTTP, and the signals that reach it.
#
# until the engine is up: [hear_ends] --> SystemExit, and everything that was started is killed
# afterwards: the event loop --> Service; SGLang's own handlers, hooked --> Service

_CLEAN_UP_S = 5.0

_service: Service | None = None


def use(service: Service) -> None:
    """The service of this process, before the server is started."""
    global _service
    _service = service


def _required() -> Service:
    if _service is None:
        raise InvariantError("a signal of the engine reached a process that serves no HTTP")
    return _service


def hear_ends() -> None:
    """SIGINT and SIGTERM end this process by SystemExit, so that it cleans up. Main thread only."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait for the cleaning up
    leave_within(_CLEAN_UP_S, 128 + number)
    sys.exit(128 + number)


def on_sigterm(handler: Any, signum: int | None = None, frame: Any = None) -> None:
    """In place of SGLang's. It installs its handler anew with the first request."""
    _required().on_signal(signal.SIGTERM)


def on_sigquit(handler: Any, signum: int | None = None, frame: Any = None) -> None:
    """In place of SGLang's: one of its processes has failed."""
    _required().on_quit()
