"""Errors as answers, in the shape of OpenAI's, which SGLang's own routes use too."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from sgl_esft.errors import (
    BodyTooLargeError,
    DrainingError,
    EsftError,
    HeadersTooLargeError,
    KeyLimitError,
    NoKeyError,
    SlowBodyError,
)

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# The rest of the request is not wanted.
_CLOSING = (BodyTooLargeError, HeadersTooLargeError, SlowBodyError)


def error_json(error: EsftError) -> bytes:
    """The body of an error's answer."""
    described = {
        "message": str(error),
        "type": type(error).__name__,
        "param": None,
        "code": error.http_status,
    }
    return json.dumps({"error": described}).encode()


def _headers(error: EsftError, length: int) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    if isinstance(error, KeyLimitError | DrainingError):
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    if isinstance(error, NoKeyError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, _CLOSING):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(send: Send, error: EsftError) -> None:
    """Answer with an error."""
    body = error_json(error)
    headers = _headers(error, len(body))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def end_stream(send: Send, error: EsftError) -> None:
    """End an event stream that has begun with an error event: never a silent stop."""
    event = b"data: " + error_json(error) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": False})
