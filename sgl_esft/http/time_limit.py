"""Work on a client's text on the event loop itself, with a time limit: SIGALRM ends it.

    hook around SGLang's code -> [run: a timer] -> that code --past the limit--> TextTimeoutError
                                                              | noted for the request
    client <-- the named error, whatever SGLang made of it <-- [NamedErrors]

Where SGLang parses a model's answer or checks a schema, other requests wait. Python, and `re` too,
looks at signals while it runs, so a timer's handler can raise there. What it raises is no
`Exception`, since parsers catch those, and the timer rings again for code that catches all.

Only in the main thread, where handlers run, and only after `start`: elsewhere `run` just calls.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeVar

from sgl_esft.errors import EsftError, TextParserError, TextTimeoutError
from sgl_esft.http.answers import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    end_stream,
    error_json,
    send_error,
)
from sgl_esft.http.deadline import is_event_stream

Result = TypeVar("Result")

CALL_S: Final = 0.5  # one call: /healthz answers within 1 s throughout
LEAST_S: Final = 0.05  # one call, where others have used up what there is
_SHARE: Final = 0.5  # of the event loop's time, that calls of all requests may take
_AGAIN_S: Final = 0.05
_SPENT: Final = "_sgl_esft_spent_s"  # of an object whose calls are limited together
_ERROR_EVENT: Final = b'data: {"error"'


@dataclass
class _Allowance:
    """What calls of all requests may take now: many long ones at once do not stop the loop."""

    left_s: float = CALL_S
    counted_at: float = 0.0

    def limit(self, now: float) -> float:
        """Of a call that begins now."""
        refilled = self.left_s + (now - self.counted_at) * _SHARE
        self.left_s, self.counted_at = min(CALL_S, refilled), now
        return max(LEAST_S, self.left_s)

    def spend(self, now: float) -> None:
        """A call ends that began when its limit was asked for."""
        self.left_s = max(0.0, self.left_s - (now - self.counted_at))
        self.counted_at = now


_total_s = 5.0
_allowance = _Allowance()
_noted: ContextVar[list[EsftError] | None] = ContextVar("sgl_esft_noted", default=None)


class _OverError(BaseException):
    """The limit of the code that runs now."""


def start(total_s: float) -> None:
    """Limit this process's main thread from now on; `total_s` is for all calls on one object."""
    global _total_s
    _total_s = total_s
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.siginterrupt(signal.SIGALRM, False)  # system calls of other threads go on


def _on_alarm(number: int, frame: FrameType | None) -> None:
    """Raises only within limited code: an alarm may come as late as after its end."""
    while frame is not None and frame.f_code is not _call.__code__:
        if frame.f_globals.get("__name__") == "logging":
            return  # it may hold a lock that all threads need: the next alarm is soon
        frame = frame.f_back
    if frame is not None:
        raise _OverError
    signal.setitimer(signal.ITIMER_REAL, 0)


def _call(function: Callable[..., Result], args: Any, kwargs: Any) -> Result:
    return function(*args, **kwargs)


def _is_limiting() -> bool:
    """Whether a limit can begin here: not in a forked job, nor within another limit."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is _on_alarm
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )


def run(what: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function that does `what` within CALL_S. Raises TextTimeoutError."""
    return _within(CALL_S, what, function, args, kwargs)


def run_for(
    subject: Any, what: str, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """As `run`, and all calls for a subject within the total. Raises TextTimeoutError."""
    spent = vars(subject).get(_SPENT, 0.0)
    started = time.thread_time()
    try:
        return _within(min(CALL_S, _total_s - spent), what, function, args, kwargs)
    finally:
        vars(subject)[_SPENT] = spent + time.thread_time() - started


def _within(
    seconds: float, what: str, function: Callable[..., Result], args: Any, kwargs: Any
) -> Result:
    if not _is_limiting():
        return function(*args, **kwargs)
    if seconds <= 0:
        raise note(_too_long(what))
    seconds = min(seconds, _allowance.limit(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        return _call(function, args, kwargs)
    except _OverError:
        raise note(_too_long(what)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _allowance.spend(time.monotonic())


def _too_long(what: str) -> TextTimeoutError:
    return TextTimeoutError(
        f"{what} holds up other requests: it may take {CALL_S:g} s at once, less where others do "
        f"the same, and {_total_s:g} s in all (--text-timeout of the server); ask for less"
    )


def note(error: EsftError) -> EsftError:
    """The error is what the request at hand ends with, whatever SGLang makes of it."""
    noted = _noted.get()
    if noted is not None:
        noted.append(error)
    return error


class NamedErrors:
    """An ASGI layer: a request for which an error was noted ends with that one.

    SGLang answers some of them with an error without its name. Text that took too long to parse it
    takes for plain text, which it may be half of.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        noted: list[EsftError] = []
        token = _noted.set(noted)
        naming = _Naming(send, noted)
        try:
            await self._app(scope, receive, naming)
        except (TextParserError, TextTimeoutError) as error:
            await naming.end(error)
        finally:
            _noted.reset(token)


class _Naming:
    def __init__(self, send: Send, noted: list[EsftError]) -> None:
        self._send = send
        self._noted = noted
        self._is_stream = False
        self._has_started = False
        self._has_ended = False

    async def __call__(self, message: Message) -> None:
        if self._has_ended:
            return
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        body = message.get("body", b"")
        if self._noted and self._is_stream and body.startswith(_ERROR_EVENT):
            message = {**message, "body": b"data: " + error_json(self._noted[0]) + b"\n\n"}
        await self._send(message)

    async def _start(self, message: Message) -> None:
        self._has_started = True
        self._is_stream = is_event_stream(message)
        error = self._noted[0] if self._noted and not self._is_stream else None
        if error is not None and (message["status"] >= 400 or isinstance(error, TextTimeoutError)):
            self._has_ended = True
            await send_error(self._send, error)
            return
        await self._send(message)

    async def end(self, error: EsftError) -> None:
        """The application raised it."""
        if not self._has_started:
            await send_error(self._send, error)
        elif self._is_stream and not self._has_ended:
            await end_stream(self._send, error)
        self._has_ended = True
