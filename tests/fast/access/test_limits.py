"""A key never has more at once, nor more a minute, than it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.access.keys import Caller
from sgl_esft.access.limits import KeyLimits, Ticket, TokenBucket
from sgl_esft.errors import BadBodyError, KeyLimitError
from tests.fast.access.test_key_source import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused_for(call: Callable[[], object]) -> float:
    with pytest.raises(KeyLimitError) as caught:
        call()
    return caught.value.retry_after_s


def test_a_caller_without_limits_is_never_refused(clock: Clock) -> None:
    limits = KeyLimits(clock)
    tickets = [limits.enter(Caller("a")) for _ in range(1000)]
    for ticket in tickets:
        ticket.grow(1000)
        ticket.reserve(10**9)
    assert limits.sequences("a") == 10**6


def test_sequences_at_once(clock: Clock) -> None:
    limits = KeyLimits(clock)
    caller = Caller("a", max_concurrency=3)
    first = limits.enter(caller)
    first.grow(2)
    second = limits.enter(caller)
    assert refused_for(lambda: limits.enter(caller)) == 1
    assert refused_for(lambda: second.grow(2)) == 1
    limits.enter(Caller("b", max_concurrency=1))  # another key has its own
    first.leave()
    second.grow(3)
    assert limits.sequences("a") == 3
    second.leave()
    assert limits.sequences("a") == 0


def test_more_sequences_than_the_key_can_ever_have(clock: Clock) -> None:
    limits = KeyLimits(clock)
    ticket = limits.enter(Caller("a", max_concurrency=3))
    with pytest.raises(BadBodyError, match="4 sequences, this key may have 3 at once"):
        ticket.grow(4)
    ticket.leave()
    assert limits.sequences("a") == 0


def test_tokens_are_reserved_and_settled(clock: Clock) -> None:
    limits = KeyLimits(clock)
    caller = Caller("a", tokens_per_minute=600)
    first = limits.enter(caller)
    first.reserve(500)
    second = limits.enter(caller)
    assert refused_for(lambda: second.reserve(200)) == 10  # 100 of 200 are there, 10 a second
    first.leave(tokens_used=100)
    second.reserve(200)
    second.leave()  # unknown: the 200 stay used
    third = limits.enter(caller)
    assert refused_for(lambda: third.reserve(301)) == 1
    clock.now += 0.1
    third.reserve(301)


def test_a_debt_is_waited_for_before_the_body_is_read(clock: Clock) -> None:
    limits = KeyLimits(clock)
    caller = Caller("a", tokens_per_minute=60)
    ticket = limits.enter(caller)
    ticket.reserve(10**6)  # more than a minute's: let in when the bucket is full
    ticket.leave(tokens_used=90)
    assert refused_for(lambda: limits.enter(caller)) == 31
    assert limits.sequences("a") == 0
    clock.now += 31
    limits.enter(caller)


def test_leaving_twice_changes_nothing(clock: Clock) -> None:
    limits = KeyLimits(clock)
    ticket = limits.enter(Caller("a", max_concurrency=2))
    ticket.leave()
    ticket.leave()
    assert limits.sequences("a") == 0


@given(
    rate=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 20_000)), max_size=30),
)
def test_a_bucket_gives_no_more_than_its_rate(rate: int, steps: list[tuple[float, int]]) -> None:
    bucket = TokenBucket(rate, at=0.0)
    now, taken = 0.0, 0
    for seconds, tokens in steps:
        now += seconds
        if tokens <= rate and bucket.wait_for(tokens, now) == 0:
            bucket.take(tokens, now)
            taken += tokens
        assert taken <= rate + now * rate / 60 + 1e-6
        assert bucket.level <= rate


@given(rate=st.integers(1, 10_000), debt=st.integers(0, 50_000), tokens=st.integers(1, 50_000))
def test_who_waits_as_told_is_let_in(rate: int, debt: int, tokens: int) -> None:
    bucket = TokenBucket(rate, at=0.0)
    bucket.take(debt, 0.0)
    wait = bucket.wait_for(tokens, 0.0)
    assert bucket.wait_for(tokens, wait + 1e-6) == 0
    if wait > 0.01:
        early = TokenBucket(rate, at=0.0)
        early.take(debt, 0.0)
        assert early.wait_for(tokens, wait / 2) > 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=60))
def test_sequences_never_pass_the_limit(steps: list[tuple[int, int]]) -> None:
    limits = KeyLimits(lambda: 0.0)
    caller = Caller("a", max_concurrency=4)
    inside: list[Ticket] = []
    for action, number in steps:
        try:
            if action == 0 and inside:
                inside.pop().leave()
            elif action == 1 and inside:
                inside[-1].grow(number)
            else:
                inside.append(limits.enter(caller))
        except (KeyLimitError, BadBodyError):
            pass
        assert len(inside) <= limits.sequences("a") <= 4
    for ticket in inside:
        ticket.leave()
    assert limits.sequences("a") == 0


def test_a_key_whose_rate_has_changed(clock: Clock) -> None:
    limits = KeyLimits(clock)
    ticket = limits.enter(Caller("a", tokens_per_minute=600))
    ticket.reserve(590)
    more = limits.enter(Caller("a", tokens_per_minute=6000))
    assert refused_for(lambda: more.reserve(20)) == 1  # what was used stays used
    clock.now += 1
    more.reserve(100)
    unlimited = limits.enter(Caller("a"))
    unlimited.reserve(10**9)
    limited = limits.enter(Caller("a", tokens_per_minute=60))
    limited.reserve(60)
    assert refused_for(lambda: limited.reserve(1)) == 1
