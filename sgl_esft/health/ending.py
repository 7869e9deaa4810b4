"""The last step of a process that has served."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from sgl_esft.health.processes import kill_children


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
