"""Tables: what follows what in a server's life, when it is ready, what counts as a fault."""

from __future__ import annotations

import pytest

from sgl_esft.health import phases, readiness
from sgl_esft.health.faults import STOPPED_S, Part, ProcessState, first_fault
from sgl_esft.health.heartbeat import Beat
from sgl_esft.health.phases import Act, Event, Life, Phase
from sgl_esft.health.readiness import Loop

P, E, A = Phase, Event, Act
NOW_NS = 100_000_000_000

TABLE = [
    (P.STARTING, E.STARTED, P.SERVING, A.NOTHING),
    (P.STARTING, E.SIGNAL, P.STOPPING, A.FORCE),
    (P.STARTING, E.DRAIN, P.STARTING, A.NOTHING),
    (P.STARTING, E.FAULT, P.FAILED, A.FAIL),
    (P.STARTING, E.IDLE, P.STARTING, A.NOTHING),
    (P.SERVING, E.STARTED, P.SERVING, A.NOTHING),
    (P.SERVING, E.SIGNAL, P.DRAINING, A.DRAIN),
    (P.SERVING, E.DRAIN, P.DRAINING, A.DRAIN),
    (P.SERVING, E.FAULT, P.FAILED, A.FAIL),
    (P.SERVING, E.IDLE, P.SERVING, A.NOTHING),
    (P.SERVING, E.TIMED_OUT, P.SERVING, A.NOTHING),
    (P.DRAINING, E.STARTED, P.DRAINING, A.NOTHING),
    (P.DRAINING, E.SIGNAL, P.DRAINING, A.NOTHING),
    (P.DRAINING, E.DRAIN, P.DRAINING, A.DRAIN),
    (P.DRAINING, E.IDLE, P.STOPPING, A.STOP),
    (P.DRAINING, E.TIMED_OUT, P.STOPPING, A.CUT),
    (P.DRAINING, E.FAULT, P.FAILED, A.FAIL),
    *((P.STOPPING, event, P.STOPPING, A.NOTHING) for event in E),
    *((P.FAILED, event, P.FAILED, A.NOTHING) for event in E),
]


@pytest.mark.parametrize(("phase", "event", "then", "act"), TABLE)
def test_what_follows(phase: Phase, event: Event, then: Phase, act: Act) -> None:
    life, done = phases.advance(Life(phase), event)
    assert (life.phase, done) == (then, act)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not P.STARTING])
def test_a_second_signal_forces(phase: Phase) -> None:
    once, first = phases.advance(Life(phase), E.SIGNAL)
    _, second = phases.advance(once, E.SIGNAL)
    assert first is not A.FORCE
    assert second is A.FORCE


def test_a_drain_by_rest_and_then_one_signal_does_not_force() -> None:
    life, _ = phases.advance(Life(P.SERVING), E.DRAIN)
    assert phases.advance(life, E.SIGNAL)[1] is A.NOTHING


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((E.STARTED, E.SIGNAL, E.IDLE), 0),
        ((E.STARTED, E.DRAIN, E.DRAIN, E.IDLE), 0),
        ((E.STARTED, E.SIGNAL, E.TIMED_OUT), phases.EXIT_CUT),
        ((E.STARTED, E.FAULT), phases.EXIT_FAILED),
        ((E.STARTED, E.SIGNAL, E.FAULT, E.IDLE), phases.EXIT_FAILED),
        ((E.STARTED, E.SIGNAL, E.IDLE, E.FAULT), 0),  # others end because they were told to
    ],
)
def test_exit_status(events: tuple[Event, ...], status: int) -> None:
    life = Life()
    for event in events:
        life, _ = phases.advance(life, event)
    assert life.exit_status == status


def loop(name: str, age_s: float | None) -> Loop:
    beat = None if age_s is None else Beat(NOW_NS - int(age_s * 1e9), 7)
    return Loop(name, beat)


@pytest.mark.parametrize(
    ("phase", "trouble", "ages", "detokenizer", "reason"),
    [
        (P.SERVING, None, (0.1, 1.9), 0.5, None),
        (P.SERVING, None, (0.1, 2.1), 0.5, "rank 1 has given no sign of life for 2.1 s"),
        (P.SERVING, None, (0.1, None), 0.5, "rank 1 has not begun"),
        (P.SERVING, None, (0.1, 0.1), 9.0, "the detokenizer has given no sign of life for 9.0 s"),
        (P.SERVING, None, (0.1,), None, "the detokenizer has not begun"),
        (P.SERVING, "it is lost", (0.1,), 0.1, "it is lost"),
        (P.STARTING, None, (0.1,), 0.1, "the server is starting"),
        (P.DRAINING, None, (0.1,), 0.1, "the server is draining"),
        (P.STOPPING, None, (9.0,), 0.1, "the server is stopping"),
        (P.FAILED, "rank 0 has died", (0.1,), 0.1, "rank 0 has died"),
    ],
)
def test_when_it_is_ready(
    phase: Phase,
    trouble: str | None,
    ages: tuple[float | None, ...],
    detokenizer: float | None,
    reason: str | None,
) -> None:
    ranks = [loop(f"rank {number}", age) for number, age in enumerate(ages)]
    text = loop("the detokenizer", detokenizer)
    found = readiness.judge(phase, trouble, ranks, text, NOW_NS, 2.0)
    assert found.reason == reason
    shown = found.to_json()
    assert shown["ready"] is (reason is None)
    assert shown["ranks"] == [{"rank": n, "age_s": age} for n, age in enumerate(ages)]
    assert shown["state"] == phase.value


ALIVE, STOPPED, ENDED = ProcessState.ALIVE, ProcessState.STOPPED, ProcessState.ENDED


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (Part("rank 0", 7, ALIVE, silent_s=19.0), None),
        (Part("rank 0", 7, ALIVE), None),
        (Part("rank 0", 7, ALIVE, silent_s=20.0), "no sign of life for 20 s"),
        (Part("rank 0", 7, ENDED, silent_s=0.0), "rank 0 (process 7) has died"),
        (Part("x", 7, STOPPED, STOPPED_S - 0.1, 9.0), None),
        (Part("x", 7, STOPPED, STOPPED_S), f"stopped for {STOPPED_S:g} s"),
    ],
)
def test_what_is_a_fault(part: Part, fault: str | None) -> None:
    found = first_fault([Part("other", 3, ALIVE, silent_s=0.1), part], 20.0)
    assert (fault in found) if fault and found else found is fault


def test_a_stopped_process_is_not_given_longer_than_a_hung_one() -> None:
    assert first_fault([Part("x", 7, STOPPED, 3.0)], 3.0) is not None
