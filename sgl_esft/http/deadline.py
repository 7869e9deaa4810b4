"""A request has a time to be answered in.

    gate --> [run_within] --> app: past the deadline it hears that the client has gone
    admission (health) --> [run_until] --> app: the same, when the server must end

SGLang aborts a request whose client has gone, within seconds, so that is what it is told. If it
does not end then, its task is cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sgl_esft.errors import EsftError, RequestTimeoutError
from sgl_esft.http.answers import App, Message, Receive, Scope, Send, end_stream, send_error

# SGLang looks every 4 s whether a client is still there.
GRACE_S = 6.0


class _Watched:
    """An application's receive and send, which end at the deadline."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._waits: set[asyncio.Timeout] = set()
        self.is_over = False
        self.has_started = False
        self.has_ended = False
        self.is_stream = False

    def end(self) -> None:
        """The deadline: from now on, and for whoever waits already, the client has gone."""
        self.is_over = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    async def receive(self) -> Message:
        if self.is_over:
            return _gone()
        # In the caller's own task, without a turn of the event loop where a message is there:
        # Starlette's `is_disconnected` gives up at the first one.
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                return await self._receive()
        except TimeoutError:
            if not wait.expired():
                raise
            return _gone()
        finally:
            self._waits.discard(wait)

    async def send(self, message: Message) -> None:
        if self.is_over:
            raise OSError("the time of the request is over")  # as for a client that has gone
        if message["type"] == "http.response.start":
            self.has_started = True
            self.is_stream = is_event_stream(message)
        elif message["type"] == "http.response.body":
            self.has_ended = not message.get("more_body", False)
        await self._send(message)


def _gone() -> Message:
    return {"type": "http.disconnect"}


def is_event_stream(start: Message) -> bool:
    """Whether the answer that starts is a stream of events."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


async def run_within(
    seconds: float, app: App, scope: Scope, receive: Receive, send: Send, grace_s: float = GRACE_S
) -> None:
    """Run the application; past the time, answer 504 or end its stream with an error."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[EsftError] = loop.create_future()
    error = RequestTimeoutError(f"no whole answer within {seconds:g} s: ask for less, or again")
    timer = loop.call_later(seconds, over.set_result, error)
    try:
        await run_until(over, app, scope, receive, send, grace_s)
    finally:
        timer.cancel()


async def run_until(
    over: asyncio.Future[EsftError],
    app: App,
    scope: Scope,
    receive: Receive,
    send: Send,
    grace_s: float = GRACE_S,
) -> None:
    """Run the application; when `over` has an error, answer that or end its stream with it."""
    watched = _Watched(receive, send)
    task = asyncio.ensure_future(app(scope, watched.receive, watched.send))
    waited: set[asyncio.Future[Any]] = {task, over}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return
        watched.end()
        await asyncio.wait({task}, timeout=grace_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # whatever it was, it came of being told that the client has gone
    await _say_over(watched, send, over.result())


async def _say_over(watched: _Watched, send: Send, error: EsftError) -> None:
    if not watched.has_started:
        await send_error(send, error)
    elif watched.is_stream and not watched.has_ended:
        await end_stream(send, error)
