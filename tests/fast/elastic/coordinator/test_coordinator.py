"""The coordinator: every call fails once, at every position, and the right topology serves."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_elastic.coordinator.operations import Journal, Operation, StepState
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.errors import (
    BadScaleError,
    BusyError,
    ClosingError,
    DoesNotFitError,
    EngineFailedError,
    KeyReusedError,
    StepFailedError,
)
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.plan.planner import is_empty, placement_at_switch
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest, StepKind
from tests.fast.elastic.scale_fakes import (
    AFTER,
    BEFORE,
    NEW,
    OLD,
    PLAN,
    UP,
    WAIT_S,
    Call,
    Paused,
    Ticks,
    World,
    always,
    finished,
    make_coordinator,
    never,
    once,
)

AT_SWITCH = replace(NEW, kv_tokens=(80, 100, 120))


def scaled(world: World, request: ScaleRequest = UP) -> Operation:
    """The finished operation of one request."""
    return finished(make_coordinator(world), request)


WHOLE = World()  # of a scale in which nothing fails
assert scaled(WHOLE).state is OperationState.SUCCEEDED
SUCCESS = WHOLE.calls
FIRST = next(n for n, call in enumerate(SUCCESS) if call[0] == "execute")
COMMIT = next(n for n, call in enumerate(SUCCESS) if call[0] == "activate")


def inverse(call: Call) -> Call | None:
    """The call that takes this one back."""
    match call:
        case ("execute", step):
            return ("undo", step)
        case ("resize_kv", device_id, _):
            return ("resize_kv", device_id, OLD.kv_tokens_of(device_id))
        case ("prepare", _):
            return ("cancel", "i1")
        case ("hold",):
            return ("release",)
        case ("freeze", instance):
            return ("resume", instance)
    return None


def undone(calls: list[Call]) -> list[Call]:
    """The inverses of these calls, in exactly the reverse order."""
    return [back for call in reversed(calls) if (back := inverse(call)) is not None]


def test_a_scale_calls_in_the_order_of_its_phases() -> None:
    names = [call[0] for call in SUCCESS]
    assert names[:FIRST] == ["serving", "serving"]
    memory = ["resize_kv" if s.kind is StepKind.SHRINK_KV else "execute" for s in BEFORE]
    before = ["prepare", "hold", "freeze", "activate"]
    after = ["switch", "start_serving", "release", "retire", "execute", "resize_kv", "resize_kv"]
    assert names[FIRST:] == [*memory, *before, *after]
    assert ("prepare", AT_SWITCH) in SUCCESS, "the new instance starts with the KV there is"
    assert ("switch", "i1", AT_SWITCH) in SUCCESS
    assert placement_at_switch(PLAN) == AT_SWITCH


def test_a_scale_ends_with_the_new_topology() -> None:
    world, seen = World(), list[tuple[str, bool, int]]()
    coordinator = make_coordinator(world)
    coordinator.listen(
        lambda op, placement: seen.append((op.phase, op.finished, placement.dp_size))
    )
    operation = finished(coordinator)
    assert coordinator.close(WAIT_S)
    assert coordinator.serving == ("i1", NEW)
    assert world.active() == ["i1"]
    assert world.state_of("i0") is InstanceState.PARKED
    assert world.kv == {0: 150, 1: 150, 2: 120}
    assert not world.is_held
    assert world.handed_over.ranks == {"of i0": 0}, "what activate has returned"
    phases = ["memory", "prepare", "switch", "retire", "after"]
    assert [phase.name for phase in operation.phases] == ["plan", *phases]
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == phases, "listeners hear each"
    assert (seen[0], seen[-1]) == (("memory", False, 2), ("after", True, 3))
    assert all(phase.seconds > 0 for phase in operation.phases)
    assert [step.state for step in operation.steps] == [StepState.DONE] * len(BEFORE + AFTER)
    assert all(step.seconds > 0 for step in operation.steps)
    assert operation.switched
    assert operation.gap_s > 0
    assert operation.error is None
    assert 1000 < operation.created_s < operation.finished_s


@pytest.mark.parametrize("position", range(FIRST, COMMIT + 1))
def test_a_failure_before_the_switch_is_undone_in_reverse(position: int) -> None:
    world = World()
    before = world.model()
    world.fault = once(position)
    operation = scaled(world)
    assert operation.state is OperationState.ROLLED_BACK
    assert operation.error.type == "StepFailedError"
    assert operation.error.message == f"{SUCCESS[position][0]} failed"
    assert operation.undo_errors == ()
    assert not operation.switched
    assert world.calls[: position + 1] == SUCCESS[: position + 1]
    may_be_half_done = SUCCESS[position][0] in ("execute", "resize_kv")
    expected = undone(SUCCESS[FIRST : position + may_be_half_done])
    if SUCCESS[position] == ("hold",):  # a hold that failed may have held
        expected.append(("release",))
    assert world.calls[position + 1 :] == expected
    assert world.model() == before
    assert not any(step.state is StepState.DONE for step in operation.steps)
    failed = [step for step in operation.steps if step.state is StepState.FAILED]
    assert len(failed) == may_be_half_done, "what failed is still what failed"


@pytest.mark.parametrize("position", range(COMMIT + 1, len(SUCCESS)))
def test_a_failure_after_the_switch_is_tried_again(position: int) -> None:
    world = World(fault=once(position))
    operation = scaled(world)
    assert operation.state is OperationState.SUCCEEDED
    assert world.model() == WHOLE.model()
    assert world.named("undo", "cancel", "resume") == []
    assert world.calls == [*SUCCESS[: position + 1], *SUCCESS[position:]]


@pytest.mark.parametrize("position", range(COMMIT + 1, len(SUCCESS)))
def test_what_fails_for_good_after_the_switch_is_left_to_the_next_scale(position: int) -> None:
    """It is never rolled back, and the next scale finishes it first."""
    name = SUCCESS[position][0]
    world = World(fault=always(name, first=position))
    plans = iter([PLAN, Plan(NEW, NEW, (), (), {}, {})])
    coordinator = make_coordinator(world, lambda request, old: next(plans))
    degraded = finished(coordinator)
    assert degraded.state is OperationState.DEGRADED
    assert degraded.switched
    assert world.active() == ["i1"]
    assert world.named("undo", "cancel", "resume") == []
    assert world.is_held == (name == "release")
    attempts = [call for call in world.calls[COMMIT:] if call == SUCCESS[position]]
    assert len(attempts) == (6 if name == "release" else 3)
    world.fault = never
    assert finished(coordinator).state is OperationState.SUCCEEDED
    healed = coordinator.journal.get(degraded.operation_id)
    assert healed.state is OperationState.SUCCEEDED
    assert healed.error is None
    assert world.model() == WHOLE.model()


def test_nothing_new_begins_while_an_old_remainder_fails() -> None:
    world, ticks = World(fault=always("retire")), Ticks()
    coordinator = make_coordinator(world, ticks=ticks)
    finished(coordinator)
    assert ticks.slept == [0.5, 1.0], "pauses between attempts grow"
    count = len(world.calls)
    second = finished(coordinator, ScaleRequest(dp_size=2))
    assert second.state is OperationState.ROLLED_BACK
    assert world.calls[count:] == [("serving",), *[("retire", "i0")] * 3]


def test_an_undo_that_fails_once_is_tried_again() -> None:
    world = World()
    before = world.model()
    world.fault = lambda at, name: (
        StepFailedError(name) if name == "activate" or at == COMMIT + 2 else None
    )
    operation = scaled(world)
    assert operation.state is OperationState.ROLLED_BACK
    assert operation.undo_errors == ()
    assert world.model() == before


@pytest.mark.parametrize("name", ["undo", "cancel", "resume", "release", "resize_kv"])
def test_an_undo_that_fails_for_good_is_noted_and_the_others_still_run(name: str) -> None:
    world = World()
    failing = always(name, first=COMMIT)
    world.fault = lambda at, n: StepFailedError(n) if at == COMMIT else failing(at, n)
    operation = scaled(world)
    assert operation.state is OperationState.ROLLED_BACK
    assert operation.error.message == "activate"
    assert {each.message for each in operation.undo_errors} == {f"{name} failed"}
    expected = undone(SUCCESS[FIRST:COMMIT])
    assert list(dict.fromkeys(c for c in world.calls[COMMIT + 1 :] if c in expected)) == expected


@pytest.mark.parametrize("name", ["freeze", "retire"])
def test_a_defect_is_handled_too_and_frees_the_coordinator(name: str) -> None:
    """Before the switch it is rolled back; after it, the rest is left for later."""
    world, is_early = World(), name == "freeze"
    before = world.model()
    world.fault = lambda at, n: KeyError("defect") if n == name else None
    coordinator = make_coordinator(world)
    operation = finished(coordinator)
    assert operation.error.type == "KeyError"
    wanted = OperationState.ROLLED_BACK if is_early else OperationState.DEGRADED
    assert operation.state is wanted
    assert not is_early or world.model() == before
    assert not world.is_held
    world.fault = never
    assert not is_early or finished(coordinator).state is OperationState.SUCCEEDED
    finished(coordinator)
    assert world.state_of("i0") is InstanceState.PARKED


@pytest.mark.parametrize("is_late", [False, True])
def test_drain_waits_with_requests_held_and_hands_over_what_takes_too_long(is_late: bool) -> None:
    late = EngineFailedError("time-out")
    world = World(fault=lambda at, name: late if is_late and name == "drain" else None)
    operation = scaled(world, replace(UP, drain=True))
    assert operation.state is OperationState.SUCCEEDED
    names = [call[0] for call in world.calls]
    assert names[names.index("hold") : names.index("activate")] == ["hold", "drain", "freeze"]
    assert ("drain", "i0", 7.0) in world.calls
    assert "drain" in [phase.name for phase in operation.phases]
    assert world.active() == ["i1"]


def test_bytes_are_those_that_were_copied_not_those_of_the_plan() -> None:
    coordinator = make_coordinator(World())
    operation = finished(coordinator)
    assert coordinator.close(WAIT_S)
    copies = [step for step in operation.steps if step.num_bytes]
    assert copies
    assert [step.copied_bytes for step in copies] == [3 * step.num_bytes for step in copies]


def test_an_empty_plan_succeeds_without_a_call() -> None:
    world = World()
    same = Plan(OLD, OLD, (), (), {}, {})
    assert is_empty(same)
    assert not is_empty(PLAN)
    coordinator = make_coordinator(world, lambda request, old: same)
    operation = finished(coordinator, ScaleRequest(dp_size=2))
    assert operation.state is OperationState.SUCCEEDED
    assert world.calls == [("serving",), ("serving",)]


def test_a_dry_run_changes_nothing() -> None:
    world = World()
    coordinator = make_coordinator(world)
    operation = coordinator.submit(replace(UP, dry_run=True, key="k"))
    assert operation.plan == {"copied_bytes": 14}
    assert operation.operation_id == ""
    assert coordinator.journal.last(10) == ()
    assert world.calls == [("serving",), ("serving",)]


@pytest.mark.parametrize("error", [BadScaleError("no"), DoesNotFitError("no")])
def test_a_request_that_cannot_be_planned_changes_nothing(error: Exception) -> None:
    def refuse(request: ScaleRequest, old: Placement) -> Plan:
        raise error

    world = World()
    coordinator = make_coordinator(world, refuse)
    with pytest.raises(type(error)):
        coordinator.submit(UP)
    assert coordinator.journal.last(10) == ()
    assert coordinator.running() is None
    assert world.calls == [("serving",), ("serving",)]
    assert not world.are_adapters_deferred


def test_a_plan_knows_the_adapters_that_are_there() -> None:
    """Whatever the ranks have said of them is heard before, and nothing changes until the end."""
    world = World()
    world.has_changed_adapters = True

    def plan(request: ScaleRequest, old: Placement) -> Plan:
        assert world.are_adapters_deferred is not request.dry_run
        heard = ("drain_messages",) in world.calls
        assert heard is not request.dry_run
        return PLAN

    coordinator = make_coordinator(world, plan)
    coordinator.submit(replace(UP, dry_run=True))
    finished(coordinator)


def test_one_scale_at_a_time_and_a_key_gives_its_operation_again() -> None:
    paused, keyed = Paused(), replace(UP, key="k")
    first = paused.coordinator.submit(keyed)
    assert paused.reached.wait(WAIT_S)
    assert paused.coordinator.running().phase == "prepare"
    assert paused.coordinator.submit(keyed).operation_id == first.operation_id
    with pytest.raises(KeyReusedError, match="op1"):
        paused.coordinator.submit(replace(keyed, dp_size=4))
    with pytest.raises(BusyError, match="op1"):
        paused.coordinator.submit(ScaleRequest(dp_size=4))
    with pytest.raises(BusyError):
        paused.coordinator.submit(replace(UP, dry_run=True))
    paused.go_on.set()
    ended = finished(paused.coordinator, first)
    assert ended.state is OperationState.SUCCEEDED
    assert paused.coordinator.running() is None
    assert paused.coordinator.submit(keyed) == ended
    assert len(paused.coordinator.journal.last(10)) == 1
    paused.coordinator.submit(UP)


def test_close_waits_for_the_scale_that_runs_and_lets_no_other_begin() -> None:
    paused = Paused()
    first = paused.coordinator.submit(replace(UP, key="k"))
    assert paused.reached.wait(WAIT_S)
    assert not paused.coordinator.close(0.01)
    for request in (UP, replace(UP, dry_run=True)):
        with pytest.raises(ClosingError, match="the server ends"):
            paused.coordinator.submit(request)
    paused.go_on.set()
    assert paused.coordinator.close(WAIT_S)
    ended = paused.coordinator.submit(replace(UP, key="k"))  # a key that came before: what became
    assert (ended.operation_id, ended.state) == (first.operation_id, OperationState.SUCCEEDED)
    assert paused.coordinator.recover() is None
    with pytest.raises(ClosingError):
        paused.coordinator.submit(UP)
    assert paused.coordinator.close(0.0)


def test_close_waits_for_a_recovery() -> None:
    paused = Paused()
    recovery = threading.Thread(target=paused.coordinator.recover)
    recovery.start()
    assert paused.reached.wait(WAIT_S)
    assert not paused.coordinator.close(0.01)
    paused.go_on.set()
    assert paused.coordinator.close(WAIT_S)
    recovery.join(WAIT_S)


def test_one_of_many_submitters_wins() -> None:
    paused = Paused()

    def submit(number: int) -> str:
        try:
            return paused.coordinator.submit(replace(UP, key=f"k{number}")).operation_id
        except BusyError:
            return "busy"

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(submit, range(8)))
    paused.go_on.set()
    assert sorted(outcomes) == ["busy"] * 7 + ["op1"]


def test_nothing_is_written_to_disk_while_requests_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    journal = Journal(tmp_path / "journal")
    connect = sqlite3.connect

    def noted(path: Path, **options: Any) -> sqlite3.Connection:
        world.calls.append(("write",))
        return connect(path, **options)

    monkeypatch.setattr("sqlite3.connect", noted)
    coordinator = make_coordinator(world, journal=journal)
    finished(coordinator)
    names = [call[0] for call in world.calls]
    assert "write" not in names[names.index("hold") : names.index("release")]
    assert names.count("write") == 7  # submitted, five phases, finished


def test_a_restarted_coordinator_closes_what_was_cut_off(tmp_path: Path) -> None:
    cut_off = Operation("op1", UP, OperationState.RUNNING).with_phase("prepare")
    Journal(tmp_path / "journal").record(cut_off)
    coordinator = make_coordinator(World(), journal=Journal(tmp_path / "journal"))
    assert coordinator.running() is None
    closed = coordinator.journal.get("op1")
    assert closed.state is OperationState.ROLLED_BACK
    assert "prepare" in closed.error.message


def test_the_real_planner_up_and_down() -> None:
    one = Placement(device_ids=(0,), homes=(0,) * 6, kv_tokens=(300,))
    world = World(one)
    planner = Planner(world, max_devices=4, kv_limit=2000, min_kv_tokens=16)
    coordinator = make_coordinator(world, planner.make_plan)
    for size in (2, 3, 2, 1, 1):
        request = ScaleRequest(dp_size=size)
        assert planner.describe(planner.make_plan(request, coordinator.serving[1]))["new"]
        operation = finished(coordinator, request)
        assert operation.state is OperationState.SUCCEEDED
        assert coordinator.serving[1].device_ids == tuple(range(size))
        assert world.table == coordinator.serving
    with pytest.raises(BadScaleError):
        coordinator.submit(ScaleRequest(dp_size=5))
