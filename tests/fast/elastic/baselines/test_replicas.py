"""Horizontal scaling: plans, a second instance, and requests shared between both."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from sgl_elastic.baselines.horizontal import (
    ReplicaCoordinator,
    ReplicaPlanner,
    ReplicaRequestRouter,
    both,
    parts,
    replica_on,
)
from sgl_elastic.coordinator.coordinator import RetryPolicy
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import BadScaleError, EngineFailedError
from sgl_elastic.front.rank_choice import RankPolicy, RankStrategy
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.types import OperationState, Placement, ScaleRequest, StepKind
from tests.fast.elastic.front.test_router import Control, FakeWire, Request
from tests.fast.elastic.scale_fakes import OLD, Fault, Ticks, World, always, never

ONE = Placement((0,), (0, 0), (100,))
SECOND = Placement((2, 3), (2, 2, 2, 3, 3, 3), (100, 100))
WAIT_S = 10.0


# ---- placements and plans ----


def test_two_replicas_are_one_placement_and_back() -> None:
    assert replica_on((2, 3), OLD) == SECOND
    assert parts(both(OLD, SECOND)) == (OLD, SECOND)
    assert parts(OLD) == (OLD, None)
    assert parts(ONE) == (ONE, None)
    assert parts(both(ONE, replica_on((3,), ONE))) == (ONE, Placement((3,), (3, 3), (100,)))


def make_plan(dp_size: int, old: Placement, max_devices: int = 4, **more: Any) -> Any:
    request = ScaleRequest(dp_size, **more)
    return ReplicaPlanner(World(), max_devices).make_plan(request, old)


def test_up_maps_a_whole_replica_and_down_removes_it() -> None:
    up = make_plan(4, OLD)
    assert up.new == both(OLD, SECOND)
    assert {step.device_id for step in up.before} == {2, 3}
    assert up.after == ()
    assert set(up.peak_pages) == {0, 1, 2, 3}
    down = make_plan(2, up.new)
    assert (down.new, down.before) == (OLD, ())
    assert [(s.kind, s.device_id) for s in down.after] == [
        (StepKind.REMOVE_DEVICE, 2),
        (StepKind.REMOVE_DEVICE, 3),
    ]
    assert down.final_pages[2] == 0 < down.final_pages[0]


@pytest.mark.parametrize(
    ("dp_size", "old", "more", "complaint"),
    [
        (3, OLD, {}, "whole replicas"),
        (4, OLD, {"max_devices": 3}, "needs 4 devices"),
        (1, OLD, {}, "cannot be halved"),
        (8, both(OLD, SECOND), {"max_devices": 8}, "no more|can be no more"),
        (4, OLD, {"device_ids": (0, 1, 2, 3)}, "chooses its devices"),
    ],
)
def test_what_horizontal_scaling_cannot_do(
    dp_size: int, old: Placement, more: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BadScaleError, match=complaint):
        make_plan(dp_size, old, **more)


def test_the_present_size_is_nothing_to_do() -> None:
    made = make_plan(2, OLD)
    assert (made.new, made.before, made.after) == (OLD, (), ())


# ---- the coordinator ----


class ReplicaWorld(World):
    """The fakes with two instances and a front for both."""

    def __init__(self, placement: Placement = OLD, fault: Fault = never) -> None:
        super().__init__(placement, fault)

    def join(self, instance: str) -> str:
        self.call("join", instance)
        self._move(instance, InstanceState.ACTIVE)
        return f"i0+{instance}"

    def first(self) -> str:
        return "i0"

    def end_second(self) -> None:
        self.call("end_second")
        self.instances.pop("i1", None)

    def spread(self, group: str, placement: Placement) -> None:
        self.call("spread", group)
        self.table = (group, placement)

    def narrow(self, num_ranks: int, timeout_s: float) -> None:
        self.call("narrow", num_ranks)

    def unite(self, instance: str, placement: Placement) -> None:
        self.call("unite", instance)
        self.table = (instance, placement)


def coordinator_of(world: ReplicaWorld) -> ReplicaCoordinator:
    planner = ReplicaPlanner(world, 4)
    return ReplicaCoordinator(
        world,
        world,
        world,
        planner.make_plan,
        planner.describe,
        retry_policy=RetryPolicy(attempts=2, first_pause_s=0.1),
        clock=Ticks().clock(),
    )


def scaled(coordinator: ReplicaCoordinator, dp_size: int) -> Operation:
    operation = coordinator.submit(ScaleRequest(dp_size))
    return coordinator.wait(operation.operation_id, WAIT_S)


def names(world: World) -> list[str]:
    ignored = ("serving", "require", "commit", "execute")
    return [call[0] for call in world.calls if call[0] not in ignored]


def test_a_replica_comes_and_goes_without_holding_anybody() -> None:
    world = ReplicaWorld()
    coordinator = coordinator_of(world)
    up = scaled(coordinator, 4)
    assert up.state is OperationState.SUCCEEDED
    assert names(world) == ["prepare", "join", "spread"]
    assert world.active() == ["i0", "i1"]
    assert coordinator.serving[0] == "i0+i1"
    world.calls.clear()
    down = scaled(coordinator, 2)
    assert down.state is OperationState.SUCCEEDED
    assert names(world) == ["narrow", "unite", "end_second"]
    assert coordinator.serving == ("i0", OLD)
    assert up.gap_s == down.gap_s == 0


@pytest.mark.parametrize("name", ["execute", "prepare", "join"])
def test_a_replica_that_does_not_come_up_is_taken_back(name: str) -> None:
    world = ReplicaWorld(fault=always(name))
    before = world.model()
    assert scaled(coordinator_of(world), 4).state is OperationState.ROLLED_BACK
    assert world.model() == before


def test_a_drain_that_does_not_end_is_tried_again_by_the_next_scale() -> None:
    world = ReplicaWorld()
    coordinator = coordinator_of(world)
    scaled(coordinator, 4)
    world.fault = always("narrow")
    assert scaled(coordinator, 2).state is OperationState.DEGRADED
    assert "end_second" not in names(world)


# ---- the router ----


@dataclass
class HeartbeatTable:
    router: ReplicaRequestRouter
    wire: FakeWire
    woken: list[str]

    def sent_to(self, address: str) -> list[Any]:
        return [message for socket, message in self.wire.sent if socket == address]


@pytest.fixture
def two() -> HeartbeatTable:
    wire, woken = FakeWire(), []
    router = ReplicaRequestRouter(
        wire,
        handed_over=lambda: HandedOver({}, {}),
        wake=woken.append,
        policy=RankPolicy(strategy=RankStrategy.ROUND_ROBIN),
    )
    for name in ("a", "b"):
        router.connect(name, name)
    router.begin("a", OLD)
    router.dispatch(Request("r0"))
    router.spread("a+b", both(OLD, SECOND))
    wire.sent.clear()
    woken.clear()
    return HeartbeatTable(router, wire, woken)


def test_requests_are_shared_and_each_replica_counts_its_own_ranks(two: HeartbeatTable) -> None:
    for rank in range(4):
        two.router.dispatch(Request(f"q{rank}", routed_dp_rank=rank))
    assert [(m.rid, m.routed_dp_rank) for m in two.sent_to("a")] == [("q0", 0), ("q1", 1)]
    assert [(m.rid, m.routed_dp_rank) for m in two.sent_to("b")] == [("q2", 0), ("q3", 1)]
    assert two.woken == ["b"]  # `a` has r0 already, and b is awake after its first


def test_what_is_no_request_goes_to_both(two: HeartbeatTable) -> None:
    two.router.dispatch(Control("flush"))
    assert two.sent_to("a") == two.sent_to("b") == [Control("flush")]


def test_narrow_waits_for_the_second_and_sends_it_nothing_new(two: HeartbeatTable) -> None:
    two.router.dispatch(Request("late", routed_dp_rank=3))
    with pytest.raises(EngineFailedError, match="still runs"):
        two.router.narrow(2, 0.02)
    for number in range(4):
        two.router.dispatch(Request(f"n{number}", routed_dp_rank=number))
    assert [m.rid for m in two.sent_to("b")] == ["late"]
    assert [m.routed_dp_rank for m in two.sent_to("a")] == [0, 1, 0, 1]
    done = threading.Thread(target=two.router.narrow, args=(2, 5.0))
    done.start()
    two.router.on_output(["late"], ["stop"], [3])
    done.join(5.0)
    assert not done.is_alive()
    two.router.unite("a", OLD)
    two.router.unite("a", OLD)
    assert two.router.routing.table.placement == OLD
    two.router.disconnect("b")
    two.router.dispatch(Request("alone", routed_dp_rank=1))
    assert two.sent_to("a")[-1].rid == "alone"


def test_requests_that_ran_before_stay_where_they_are(two: HeartbeatTable) -> None:
    assert two.sent_to("b") == []
    assert two.router.num_running() == 1
    two.router.spread("a+b", both(OLD, SECOND))  # harmless
    assert two.router.routing.table.version == 2
