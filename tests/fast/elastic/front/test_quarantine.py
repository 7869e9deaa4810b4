"""Who is tried after an instance has died: what ends engines ends few, and all others are answered.

The model: an engine computes a token of each request that runs, in steps; some requests end it at a
certain token, every time. What the front sees lags behind what was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.front.quarantine import CLEARING_TOKENS, MOST_UNEXPLAINED, Quarantine

LENGTH = 2 * CLEARING_TOKENS


@dataclass
class Asked:
    arrives: int  # at which step
    ends_engine_at: int | None = None  # which token
    seen: int = 0
    computed: int = 0
    deaths: int = 0  # while it ran


@dataclass
class Engines:
    """A router in small: what comes is sent or waits, as the quarantine says."""

    requests: dict[str, Asked]
    lag: int
    quarantine: Quarantine = field(default_factory=Quarantine)
    running: dict[str, Asked] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    given_up: dict[str, int] = field(default_factory=dict)
    num_deaths: int = 0
    num_steps: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.answered) + len(self.given_up) == len(self.requests)

    def send(self, rid: str) -> None:
        assert rid not in self.running
        self.running[rid] = self.requests[rid]
        self.running[rid].computed = self.requests[rid].seen

    def dispatch(self) -> None:
        suspect = self.quarantine.next()
        if suspect:
            self.send(suspect)
            self.quarantine.begin(suspect, self.requests[suspect].seen)
            assert not self.quarantine.next(), "one at a time"
        for rid, request in self.requests.items():
            is_new = rid not in self.answered | self.given_up.keys() | self.running.keys()
            if self.quarantine.is_over and is_new and request.arrives <= self.num_steps:
                self.send(rid)
                self.quarantine.sent(rid)
        assert self.quarantine.running == self.running.keys()

    def step(self) -> None:
        self.num_steps += 1
        self.dispatch()
        for request in self.running.values():
            request.computed += 1
        if any(r.computed == r.ends_engine_at for r in self.running.values()):
            self.die()
            return
        for rid, request in list(self.running.items()):
            is_finished = request.computed == LENGTH
            request.seen = max(request.seen, request.computed - (0 if is_finished else self.lag))
            if is_finished:
                self.answered.add(rid)
                del self.running[rid]
            self.quarantine.output(rid, request.seen, is_finished=is_finished)

    def die(self) -> None:
        self.num_deaths += 1
        for request in self.running.values():
            request.deaths += 1
        self.running.clear()
        self.given_up |= self.quarantine.died()


requests = st.builds(Asked, st.integers(0, 3 * LENGTH))
killers = st.builds(Asked, st.integers(0, 3 * LENGTH), st.integers(1, LENGTH))
lags = st.integers(0, CLEARING_TOKENS - 2)


def named(innocent: list[Asked], guilty: list[Asked], seed: st.DataObject) -> dict[str, Asked]:
    mixed = seed.draw(st.permutations([*enumerate(innocent), *enumerate(guilty)]))
    return {
        f"{'guilty' if each.ends_engine_at else 'innocent'}-{number}": each
        for number, each in mixed
    }


def run(engines: Engines, deaths_from_outside: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    for _ in range(10_000):
        if engines.is_done:
            break
        engines.step()
        if engines.num_steps in deaths_from_outside:
            engines.die()
    assert engines.is_done, "nobody waits for ever"
    assert engines.quarantine == Quarantine(), "nothing is remembered of what was answered"


@given(st.lists(requests, max_size=6), st.lists(killers, max_size=2), lags, st.data())
def test_what_ends_engines_ends_two_and_all_others_are_answered(
    innocent: list[Asked], guilty: list[Asked], lag: int, data: st.DataObject
) -> None:
    engines = Engines(named(innocent, guilty, data), lag)
    run(engines)
    assert {rid for rid in engines.requests if rid.startswith("guilty")} == set(engines.given_up)
    assert engines.num_deaths <= 2 * len(guilty)
    assert all(2 <= count <= MOST_UNEXPLAINED for count in engines.given_up.values())


@given(
    st.lists(requests, max_size=6),
    st.lists(killers, max_size=6),
    lags,
    st.sets(st.integers(1, 6 * LENGTH), max_size=8),
    st.data(),
)
def test_whatever_dies_when_a_request_is_given_up_for_two_deaths_at_least(
    innocent: list[Asked],
    guilty: list[Asked],
    lag: int,
    deaths_from_outside: set[int],
    data: st.DataObject,
) -> None:
    engines = Engines(named(innocent, guilty, data), lag)
    run(engines, deaths_from_outside)
    assert engines.num_deaths <= 2 * len(guilty) + len(deaths_from_outside)
    for rid, count in engines.given_up.items():
        assert 2 <= count <= engines.requests[rid].deaths


def test_one_that_is_cleared_is_not_blamed_for_the_next_ones_trial() -> None:
    quarantine = Quarantine()
    for rid in ("a", "b", "c"):
        quarantine.sent(rid)
    assert quarantine.died() == {}
    assert not quarantine.is_over
    assert quarantine.next() == "a"
    quarantine.begin("a", 5)
    assert quarantine.next() == "", "a is on trial"
    assert not quarantine.output("a", 5 + CLEARING_TOKENS - 1, is_finished=False)
    assert quarantine.output("a", 5 + CLEARING_TOKENS, is_finished=False)
    quarantine.begin(quarantine.next(), 0)
    assert quarantine.running == {"a", "b"}
    assert quarantine.died() == {"b": 2}
    assert quarantine.next() == "c", "a was cleared before, so it is tried last"
    quarantine.begin("c", 0)
    assert quarantine.output("c", 1, is_finished=True)
    quarantine.begin(quarantine.next(), 13)
    assert quarantine.output("a", 21, is_finished=False)
    assert quarantine.is_over
    assert quarantine.running == {"a"}
    assert quarantine.died() == {}, "b's trial counts for b alone"


def test_what_ends_engines_without_being_tried_is_given_up_too() -> None:
    """It is cleared each time, and its engine dies later."""
    quarantine = Quarantine()
    quarantine.sent("now and then")
    for _ in range(MOST_UNEXPLAINED - 1):
        assert quarantine.died() == {}
        quarantine.begin(quarantine.next(), 0)
        assert quarantine.output("now and then", CLEARING_TOKENS, is_finished=False)
    assert quarantine.died() == {"now and then": MOST_UNEXPLAINED}
    assert quarantine == Quarantine()


def test_who_was_not_sent_to_the_instance_that_dies_is_no_suspect() -> None:
    """After a scale another instance serves; what it was handed over is sent to it anew."""
    quarantine = Quarantine()
    for rid in ("stays", "waits"):
        quarantine.sent(rid)
    quarantine.handed_over()
    quarantine.sent("stays")
    assert quarantine.died() == {}
    assert quarantine.next() == "stays"
    quarantine.begin("stays", 0)
    assert quarantine.output("stays", 1, is_finished=True)
    assert quarantine.is_over, "nobody waits for a trial that ran on no instance that died"
