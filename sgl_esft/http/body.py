"""A request's body: read within its limits, parsed once, and what is known of it then.

    receive --[read: size, time]--> bytes --[parse: depth, numbers]--> document
                adapter_names.resolve --> [RequestBody] --carry--> scope["state"], SGLang
                                                                     └--> body_of, in later layers

The gate does this once for each request. SGLang gets the bytes again, with the adapter named as it
reads it, and parses them itself.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sgl_esft.errors import BadBodyError, BodyTooLargeError, EsftError, SlowBodyError
from sgl_esft.http.answers import Headers, Message, Receive, Scope, header_values

MAX_DEPTH: Final = 32
MAX_OBJECTS: Final = 10_000  # reading them takes 0.1 s, in which nobody else is served
_INT64_LOW, _INT64_HIGH = -(1 << 63), (1 << 63) - 1
_STATE: Final = "sgl_esft_body"


@dataclass(frozen=True)
class RequestBody:
    """A body as SGLang gets it, and what it asks for."""

    raw: bytes
    document: object = None  # `raw` as JSON; None for a form
    adapters: frozenset[str] = frozenset()  # to be usable before SGLang sees the request
    refusal: EsftError | None = None  # what is wrong with the names in it, to be answered


def body_of(scope: Scope) -> RequestBody | None:
    """What was carried; None for a request of which no body is read."""
    found: RequestBody | None = scope.get("state", {}).get(_STATE)
    return found


def carry(body: RequestBody, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """The request's scope with the body in it, and a `receive` that gives the body once.

    Afterwards it gives what really arrives, which is the client's leaving.
    """
    length = str(len(body.raw)).encode()
    headers = scope["headers"]
    if any(name.lower() == b"content-length" and value != length for name, value in headers):
        headers = [pair for pair in headers if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", length))
    scope = {**scope, "headers": headers, "state": {**scope.get("state", {}), _STATE: body}}
    pending: list[Message] = [{"type": "http.request", "body": body.raw, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return scope, replayed


async def read(
    receive: Receive, headers: Headers, max_bytes: int, timeout_s: float
) -> bytes | None:
    """The whole body; None if the client left.

    Raises BadBodyError for a compressed one, BodyTooLargeError, SlowBodyError.
    """
    if any(value.lower() != "identity" for value in header_values(headers, b"content-encoding")):
        raise BadBodyError("a body must not be compressed")
    for value in header_values(headers, b"content-length"):
        if value.isascii() and value.isdigit():
            _check_size(int(value[:20]), max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _received(receive, max_bytes)
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not arrive within {timeout_s:g} s") from error


async def _received(receive: Receive, max_bytes: int) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        _check_size(size, max_bytes)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLargeError(
            f"a body may have {max_bytes} bytes; --max-body-bytes of the server sets this"
        )


def parse(raw: bytes) -> object:
    """The JSON of a body, with its depth and its numbers checked. Raises BadBodyError."""
    left = iter(range(MAX_OBJECTS))
    try:
        document: object = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=partial(_unique, left),
            parse_constant=_not_finite,
        )
    except (ValueError, RecursionError) as error:
        raise BadBodyError(
            "the body must be JSON in UTF-8, with no key twice and no NaN or Infinity"
        ) from error
    _check_values(document)
    return document


def _unique(left: Iterator[int], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of one body must not see two values. Raises BadBodyError when none is left."""
    if next(left, None) is None:
        raise BadBodyError(f"a body may have {MAX_OBJECTS} objects")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _not_finite(_: str) -> None:
    raise ValueError("a number is not finite")


def _check_values(document: object) -> None:
    waiting: list[tuple[Iterable[Any], int]] = [([document], 0)]
    while waiting:
        values, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise BadBodyError(f"a body may be {MAX_DEPTH} levels deep")
        if isinstance(values, list):
            values = _without_plain(values)
        for value in values:
            if isinstance(value, dict):
                waiting.append((value.values(), depth + 1))
            elif isinstance(value, list):
                waiting.append((value, depth + 1))
            else:
                _check_number(value)


def _without_plain(values: list[Any]) -> list[Any]:
    """A long list of token ids is checked by its least and greatest only."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return [min(values), max(values)]
    return [] if kinds == {str} else values


def _check_number(value: object) -> None:
    if isinstance(value, int) and not _INT64_LOW <= value <= _INT64_HIGH:
        raise BadBodyError("an integer must have 64 bits at most")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadBodyError("a number must be finite")
