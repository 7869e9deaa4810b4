"""A serving instance is lost: recovered when idle, or carried along by the scale that runs."""

from __future__ import annotations

import threading

import pytest

from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import BusyError, MemoryLostError
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.types import OperationState, Step, StepKind
from tests.fast.elastic.coordinator.test_coordinator import COMMIT
from tests.fast.elastic.scale_fakes import (
    NEW,
    OLD,
    UP,
    WAIT_S,
    Paused,
    World,
    always,
    finished,
    make_coordinator,
    never,
    recovered,
)

MAP_KV = [("execute", Step(StepKind.MAP_KV, d, num_tokens=100)) for d in OLD.device_ids]


def test_another_instance_gets_memory_and_requests() -> None:
    world = World()
    coordinator = make_coordinator(world)
    heard: list[OperationState] = []
    coordinator.listen(lambda operation, placement: heard.append(operation.state))
    count = len(world.calls)
    operation = recovered(coordinator)
    assert (heard[0], heard[-1]) == (OperationState.RUNNING, OperationState.SUCCEEDED)
    assert operation.operation_id == "op1"
    assert [phase.name for phase in operation.phases] == ["prepare", "switch", "retire"]
    assert operation.gap_s > 0
    assert world.calls[count:] == [
        ("serving",),
        ("hold",),
        ("drain_messages",),
        ("drop_partial_adapters", OLD),
        *MAP_KV,
        ("prepare", OLD),
        ("freeze", "i0"),
        ("activate", "i1", "i0", {}),
        ("switch", "i1", OLD),
        ("start_serving", "i1"),
        ("release",),
        ("retire", "i0"),
    ]
    assert coordinator.serving == ("i1", OLD)
    assert coordinator.running() is None
    assert world.active() == ["i1"]
    assert not world.is_held


def test_what_runs_can_be_read_from_its_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """GET /v1/scale asks from another thread, also while the journal writes to disk."""
    coordinator = make_coordinator(World())
    record = coordinator.journal.record
    seen: list[Operation | None] = []

    def slow(operation: Operation) -> None:
        seen.append(coordinator.running())
        record(operation)

    monkeypatch.setattr(coordinator.journal, "record", slow)
    assert coordinator.recover() is not None
    assert seen[0] is None
    assert [each.operation_id for each in seen[1:3] if each] == ["op1", "op1"]


@pytest.mark.parametrize(
    "name",
    ["hold", "drop_partial_adapters", "execute", "prepare", "freeze", "activate"],
)
def test_a_recovery_that_fails_may_be_tried_again(name: str) -> None:
    world = World()
    coordinator = make_coordinator(world)
    world.fault = always(name)
    operation = coordinator.recover()
    assert operation.state is OperationState.ROLLED_BACK
    assert operation.error is not None
    assert [n for n, each in world.instances.items() if each.placement] == ["i0"]
    world.fault = never
    if world.state_of("i0") is InstanceState.FROZEN:
        world.resume("i0")
    recovered(coordinator)
    assert not world.is_held


def test_no_recovery_while_a_scale_runs_and_no_scale_during_a_recovery() -> None:
    paused = Paused()
    coordinator = paused.coordinator
    operation = coordinator.submit(UP)
    assert paused.reached.wait(WAIT_S)
    assert coordinator.recover() is None
    paused.go_on.set()
    assert finished(coordinator, operation).state is OperationState.SUCCEEDED
    paused.reached.clear()
    paused.go_on.clear()
    recovery = threading.Thread(target=coordinator.recover)
    recovery.start()
    assert paused.reached.wait(WAIT_S)
    with pytest.raises(BusyError, match="op2"):
        coordinator.submit(UP)
    paused.go_on.set()
    recovery.join(WAIT_S)
    assert coordinator.serving == ("i2", NEW)


def test_what_a_degraded_scale_left_goes_on_with_the_replacement() -> None:
    """The new instance is lost before its KV could grow."""
    world = World(fault=always("resize_kv", first=COMMIT))
    coordinator = make_coordinator(world)
    assert finished(coordinator).state is OperationState.DEGRADED
    world.fault = never
    recovered(coordinator)
    assert world.table[0] == "i2"
    finished(coordinator)  # finishes what was left, first
    assert world.named("freeze")[-1] == ("freeze", "i2"), "i1 is gone"


def test_a_switch_that_was_left_is_not_done_again() -> None:
    world = World()
    coordinator = make_coordinator(world)
    world.fault = always("switch")
    operation = finished(coordinator)
    assert operation.state is OperationState.DEGRADED
    world.fault = never
    world.table = ("i1", NEW)  # as the instance manager has it
    recovered(coordinator)
    count = len(world.calls)
    finished(coordinator)
    assert ("switch", "i1") not in [call[:2] for call in world.calls[count:]]


def test_scales_are_refused_while_memory_is_lost() -> None:
    world = World()
    coordinator = make_coordinator(world)
    world.lost_devices = {1}
    with pytest.raises(MemoryLostError):
        coordinator.submit(UP)
    assert coordinator.running() is None
    failed = coordinator.recover()
    assert failed.error.type == "MemoryLostError"
    world.lost_devices = {2}  # which does not serve
    assert finished(coordinator).state is OperationState.SUCCEEDED
