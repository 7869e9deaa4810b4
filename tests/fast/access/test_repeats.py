"""How deep bounded repeats stand in each other, told in time that grows with the text alone."""

from __future__ import annotations

import time

import pytest

from sgl_esft.fields.repeats import patterns_in, repeat_depth

TEXT_SIZES = (2 << 10, 16 << 10)  # characters; what reads once costs 8 times as much
MAX_GROWTH = 24.0  # what reads again from every place costs 64 times as much
MAX_SECONDS = 0.5  # of the longer


def cpu_seconds(text: str) -> float:
    """Of the calling thread, at best of five: what else the machine does only adds to it."""

    def once() -> float:
        started = time.thread_time()
        repeat_depth(text)
        list(patterns_in(text))
        return time.thread_time() - started

    return min(once() for _ in range(5))


@pytest.mark.parametrize(
    ("pattern", "depth"),
    [
        ("", 0),
        ("(a*)+b?", 0),
        ("a{1,9}b{2}c{3,}", 1),
        ("((((a{1,9}))))", 1),
        ("(a*)*{2}", 1),
        ("(a{1,9}b)*{3}", 2),
        ("(a{1,9}b) {3}", 2),
        (r"((25[0-5]|1?[0-9]{1,2})\.){3}", 2),
        ("(a{2}|(b{3}){4}){5}", 3),
        ("((a{99}){99}){99}", 3),
        ("(a{2}x){2}{2}", 3),
        (r"\(\(a{2}\){2}\)", 1),  # brackets that stand for themselves
        ("[({]{3}(x[)]{2}){4}", 2),
        ("[]a{2}]{3}", 1),
        ('root ::= ("a{2}" "("){3}', 1),
        (")))(((a{2}", 1),
        ("[a{2}", 0),
    ],
)
def test_depth(pattern: str, depth: int) -> None:
    assert repeat_depth(pattern) == depth


def test_patterns_of_a_schema_are_found_wherever_they_stand() -> None:
    text = r'{"pattern": "^\\(a{2}$", "items": [{"pattern" :"b\u007b3}"}], "title": "pattern"}'
    assert list(patterns_in(text)) == [r"^\(a{2}$", "b{3}"]
    assert list(patterns_in(r'{"pattern": "\x"}')) == []


@pytest.mark.parametrize(
    "piece", ["[", "(", '"', "\\", "{1", "[^", "{1,", "{ ", "{1, ", '"pattern":"']
)
@pytest.mark.usefixtures("no_automatic_gc")
def test_hostile_texts_are_read_once(piece: str) -> None:
    short, long = (cpu_seconds(piece * (size // len(piece))) for size in TEXT_SIZES)
    assert long < min(MAX_GROWTH * short, MAX_SECONDS)
