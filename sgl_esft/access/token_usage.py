"""How many tokens an answer says it used, read as it passes by.

    SGLang --bytes--> [UsageReader.feed] --> client
                             └--> tokens(), for limits.Ticket.leave

An answer is one JSON document, or a stream of `data:` lines, of which some tell: prompt and answer
together, or each in a line of its own. An answer that says nothing is charged what was reserved for
it, a stream at least a token for each of its events.
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
        self._told: dict[object, tuple[int, int]] = {}  # part of a stream -> its prompt, its answer
        self.num_events = 0
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
            return sum(map(sum, self._told.values())) if self._told else None
        return tokens_of(_parsed(self._rest))

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        self.num_events += 1
        if not any(word in line for word in _TELLS):
            return
        event = _parsed(line[len(b"data:") :])
        if not isinstance(event, dict):
            return
        prompt, answer = _counts(event)
        if prompt is None and answer is None:
            return
        part = event.get("index")
        part = part if isinstance(part, int) else None
        before = self._told.get(part, (0, 0))
        self._told[part] = (
            before[0] if prompt is None else prompt,
            before[1] if answer is None else answer,
        )


def tokens_of(answer: object) -> int | None:
    """Tokens that a whole answer says were used."""
    if isinstance(answer, list):
        counts = [tokens_of(each) for each in answer]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None
    if not isinstance(answer, dict):
        return None
    told = [count for count in _counts(answer) if count is not None]
    return sum(told) if told else None


def _counts(told: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the answer, each None if that is not said."""
    usage = told.get("usage") or told.get("meta_info")
    if not isinstance(usage, dict):
        # Events of Anthropic's and of OpenAI's responses hold the answer as it is by then.
        inner = told.get("message") or told.get("response")
        usage = inner.get("usage") if isinstance(inner, dict) else None
    if not isinstance(usage, dict):
        return None, None
    if any(_number(usage, name) is not None for name in ("prompt_tokens", "completion_tokens")):
        return _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    prompt = _number(usage, "input_tokens")
    if prompt is not None:  # which Anthropic's routes count without what the cache had
        prompt += _number(usage, "cache_read_input_tokens") or 0
    return prompt, _number(usage, "output_tokens")


def _number(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None


def _parsed(raw: bytes) -> object:
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value
