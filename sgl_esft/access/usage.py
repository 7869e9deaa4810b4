"""How many tokens an answer says it used, read as it passes by.

    SGLang --bytes--> [UsageReader.feed] --> client
                             └--> tokens(), for limits.Ticket.leave

An answer is one JSON document, or a stream of `data:` lines of which the last ones tell. An answer
that says nothing is charged what was reserved for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

# An answer longer than this is not kept to be read; what it reserved counts then.
_MAX_KEPT_BYTES: Final = 8 << 20
_TELLS = (b'"completion_tokens"', b'"usage"')


class UsageReader:
    """Reads one answer; never changes it, never fails."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._rest = b""  # what came after the last whole line
        self._last: dict[object, int] = {}  # part of a stream -> tokens so far
        self._is_too_long = False

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the answer's body."""
        self._is_too_long = self._is_too_long or len(self._rest) + len(chunk) > _MAX_KEPT_BYTES
        if self._is_too_long:
            self._rest = b""
            return
        self._rest += chunk
        if self._is_stream:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._read_line(line)

    def tokens(self) -> int | None:
        """Tokens of prompt and answer together; None if the answer did not say."""
        if self._is_too_long:
            return None
        if self._is_stream:
            return sum(self._last.values()) if self._last else None
        return tokens_of(_parsed(self._rest))

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(b"data:") or not any(word in line for word in _TELLS):
            return
        event = _parsed(line[len(b"data:") :])
        tokens = tokens_of(event)
        if tokens is not None:
            self._last[event.get("index") if isinstance(event, dict) else None] = tokens


def tokens_of(answer: object) -> int | None:
    """Tokens that an answer, or an event of a stream, says were used."""
    if isinstance(answer, list):
        counts = [tokens_of(each) for each in answer]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None
    if not isinstance(answer, dict):
        return None
    told = answer.get("usage") or answer.get("meta_info")
    return _sum(told) if isinstance(told, dict) else None


def _sum(told: Mapping[str, Any]) -> int | None:
    names = (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"))
    for pair in names:
        counts = [told.get(name) for name in pair]
        if any(isinstance(count, int) for count in counts):
            return sum(count for count in counts if isinstance(count, int))
    return None


def _parsed(raw: bytes) -> object:
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value
