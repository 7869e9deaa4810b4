"""Errors as answers, in the shape of OpenAI's, which SGLang's own routes use too."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response

from sgl_esft.errors import (
    AmbiguousLengthError,
    BodyTooLargeError,
    EsftError,
    HeadersTooLargeError,
    NoKeyError,
    RetryLaterError,
    SlowBodyError,
)

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# The rest of the request is not wanted.
_CLOSING = (AmbiguousLengthError, BodyTooLargeError, HeadersTooLargeError, SlowBodyError)


def header_values(headers: Headers, name: bytes) -> list[str]:
    """All values of one header."""
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def error_json(error: EsftError, status: int | None = None) -> bytes:
    """The body of an error's answer; `status` if it is not the error's own."""
    described = {
        "message": str(error),
        "type": type(error).__name__,
        "param": None,
        "code": error.http_status if status is None else status,
    }
    return json.dumps({"error": described}).encode()


def _headers(error: EsftError) -> dict[str, str]:
    """The headers of an error's answer, but for those that every answer has."""
    headers = {}
    if isinstance(error, RetryLaterError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, NoKeyError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _CLOSING):
        headers["connection"] = "close"
    return headers


def as_response(error: EsftError, status: int | None = None) -> Response:
    """A route's answer with an error; `status` if it is not the error's own."""
    return Response(
        error_json(error, status),
        error.http_status if status is None else status,
        _headers(error),
        media_type="application/json",
    )


async def send_error(send: Send, error: EsftError) -> None:
    """An ASGI application's answer with an error."""
    answer = as_response(error)
    start = {"status": answer.status_code, "headers": answer.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": answer.body})


async def end_stream(send: Send, error: EsftError) -> None:
    """End an event stream that has begun with an error event: never a silent stop."""
    event = b"data: " + error_json(error) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": False})
