"""KV that a scale has taken and cannot give back is pending, and comes before anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.errors import StepFailedError
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest, StepKind
from tests.fast.elastic.coordinator.test_coordinator import COMMIT
from tests.fast.elastic.scale_fakes import (
    BEFORE,
    NEW,
    OLD,
    PLAN,
    UP,
    Fault,
    World,
    always,
    finished,
    make_coordinator,
    never,
    recovered,
)

[SHRINK] = [step for step in BEFORE if step.kind is StepKind.SHRINK_KV]
GIVE_BACK = ("resize_kv", SHRINK.device_id, OLD.kv_tokens_of(SHRINK.device_id))
_S = OperationState


class HalfDone(World):
    """A KV that is told to change does, although no answer comes."""

    def resize_kv(self, device_id: int, num_tokens: int) -> None:
        try:
            super().resize_kv(device_id, num_tokens)
        except StepFailedError:
            self.kv[device_id] = min(self.kv[device_id], num_tokens)
            raise


LATER = always("resize_kv", first=COMMIT)
FAULTS: dict[str, Fault] = {
    "the shrink and its undo": always("resize_kv"),
    "only the undo": lambda at, name: (
        StepFailedError(name) if name == "activate" else LATER(at, name)
    ),
}


@pytest.fixture(params=FAULTS.values(), ids=FAULTS.keys())
def world(request: pytest.FixtureRequest) -> World:
    return HalfDone(fault=request.param)


@pytest.fixture
def planned_from() -> list[Placement]:
    return []


@pytest.fixture
def coordinator(world: World, planned_from: list[Placement]) -> Coordinator:
    """After a scale that took KV and could not give it back."""

    def plan(request: ScaleRequest, old: Placement) -> Plan:
        planned_from.append(old)
        return PLAN

    coordinator = make_coordinator(world, plan)
    operation = finished(coordinator)
    assert operation.state is _S.ROLLED_BACK
    assert {each.message for each in operation.undo_errors} == {"resize_kv failed"}
    assert world.kv[SHRINK.device_id] == SHRINK.num_tokens
    return coordinator


def test_the_next_scale_gives_it_back_first(
    world: World, coordinator: Coordinator, planned_from: list[Placement]
) -> None:
    """Its plan knows of nothing else: the old configuration is whole when it begins."""
    world.fault, count = never, len(world.calls)
    coordinator.submit(replace(UP, dry_run=True))
    assert world.calls[count:] == [("serving",)], "a plan that is only asked for gives nothing"
    assert finished(coordinator).state is _S.SUCCEEDED
    assert planned_from == [OLD, OLD, OLD]
    calls = [call for call in world.calls[count:] if call[0] != "serving"]
    assert calls[:2] == [GIVE_BACK, ("execute", BEFORE[0])]
    assert world.kv == dict(zip(NEW.device_ids, NEW.kv_tokens, strict=True))
    finished(coordinator)
    assert world.calls[count:].count(GIVE_BACK) == 1


def test_nothing_else_begins_while_that_fails(world: World, coordinator: Coordinator) -> None:
    world.fault, count = always("resize_kv"), len(world.calls)
    operation = finished(coordinator)
    assert operation.state is _S.ROLLED_BACK
    assert operation.error.message == "resize_kv failed"
    assert [call for call in world.calls[count:] if call[0] != "serving"] == [GIVE_BACK]


def test_an_instance_that_comes_in_its_place_has_it(world: World, coordinator: Coordinator) -> None:
    world.fault = never
    recovered(coordinator)
    assert coordinator.serving[1] == OLD
    assert ("prepare", OLD) in world.calls
    count = len(world.calls)
    finished(coordinator)
    assert GIVE_BACK not in world.calls[count:]
