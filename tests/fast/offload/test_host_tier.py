"""Seats in host memory do what a list would do, in every order of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.host_tier import HostTier, seats_within

KEYS = st.sampled_from("abcdef")


class SeatMachine(RuleBasedStateMachine):
    """The model: a list of keys, last used last, and who is doing what with which seat."""

    @initialize(num_seats=st.integers(1, 4), keeps=st.sampled_from([True, True, True, False]))
    def start(self, num_seats: int, keeps: bool) -> None:
        self.tier = HostTier(num_seats, keeps=keeps)
        self.num_seats, self.keeps = num_seats, keeps
        self.kept: list[str] = []  # last used last
        self.seat_of: dict[str, int] = {}
        self.readers: dict[int, str | None] = {}  # seat -> key, None: not to be kept
        self.users: list[int] = []  # a seat for each use of one that holds its expert

    def _victim(self) -> str | None:
        return next((key for key in self.kept if self.seat_of[key] not in self.users), None)

    @rule(key=KEYS)
    def take(self, key: str) -> None:
        if key in self.kept:
            taken = self.tier.take(key)
            assert (taken.seat, taken.holds) == (self.seat_of[key], True)
            self.kept.append(self.kept.pop(self.kept.index(key)))
            self.users.append(taken.seat)
            return
        is_full = len(self.readers) + len(self.kept) == self.num_seats
        victim = self._victim() if is_full else None
        if is_full and victim is None:
            with pytest.raises(InvariantError, match="are in use"):
                self.tier.take(key)
            return
        in_use = {*self.readers, *self.users}
        taken = self.tier.take(key)
        assert not taken.holds
        assert taken.seat not in in_use, "a seat that somebody reads into, or copies from"
        if victim is not None:
            assert taken.seat == self.seat_of.pop(victim), "who was used longest ago leaves"
            self.kept.remove(victim)
        assert taken.seat not in self.seat_of.values()
        is_second = key in self.readers.values()
        self.readers[taken.seat] = key if self.keeps and not is_second else None

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(sorted(self.readers)))
        self.tier.filled(seat)
        key = self.readers[seat]
        if key is not None:
            del self.readers[seat]
            self.kept.append(key)
            self.seat_of[key] = seat
            self.users.append(seat)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def fail_or_pass_through(self, data: st.DataObject) -> None:
        """Given back without a word: nothing of it is found."""
        seat = data.draw(st.sampled_from(sorted(self.readers)))
        self.tier.give_back(seat)
        del self.readers[seat]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(sorted(self.users)))
        self.tier.give_back(seat)
        self.users.remove(seat)

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        self.tier.touch(key)
        if key in self.kept:
            self.kept.append(self.kept.pop(self.kept.index(key)))

    @rule(seat=st.integers(0, 5))
    def misuse(self, seat: int) -> None:
        if seat not in self.readers:
            with pytest.raises(InvariantError, match="nobody had taken it"):
                self.tier.filled(seat)
            if seat not in self.users:
                with pytest.raises(InvariantError, match="nobody has it"):
                    self.tier.give_back(seat)

    @invariant()
    def agrees(self) -> None:
        assert self.tier.held == tuple(self.kept)
        assert len(self.kept) + len(self.readers) <= self.num_seats, "bounded"
        assert self.keeps or not self.kept
        self.tier.check_integrity()


SeatMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestSeatMachine = SeatMachine.TestCase


@pytest.mark.parametrize(
    "damage",
    [
        lambda tier: tier._free.append(0),
        lambda tier: tier._held.update(b=0),
        lambda tier: tier._held.clear(),
        lambda tier: tier._users.update({0: 1}),
    ],
)
def test_a_damaged_table_is_found(damage: Callable[[HostTier], None]) -> None:
    tier = HostTier(2, keeps=True)
    seat = tier.take("a").seat
    tier.filled(seat)
    tier.give_back(seat)
    assert (seat, tier._free) == (1, [0])
    tier.check_integrity()
    damage(tier)
    with pytest.raises(InvariantError):
        tier.check_integrity()


def bring(tier: HostTier, key: str) -> None:
    """Take it, read it if it is not there, and give it back."""
    taken = tier.take(key)
    if not taken.holds:
        tier.filled(taken.seat)
    tier.give_back(taken.seat)


def test_who_was_used_longest_ago_leaves_first_and_leaving_a_row_is_a_use() -> None:
    tier = HostTier(3, keeps=True)
    for key in "abc":
        bring(tier, key)
    tier.touch("a")
    bring(tier, "d")
    assert tier.held == ("c", "a", "d")
    bring(tier, "c")
    bring(tier, "e")
    assert tier.held == ("d", "c", "e")


def test_an_expert_that_two_read_at_a_time_is_kept_once() -> None:
    tier = HostTier(3, keeps=True)
    first, second = tier.take("a"), tier.take("a")
    assert first.seat != second.seat
    assert (first.holds, second.holds) == (False, False)
    for taken in (second, first):
        tier.filled(taken.seat)
        tier.give_back(taken.seat)
        tier.check_integrity()
    assert tier.held == ("a",)
    assert len(tier._free) == 2


def test_what_is_counted() -> None:
    tier = HostTier(1, keeps=True)
    for key in "aabab":
        bring(tier, key)
    assert (tier.num_found, tier.num_evicted) == (1, 3)


def test_a_bound_in_bytes_is_a_number_of_seats() -> None:
    assert seats_within(0, 100, 4) == 4
    assert seats_within(499, 100, 4) == 4
    assert seats_within(700, 100, 4) == 7
    with pytest.raises(ConfigError, match=r"holds 3 experts, and each of 4 threads .* 400B"):
        seats_within(399, 100, 4)
    with pytest.raises(InvariantError, match="0 seats"):
        HostTier(0, keeps=True)
