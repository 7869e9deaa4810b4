"""Around the whole server, refusals included: request ids, errors, ends of requests.

    client -> [Observer: x-request-id] -> gate -> SGLang
           <- status, error's type, duration -> metrics, access log

An ASGI application sees what a client gets; how many tokens and how fast is not asked of answers,
which need not say, but of SGLang (engine_hooks.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sgl_esft.http import record
from sgl_esft.http.answers import App, Message, Receive, Scope, Send
from sgl_esft.http.classes import routed_path
from sgl_esft.http.record import REQUEST_ID_HEADER, RequestRecord
from sgl_esft.observe.json_logs import AccessLog
from sgl_esft.observe.request_metrics import RequestMetrics

# (method, path) -> whether such requests are for the model
RunsModel: TypeAlias = Callable[[str, str], bool]

_NOT_NOW_STATUS: Final = 503
_TIMEOUT_STATUS: Final = 504
_MAX_ERROR_BYTES: Final = 64 << 10
_MAX_PATH: Final = 200
# The second is Anthropic's.
_ERROR_EVENTS: Final = (b'data: {"error"', b"event: error\n")


class Observer:
    """The server's application and what is seen of it."""

    def __init__(
        self,
        app: App,
        runs_model: RunsModel,
        metrics: RequestMetrics | None = None,
        log: AccessLog | None = None,
        refresh: Sequence[Callable[[], None]] = (),
    ) -> None:
        """refresh: called before GET /metrics is answered."""
        self._app = app
        self._runs_model = runs_model
        self._metrics = metrics
        self._log = log
        self._refresh = refresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = RequestRecord(record.request_id_of(scope["headers"]), time.perf_counter())
        record.begin(request)
        if routed_path(scope) == "/metrics":
            for publish in self._refresh:
                publish()
        answer = _Answer(
            request.request_id, receive, send, lambda: self._ended(scope, request, answer)
        )
        try:
            await self._app(scope, answer.receive, answer.send)
        finally:
            if not answer.has_ended:
                self._ended(scope, request, answer)

    def _ended(self, scope: Scope, request: RequestRecord, answer: _Answer) -> None:
        """Before the client has the last byte, so that whoever asks then finds it counted."""
        method, path = scope["method"], routed_path(scope)
        outcome = answer.outcome()
        error_type = answer.error_type()
        if self._metrics is not None:
            if self._runs_model(method, path):
                self._metrics.request_ended(request, outcome)
            if answer.is_error:
                self._metrics.error_answered(error_type)
        if self._log is not None:
            self._log.write(
                method,
                path[:_MAX_PATH],
                answer.status,
                request_id=request.request_id,
                client=_host_of(scope),
                key=request.key_name,
                outcome=outcome,
                error=error_type,
                adapters=list(request.adapters),
                prompt_tokens=request.prompt_tokens,
                generated_tokens=request.generated_tokens,
                ttft_s=_rounded(request.ttft_s),
                duration_s=_rounded(time.perf_counter() - request.started_s),
            )


@dataclass
class _Answer:
    """Passes an answer on, with the request's id, and remembers how it went."""

    request_id: str
    client_receive: Receive
    client_send: Send
    on_end: Callable[[], None]  # once; not called for an answer that is cut off
    status: int | None = None
    has_ended: bool = False
    has_client_left: bool = False
    error: bytes = b""  # the body of an answer that is an error, or a stream's last event

    async def receive(self) -> Message:
        message = await self.client_receive()
        if message["type"] == "http.disconnect" and not self.has_ended:
            self.has_client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_id(message.get("headers", ()))}
            if _says_that_it_is_empty(message["headers"]):
                self._end()  # the client has all of it before the body's message comes
        elif message["type"] == "http.response.body" and not self.has_ended:
            self._read(message)
        await self.client_send(message)

    def outcome(self) -> str:
        """One of request_metrics.OUTCOMES."""
        if self.has_client_left and not self.error:
            return "cancelled"  # whatever SGLang makes of that: a 400, or the end of a stream
        if self.status is None or not self.has_ended:
            return "failed"
        if self.status == _TIMEOUT_STATUS or self.error_type() == "RequestTimeoutError":
            return "timeout"
        if self.status < 400:
            return "failed" if self.error else "ok"
        return "refused" if self.status < 500 or self.status == _NOT_NOW_STATUS else "failed"

    @property
    def is_error(self) -> bool:
        """Whether the client got an error."""
        return bool(self.error) or ((self.status or 0) >= 400 and not self.has_client_left)

    def error_type(self) -> str | None:
        """The error's class, as the answer says it; None if it does not."""
        if not self.error:
            return None
        try:
            told: Any = json.loads(
                self.error.removeprefix(b"event: error\n").removeprefix(b"data: ")
            )
        except (ValueError, RecursionError):
            return None
        inner = told.get("error") if isinstance(told, dict) else None
        described = inner if isinstance(inner, dict) else told  # SGLang has both shapes
        found = described.get("type") if isinstance(described, dict) else None
        return found if isinstance(found, str) else None

    def _read(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if not self.has_client_left:  # else nobody gets it
            self._read_error(body)
        if not message.get("more_body", False):
            self._end()  # SGLang's application lives on for seconds after a stream

    def _end(self) -> None:
        self.has_ended = True
        self.on_end()

    def _read_error(self, body: bytes) -> None:
        if (self.status or 0) >= 400:
            self.error = (self.error + body)[:_MAX_ERROR_BYTES]
        elif body.startswith(_ERROR_EVENTS):
            self.error = body[:_MAX_ERROR_BYTES]

    def _with_id(self, headers: Any) -> list[tuple[bytes, bytes]]:
        kept = [(name, value) for name, value in headers if name.lower() != REQUEST_ID_HEADER]
        return [*kept, (REQUEST_ID_HEADER, self.request_id.encode())]


def _says_that_it_is_empty(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-length" and value == b"0" for name, value in headers)


def _host_of(scope: Scope) -> str | None:
    client = scope.get("client")
    return str(client[0]) if client else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
