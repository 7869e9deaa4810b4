"""The router when the instance that serves is gone: nothing is lost, nothing is sent twice."""

from __future__ import annotations

import threading
from array import array

import pytest

from sgl_elastic.errors import EngineFailedError, PlanError, SuspectRequestError
from sgl_elastic.front import router as module
from sgl_elastic.front.quarantine import CLEARING_TOKENS
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.types import Placement
from tests.fast.elastic.front.test_router import (
    NOTHING,
    ONE,
    THREE,
    TWO,
    Bench,
    Control,
    Request,
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module, "_QUIET_S", 0.01)
    return Bench()


def output(bench: Bench, rid: str, *new_ids: int, so_far: int, is_finished: bool = False) -> None:
    reason = "stop" if is_finished else None
    bench.router.on_output([rid], [reason], [so_far], [array("q", new_ids)])


def states(bench: Bench) -> dict[str, tuple[int, list[int]]]:
    found = {}
    for rank, state in bench.router.states():
        ids = array("q")
        ids.frombytes(state.output_ids)
        assert state.num_sent == len(ids)
        assert (state.fields, state.lists) == ({}, {})
        found[state.rid] = (rank, list(ids))
    return found


def replace(bench: Bench) -> None:
    """Another instance takes over; nothing holds requests but that the first is lost."""
    bench.router.switch("i2", TWO, NOTHING)
    bench.router.release()


def fail(message: object) -> None:
    raise EngineFailedError("nobody takes requests there")


def test_states_are_the_tokens_that_came_by(bench: Bench) -> None:
    bench.dispatch("a", "b", "c", "done")
    output(bench, "a", 7, so_far=1)
    output(bench, "a", 8, 9, so_far=3)
    output(bench, "b", 5, so_far=1)
    output(bench, "done", 4, so_far=1, is_finished=True)
    output(bench, "nobody's", 4, so_far=1)
    assert states(bench) == {"a": (0, [7, 8, 9]), "b": (1, [5])}, "c has no token yet"


def test_states_wait_for_the_last_outputs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.2)
    bench.dispatch("a")
    timer = threading.Timer(0.05, output, (bench, "a", 7), {"so_far": 1})
    timer.start()
    assert states(bench) == {"a": (0, [7])}
    timer.join()


def test_requests_wait_until_a_replacement_serves(bench: Bench) -> None:
    bench.router.lose("i2")  # it does not serve
    bench.dispatch("a", "b")
    bench.router.lose("i1")
    bench.dispatch("c")
    bench.router.dispatch(Control("abort a"))
    bench.router.release()  # as at the end of a scale that was rolled back
    assert bench.sent_to("i1") == ["a@0", "b@1"]
    replace(bench)
    assert bench.sent_to("i2") == ["a@0", "b@1", "c@0", "abort a"]
    bench.dispatch("d")
    assert bench.sent_to("i2")[-1] == "d@1"


def test_what_cannot_be_sent_waits_too(bench: Bench) -> None:
    """An instance that has just died, before anybody has noticed."""
    bench.wire.on_send = fail
    bench.dispatch("a", "b")
    bench.router.dispatch(Control("flush"))
    bench.wire.on_send = lambda message: None
    assert bench.router.num_running() == 1, "b has not been routed"
    replace(bench)
    assert bench.sent_to("i2") == ["a@0", "b@1", "flush"]


def test_a_replacement_that_dies_at_once_holds_requests_again(bench: Bench) -> None:
    bench.dispatch("a", "b")
    bench.router.lose("i1")
    bench.wire.on_send = fail
    bench.scale(TWO)
    bench.wire.on_send = lambda message: None
    bench.connect("i3")
    bench.scale(TWO, name="i3")
    assert bench.sent_to("i3") == ["a@0", "b@1"]


def test_requests_of_ranks_that_nobody_names_are_spread(bench: Bench) -> None:
    """The new instance died between activation and switch: its ranks are not the router's."""
    bench.dispatch("a", "b")
    bench.router.lose("i1")
    bench.router.switch("i2", ONE, HandedOver({}, {0: 0}))
    assert bench.sent_to("i2") == ["a@0", "b@0"]


def test_a_later_scale_is_strict_again(bench: Bench) -> None:
    bench.dispatch("a")
    bench.router.lose("i1")
    replace(bench)
    bench.connect("i3")
    with pytest.raises(PlanError):
        bench.switch(THREE, HandedOver({}, {1: 0}), "i3")


def test_a_warm_up_ends_with_its_instance(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_elastic.front.instance_links._WARM_UP_POLL_S", 0.01)
    threading.Timer(0.05, bench.router.disconnect, ("i2",)).start()
    with pytest.raises(EngineFailedError, match="i2 ended while it warmed up"):
        bench.router.warm_up("i2", 1, timeout_s=20)


def test_the_book_starts_with_a_placement_of_any_size() -> None:
    bench = Bench(Placement((4,), (4, 4), (10,)))
    bench.router.dispatch(Request("a"))
    bench.router.lose("i1")
    bench.router.switch("i2", Placement((4,), (4, 4), (10,)), HandedOver({}, {0: 0}))
    assert bench.sent_to("i2") == ["a@0"]


# ---- suspects: quarantine.py says who, these that the router does it ----


def die(bench: Bench, replacement: str, placement: Placement = TWO) -> None:
    """The instance that serves is lost, and replaced."""
    bench.router.lose(bench.router.table[0])
    bench.router.states()
    if replacement != "i2":
        bench.connect(replacement)
    bench.router.switch(replacement, placement, NOTHING)
    bench.router.release()


def clear(bench: Bench, rid: str, so_far: int) -> None:
    output(bench, rid, *range(CLEARING_TOKENS), so_far=so_far + CLEARING_TOKENS)


def test_what_ran_is_sent_one_by_one_and_what_is_new_waits(bench: Bench) -> None:
    bench.dispatch("a", "b")
    output(bench, "a", 7, so_far=1)
    die(bench, "i2")
    bench.dispatch("c")
    bench.router.dispatch(Control("abort b"))
    assert bench.sent_to("i2") == ["a@0"], "alone"
    output(bench, "a", 8, so_far=2)
    assert bench.sent_to("i2") == ["a@0"], "it may not be where it was when its instance died"
    clear(bench, "a", 1)
    assert bench.sent_to("i2") == ["a@0", "b@1"]
    output(bench, "b", 5, so_far=1, is_finished=True)
    assert bench.sent_to("i2") == ["a@0", "b@1", "c@0", "abort b"]
    assert len(bench.held_s) == 2


def test_what_ends_two_instances_is_given_up_and_the_others_go_on(bench: Bench) -> None:
    bench.dispatch("a", "poison", "b")
    die(bench, "i2")
    clear(bench, "a", 0)
    assert bench.sent_to("i2") == ["a@0", "poison@1"]
    die(bench, "i3")
    ((rid, error),) = bench.wire.failed
    assert rid == "poison"
    assert isinstance(error, SuspectRequestError)
    assert "2 engine instances ended" in str(error)
    assert bench.num_given_up == 1
    assert bench.sent_to("i3") == ["b@0"]
    clear(bench, "b", 0)
    clear(bench, "a", CLEARING_TOKENS)
    bench.dispatch("c")
    assert bench.sent_to("i3") == ["b@0", "a@0", "c@1"]
    assert bench.router.num_running() == 3
    assert states(bench)["a"] == (0, 2 * list(range(CLEARING_TOKENS)))


def test_one_that_is_given_up_has_no_state_elsewhere(bench: Bench) -> None:
    """A client may choose the same id again: it begins from nothing."""
    bench.dispatch("a")
    output(bench, "a", 7, so_far=1)
    die(bench, "i2")
    bench.router.lose("i2")
    assert states(bench) == {}
    assert bench.router.num_running() == 0
    assert bench.router.num_tokens() == 0


def test_a_recovery_that_is_tried_again_counts_one_death(bench: Bench) -> None:
    bench.dispatch("a")
    bench.router.lose("i1")
    for _ in range(3):
        bench.router.states()
    replace(bench)
    assert bench.wire.failed == []
    assert bench.sent_to("i2") == ["a@0"]


def test_a_scale_between_two_trials(bench: Bench) -> None:
    """The one on trial and the cleared ones are handed over; the others wait on."""
    bench.dispatch("a", "b", "c")
    die(bench, "i2")
    clear(bench, "a", 0)
    bench.connect("i3")
    bench.router.hold()
    clear(bench, "b", 0)  # what i2 had sent before it was frozen
    bench.router.switch("i3", TWO, NOTHING)
    assert bench.sent_to("i3") == ["a@0", "b@1"], "c has had no trial"
    bench.router.release()
    assert bench.sent_to("i3") == ["a@0", "b@1", "c@0"]
    clear(bench, "c", 0)
    bench.dispatch("d")
    assert bench.sent_to("i3")[-1].startswith("d@")
    assert bench.sent_to("i2") == ["a@0", "b@1"]


def test_what_was_never_sent_is_no_suspect(bench: Bench) -> None:
    bench.wire.on_send = fail
    bench.dispatch("late")
    bench.wire.on_send = lambda message: None
    die(bench, "i2")
    die(bench, "i3")
    die(bench, "i4")
    assert bench.sent_to("i3") == ["late@0"]
    assert bench.sent_to("i4") == []
    assert [rid for rid, _ in bench.wire.failed] == ["late"], "it ran on i2 and i3"


def test_an_abort_ends_a_trial(bench: Bench) -> None:
    """Its rank has thrown it out, for the time that it waited: nothing is to wait for it."""
    bench.dispatch("a", "b")
    die(bench, "i2")
    assert bench.sent_to("i2") == ["a@0"]
    bench.router.on_abort("a")
    assert bench.sent_to("i2") == ["a@0", "b@1"]
    die(bench, "i3")
    assert [rid for rid, _ in bench.wire.failed] == ["b"]
    assert bench.sent_to("i3") == []
