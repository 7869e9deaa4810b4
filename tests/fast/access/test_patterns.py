"""Stop patterns: what people write is taken, and what is taken is searched for quickly."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.access.patterns import MAX_WAYS, check_patterns
from sgl_esft.errors import BadBodyError


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "stop", r"\n\n", r"[.!?]\s{1,4}", r"^Answer: \d{1,8}$", r"(yes|no|maybe)\b"),
        *("(?i)user:", r"</?\w{1,20}>", "a{3}", "(ab){2,4}", "(?P<x>a|b)c", r"\bend\b", "a{1,20}?"),
        *("[^a-z]{2,40}", "ä|ö", "(?:x)?", "(?>ab?)", "a{1,9}+"),
    ],
)
def test_taken(pattern: str) -> None:
    check_patterns([pattern])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "a regular expression"),
        ("*", "a regular expression"),
        ("a{3,1}", "a regular expression"),
        ("(" * 200, "a regular expression"),
        ("a" * 257, "256 characters"),
        (".*", "256 characters"),
        ("(a+)+$", "256 characters"),
        ("a{1,100000}", "256 characters"),
        ("(a{200}){200}", "256 characters"),
        ("a?" * 30 + "a" * 30, "1000 ways"),
        ("(a|a){16}", "1000 ways"),
        ("(a?){99}", "1000 ways"),
        ("((a?){9}){9}", "1000 ways"),
        (r"(a)\1", "references"),
        ("(?=a)b", "looking around"),
        ("(?<!a)b", "looking around"),
        ("(a)?(?(1)b|c)", "references"),
    ],
)
def test_refused(pattern: str, message: str) -> None:
    with pytest.raises(BadBodyError, match=message):
        check_patterns([pattern])


def test_the_patterns_of_a_request_count_together() -> None:
    pattern = "[a-z]{1,100}"
    check_patterns([pattern] * (MAX_WAYS // 100))
    with pytest.raises(BadBodyError, match="ways"):
        check_patterns([pattern] * (MAX_WAYS // 100 + 1))


PIECES = st.recursive(
    st.sampled_from(["a", ".", "[ab]", r"\w", "$", r"\b"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,9}", "{0,60}", "{1,4}?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=8,
)


@given(pattern=PIECES)
def test_what_is_taken_is_quick(pattern: str) -> None:
    try:
        check_patterns([pattern])
    except BadBodyError:
        return
    started = time.process_time()
    re.search(pattern + "\0", "a" * 1000)
    assert time.process_time() - started < 1.0
