"""The one service of the process that serves HTTP, and the signals that reach it.

until the engine is up: [hear_ends] --> SystemExit, and everything that was started is killed
afterwards: the event loop --> Service; SGLang's handlers and its loop, of our classes --> Service
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from sgl_esft.errors import InvariantError
from sgl_esft.health import ending
from sgl_esft.health.service import Service

logger = logging.getLogger(__name__)

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
    ending.leave_within(_CLEAN_UP_S, 128 + number)
    sys.exit(128 + number)


def on_sigterm(handler: Any, signum: int | None = None, frame: Any = None) -> None:
    """In place of SGLang's. It installs its handler anew with the first request."""
    _required().on_signal(signal.SIGTERM)


def on_sigquit(handler: Any, signum: int | None = None, frame: Any = None) -> None:
    """In place of SGLang's: one of its processes has failed."""
    _required().on_quit()


async def keep_loop(original: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """Around SGLang's loop, which hands outputs to requests: without it no answer ever comes.

    SGLang would dump its processes, and then kill this one, while its clients wait.
    """
    try:
        await original(manager)
    except Exception as error:
        logger.exception("health: the loop that hands out answers has failed")
        _required().note_fault(f"the front has failed: {type(error).__name__}: {error}")
