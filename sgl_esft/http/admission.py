"""Every request passes here: new work is refused while the server ends, and old work is counted.

gate --> [Admission] --> SGLang, our routes
             |  draining: 503 DrainingError, Retry-After
             '--> service: in flight; ended with an error when the engine fails or time is up
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Protocol

from sgl_esft.errors import EsftError
from sgl_esft.http.answers import App, Receive, Scope, Send, send_error
from sgl_esft.http.classes import routed_path
from sgl_esft.http.deadline import run_until

_GRACE_S = 0.3  # for SGLang, to take notice that its client is gone

# They end work or let it go on, and are of use while the server drains.
_CONTROL = frozenset({"/v1/drain", "/abort_request", "/continue_generation"})
# A GET that runs the model, and SGLang's own word for "send me requests".
_PROBES_OF_WORK = frozenset({"/health", "/health_generate", "/ready"})
_READ_ONLY = frozenset({"GET", "HEAD", "OPTIONS"})


class AdmissionControl(Protocol):
    """What a request meets; service.py is the real one."""

    def begin(self) -> None:
        """The event loop runs, and the server is about to listen."""

    def refusal(self) -> EsftError | None:
        """Why no work is taken now; None if it is."""

    def in_flight(self) -> AbstractContextManager[asyncio.Future[EsftError]]:
        """One more piece of work for as long; the future ends it with an error."""


def is_refused_when_ending(method: str, path: str) -> bool:
    """Whether a request needs a server that takes work."""
    return path in _PROBES_OF_WORK or is_work(method, path)


def is_work(method: str, path: str) -> bool:
    """Whether the server should not end before it has answered."""
    return method not in _READ_ONLY and path not in _CONTROL


class Admission:
    """An ASGI application around the server's."""

    def __init__(self, app: App, control: AdmissionControl) -> None:
        self._app = app
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._control.begin()
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], routed_path(scope)
        refusal = self._control.refusal()
        if refusal is not None and is_refused_when_ending(method, path):
            await send_error(send, refusal)
        elif is_work(method, path):
            with self._control.in_flight() as over:
                await run_until(over, self._app, scope, receive, send, _GRACE_S)
        else:
            await self._app(scope, receive, send)
