"""Tokens are read from answers, whole or in pieces, and a strange answer says nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.access.token_usage import UsageReader, tokens_of


def meta(prompt: int, completion: int) -> dict[str, Any]:
    return {"meta_info": {"prompt_tokens": prompt, "completion_tokens": completion}}


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}, 7),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": None}}, 3),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}}, 7),
        (meta(2, 5), 7),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 9, "output_tokens": 4}}, 16),
        ([meta(2, 5), meta(1, 1)], 9),
        ([meta(2, 5), {"error": "x"}], None),
        ([], None),
        ({"usage": None}, None),
        ({"usage": 7}, None),
        ({"usage": {"prompt_tokens": "x"}}, None),
        ("x", None),
        (None, None),
    ],
)
def test_answers(answer: Any, tokens: int | None) -> None:
    assert tokens_of(answer) == tokens
    reader = UsageReader(is_stream=False)
    reader.feed(json.dumps(answer).encode())
    assert reader.tokens() == tokens


def stream(*events: Any) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    )


STREAMS = [
    (stream({"text": "a", **meta(2, 1)}, {"text": "ab", **meta(2, 2)}), 4),
    (stream({"index": 0, **meta(2, 1)}, {"index": 1, **meta(3, 1)}, {"index": 0, **meta(2, 2)}), 8),
    (stream({"choices": []}, {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}), 3),
    (
        stream(
            {"type": "message_start", "message": {"usage": {"input_tokens": 9}}},
            {"type": "message_delta", "usage": {"output_tokens": 4}},
        ),
        13,
    ),
    (
        stream({"response": {}}, {"response": {"usage": {"input_tokens": 9, "output_tokens": 4}}}),
        13,
    ),
    (stream({"index": [], **meta(2, 1)}), 3),
    (stream({"choices": [], "usage": None}), None),
    (b'data: {"usage": \n\ndata: x\n', None),
    (b"", None),
]


@pytest.mark.parametrize(("raw", "tokens"), STREAMS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streams_cut_anywhere(raw: bytes, tokens: int | None, size: int) -> None:
    reader = UsageReader(is_stream=True)
    for start in range(0, len(raw), size):
        reader.feed(raw[start : start + size])
    assert reader.tokens() == tokens
    assert reader.num_events == raw.count(b"data:")


def test_an_answer_that_is_too_long_to_keep() -> None:
    reader = UsageReader(is_stream=False)
    for _ in range(9):
        reader.feed(b" " * (1 << 20))
    reader.feed(json.dumps(meta(2, 5)).encode())
    assert reader.tokens() is None


@given(st.booleans(), st.lists(st.binary(max_size=40), max_size=8))
def test_no_answer_is_an_error(is_stream: bool, chunks: list[bytes]) -> None:
    reader = UsageReader(is_stream=is_stream)
    for chunk in chunks:
        reader.feed(chunk)
    tokens = reader.tokens()
    assert tokens is None or isinstance(tokens, int)
