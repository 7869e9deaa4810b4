"""Attainment over a sliding window, against a slow definition of the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.autoscale.slo import Attainment, SloTargets, SloWindow
from sgl_elastic.errors import ElasticConfigError

TARGETS = SloTargets(ttft_s=1.0, tpot_s=0.1)
WINDOW_S = 10.0


def window(max_requests: int = 1000) -> SloWindow:
    return SloWindow(TARGETS, WINDOW_S, max_requests)


def answer(
    seen: SloWindow, rid: str, arrived: float, ttft: float, tpot: float, n: int = 11
) -> None:
    seen.arrived(rid, arrived)
    seen.first_token(rid, arrived + ttft)
    seen.finished(rid, arrived + ttft + tpot * (n - 1), n)


def test_each_target_is_judged_alone_and_together() -> None:
    seen = window()
    answer(seen, "good", 0, 0.5, 0.05)
    answer(seen, "late", 0, 2.0, 0.05)
    answer(seen, "slow", 0, 0.5, 0.105)  # of ten tokens, not of eleven
    answer(seen, "both", 0, 2.0, 0.25)
    found = seen.attainment(5.0)
    assert (found.ttft, found.tpot, found.both) == (0.5, 0.5, 0.25)
    assert found.worst == 0.25
    assert found.num_finished == 4


def test_a_request_is_overdue_or_late_only_beyond_the_target() -> None:
    seen = window()
    seen.arrived("waits", 0.0)
    seen.arrived("runs", 0.0)
    seen.first_token("runs", TARGETS.ttft_s)
    found = seen.attainment(TARGETS.ttft_s)
    assert (found.num_seen, found.num_overdue, found.worst) == (1, 0, 1.0)
    found = seen.attainment(1.01)
    assert (found.num_overdue, found.ttft, found.tpot, found.both) == (1, 0.5, 1.0, 0.0)


def test_an_id_that_comes_again_is_a_new_request() -> None:
    seen = window()
    seen.arrived("a", 0.0)
    seen.first_token("a", 5.0)
    seen.arrived("a", 6.0)
    assert seen.attainment(6.5).num_seen == 0
    seen.first_token("a", 6.5)
    assert seen.attainment(6.5).ttft == 1.0


def test_forget_finished_keeps_what_waits_and_runs() -> None:
    seen = window()
    answer(seen, "late", 0, 2.0, 0.0)
    seen.arrived("waits", 0.0)
    seen.arrived("runs", 0.0)
    seen.first_token("runs", 0.5)
    seen.forget_finished()
    found = seen.attainment(2.0)
    assert (found.num_finished, found.num_running, found.num_overdue) == (0, 1, 1)


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    seen = window(max_requests=3)
    for number in range(50):
        answer(seen, "ends", 0.0, 1.5 if number < 47 else 0.0, 0.0)
        seen.arrived(("waits", number), 0.0)
        seen.arrived(("runs", number), 0.0)
        seen.first_token(("runs", number), 5.0 if number < 47 else 0.5)
        seen.attainment(2.0)
    found = seen.attainment(2.0)
    assert (found.num_finished, found.num_running, found.num_overdue) == (3, 3, 3)
    assert (found.tpot, found.both, found.ttft) == (1.0, 0.5, 6 / 9)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_impossible_numbers_are_refused_by_name(value: float) -> None:
    with pytest.raises(ElasticConfigError, match="ttft_s"):
        SloTargets(value, 1.0)
    with pytest.raises(ElasticConfigError, match="tpot_s"):
        SloTargets(1.0, value)
    with pytest.raises(ElasticConfigError, match="window_s"):
        SloWindow(TARGETS, value)


@dataclass
class Slow:
    """The definition: keep everything, look through all of it."""

    arrived: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, tuple[float, int]] = field(default_factory=dict)

    def attainment(self, now: float) -> Attainment:
        ttft, tpot, both, running, overdue = [], [], [], 0, 0
        for rid, came in self.arrived.items():
            is_in_time = self.first.get(rid, now) - came <= TARGETS.ttft_s
            if rid in self.ended:
                at, num_tokens = self.ended[rid]
                if at < now - WINDOW_S:
                    continue
                is_fast = (at - self.first[rid]) / max(1, num_tokens - 1) <= TARGETS.tpot_s
                ttft.append(is_in_time)
                tpot.append(is_fast)
                both.append(is_in_time and is_fast)
            elif rid in self.first:
                running += 1
                ttft.append(is_in_time)
            elif not is_in_time:
                overdue += 1
                ttft.append(False)
                both.append(False)

        def share(verdicts: list[bool]) -> float:
            return sum(verdicts) / len(verdicts) if verdicts else 1.0

        return Attainment(share(ttft), share(tpot), share(both), len(tpot), running, overdue)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "first", "finish", "drop", "look"]),
            st.integers(0, 5),
            st.sampled_from([0.0, 0.5, 1.0, 1.5, 12.0]),
            st.integers(1, 30),
        ),
        max_size=60,
    )
)
def test_the_window_is_its_slow_definition(events: list[tuple[str, int, float, int]]) -> None:
    seen, slow, now, serial = window(), Slow(), 0.0, 0
    assert seen.attainment(now) == Attainment(), "nothing seen is full attainment of nobody"
    ids: dict[int, int] = {}  # a client's number -> a serial number that is never used again
    for what, number, pause, num_tokens in events:
        now += pause
        rid = ids.get(number, -1)
        if what == "arrive" and rid not in slow.arrived:
            ids[number] = rid = serial = serial + 1
            seen.arrived(rid, now)
            slow.arrived[rid] = now
        elif what == "first":
            seen.first_token(rid, now)
            if rid in slow.arrived and rid not in slow.ended:
                slow.first.setdefault(rid, now)
        elif what == "finish":
            seen.finished(rid, now, num_tokens)
            if rid in slow.arrived and rid not in slow.ended:
                slow.first.setdefault(rid, now)
                slow.ended[rid] = (now, num_tokens)
                ids.pop(number)
        elif what == "drop" and rid not in slow.ended:
            seen.dropped(rid)
            slow.arrived.pop(rid, None)
            ids.pop(number, None)
        assert seen.attainment(now) == slow.attainment(now)
