"""One shape for every error that a client meets, whoever made it.

    SGLang's four shapes, FastAPI's, plain text, ours --> [ErrorShape] --> {"error": {...}}
                                                    below /v1/messages --> Anthropic's

The fields are OpenAI's: message, type, param, code. Anthropic's clients want `"type": "error"`
beside them, a type of their own list, and a named event in a stream. What else an answer says,
such as the `success` of SGLang's routes for adapters, stays beside the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from sgl_esft.http.answers import App, Message, Receive, Scope, Send
from sgl_esft.http.classes import routed_path
from sgl_esft.http.deadline import is_event_stream

_ANTHROPIC: Final = "/v1/messages"
_FIELDS: Final = frozenset({"message", "type", "param", "code"})
_SAID_FLAT: Final = frozenset({*_FIELDS, "object", "error"})
_MAX_MESSAGE: Final = 4096  # SGLang repeats a body that it refuses
_NAME: Final = re.compile(r"[A-Za-z]\w*")
_ERROR_EVENT: Final = b'data: {"error"'
# What openai's client calls these, where an answer does not say.
_TYPES: Final[Mapping[int, str]] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def shaped(path: str, status: int, raw: bytes) -> bytes:
    """The body of an error's answer in the one shape; `raw` is what the route said."""
    found = _parsed(raw)
    error = _described(status, found, raw)
    beside = {key: value for key, value in found.items() if key not in _said_by(found)}
    if _is_anthropic(path):
        error["type"] = _anthropic_type(status)
        return json.dumps({**beside, "type": "error", "error": error}).encode()
    return json.dumps({**beside, "error": error}).encode()


def shaped_event(path: str, raw: bytes) -> bytes:
    """A piece of an event stream that begins with an error event, with that in the one shape."""
    event, end, rest = raw.partition(b"\n\n")
    document = _parsed(event.removeprefix(b"data: "))
    inner = document.get("error")
    code = inner.get("code") if isinstance(inner, dict) else None
    status = code if isinstance(code, int) else int(HTTPStatus.INTERNAL_SERVER_ERROR)
    name = b"event: error\n" if _is_anthropic(path) else b""
    return name + b"data: " + shaped(path, status, json.dumps(document).encode()) + end + rest


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _said_by(found: Mapping[str, Any]) -> frozenset[str]:
    """The fields of a document that are the error's, and not beside it."""
    if found.get("object") == "error":
        return _SAID_FLAT
    return frozenset({"error", "detail"} if isinstance(found.get("detail"), str) else {"error"})


def _described(status: int, found: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    inner = found.get("error")
    said: Mapping[str, Any] = inner if isinstance(inner, dict) else found
    kind, code = said.get("type"), said.get("code")
    is_named = isinstance(kind, str) and _NAME.fullmatch(kind) and said.get("message") is not None
    return {
        "message": _message(status, said, found, raw)[:_MAX_MESSAGE],
        "type": kind if is_named else _default_type(status),
        "param": said.get("param"),
        "code": status if code is None else code,
    }


def _message(status: int, said: Mapping[str, Any], found: Mapping[str, Any], raw: bytes) -> str:
    for value in (
        *(said.get("message"), found.get("error"), found.get("detail")),
        *(found.get("error_message"), found.get("reason")),
    ):
        if isinstance(value, str) and value:
            return value
    if isinstance(found.get("detail"), list):
        return "the body is not what the route takes: see `detail`"
    text = "" if found else raw.decode("utf-8", "replace").strip()
    return text or HTTPStatus(status).phrase


def _default_type(status: int) -> str:
    return _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


class ErrorShape:
    """The server's application with all of its errors in the one shape."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "HEAD":
            send = _ShapedSend(send, routed_path(scope))
        await self._app(scope, receive, send)


class _ShapedSend:
    """Keeps an error's answer until it is whole; passes others on as they come."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._start: Message | None = None  # of an error
        self._chunks: list[bytes] = []
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._start = message
                return
            self._is_stream = is_event_stream(message)
        elif self._start is not None and message["type"] == "http.response.body":
            await self._keep(self._start, message)
            return
        elif self._is_stream and message.get("body", b"").startswith(_ERROR_EVENT):
            message = {**message, "body": shaped_event(self._path, message["body"])}
        await self._send(message)

    async def _keep(self, start: Message, message: Message) -> None:
        self._chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = shaped(self._path, start["status"], b"".join(self._chunks))
        replaced = (b"content-length", b"content-type")
        headers = [pair for pair in start.get("headers", ()) if pair[0].lower() not in replaced]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
