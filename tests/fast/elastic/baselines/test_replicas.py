"""Horizontal scaling: plans, a second instance, and requests shared between both."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sgl_elastic import assembly, options
from sgl_elastic.autoscale.slo import SloTargets, SloWindow
from sgl_elastic.baselines.horizontal import (
    HorizontalScale,
    ReplicaPlanner,
    ReplicaRouter,
    Replicas,
    both,
    parts,
    replica_on,
)
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import BadScaleError, BusyError, EngineFailedError
from sgl_elastic.front.dispatcher import FrontListener
from sgl_elastic.front.rank_choice import RankPolicy, RankStrategy
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.types import OperationState, Placement, ScaleRequest, StepKind
from tests.fast.elastic.front.test_router import Control, FakeWire, Request
from tests.fast.elastic.scale_fakes import OLD, World, always, finished, make_coordinator

ONE = Placement((0,), (0, 0), (100,))
SECOND = Placement((2, 3), (2, 2, 2, 3, 3, 3), (100, 100))


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
    removed = [(step.kind, step.device_id) for step in down.after]
    assert removed == [(StepKind.REMOVE_DEVICE, 2), (StepKind.REMOVE_DEVICE, 3)]
    assert down.final_pages[2] == 0 < down.final_pages[0]
    same = make_plan(2, OLD)
    assert (same.new, same.before, same.after) == (OLD, (), ())


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


# ---- how they are carried out ----


class ReplicaWorld(World):
    """The fakes with two instances and a front for both."""

    def start_serving(self, instance: str) -> None:
        super().start_serving(instance)
        self._move(instance, InstanceState.ACTIVE)

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        self.call("switch", instance)
        self.table = (instance, placement)

    def retire(self, instance: str) -> None:
        self.call("retire", instance)
        self.instances.pop(instance, None)

    def narrow(self, timeout_s: float) -> None:
        self.call("narrow")


def coordinator_of(world: ReplicaWorld) -> Coordinator:
    carry_out = HorizontalScale(world)  # type: ignore[arg-type]
    return make_coordinator(world, ReplicaPlanner(world, 4).make_plan, carry_out=carry_out)


def scaled(coordinator: Coordinator, dp_size: int) -> Operation:
    return finished(coordinator, ScaleRequest(dp_size))


def names(world: World) -> list[str]:
    return [call[0] for call in world.calls if call[0] not in ("serving", "execute")]


def test_a_replica_comes_and_goes_without_holding_anybody() -> None:
    world = ReplicaWorld()
    coordinator = coordinator_of(world)
    up = scaled(coordinator, 4)
    assert up.state is OperationState.SUCCEEDED
    assert names(world) == ["prepare", "start_serving", "switch"]
    assert world.active() == ["i0", "i1"]
    assert coordinator.serving[0] == "i0+i1"
    world.calls.clear()
    down = scaled(coordinator, 2)
    assert down.state is OperationState.SUCCEEDED
    assert names(world) == ["narrow", "switch", "retire"]
    assert world.calls[-3] == ("retire", "i1")
    assert coordinator.serving == ("i0", OLD)
    assert up.gap_s == down.gap_s == 0


@pytest.mark.parametrize("name", ["execute", "prepare", "start_serving"])
def test_a_replica_that_does_not_come_up_is_taken_back(name: str) -> None:
    world = ReplicaWorld(fault=always(name))
    before = world.model()
    assert scaled(coordinator_of(world), 4).state is OperationState.ROLLED_BACK
    assert world.model() == before


def test_a_drain_that_does_not_end_retires_nobody() -> None:
    world = ReplicaWorld()
    coordinator = coordinator_of(world)
    scaled(coordinator, 4)
    world.fault = always("narrow")
    assert scaled(coordinator, 2).state is OperationState.DEGRADED
    assert "retire" not in names(world)


class OneInstance:
    """The verbs of an InstanceManager, whose first instance is `a`."""

    def __init__(self) -> None:
        self.known = [Instance("a", OLD.device_ids, InstanceState.ACTIVE, OLD)]
        self.stopped: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def serving(self) -> tuple[str, Placement]:
        return "a", OLD

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self.known)

    def stop(self, instance: str) -> None:
        self.stopped.append(instance)
        self.known = self.known[:1]


def test_the_second_serves_from_its_start_to_its_end() -> None:
    manager = OneInstance()
    replicas = Replicas(manager)  # type: ignore[arg-type]
    assert replicas.serving() == ("a", OLD)
    manager.known.append(Instance("b", SECOND.device_ids, InstanceState.WARM, SECOND))
    assert replicas.serving() == ("a", OLD), "it does not run yet"
    replicas.start_serving("b")
    assert replicas.serving() == ("a+b", both(OLD, SECOND))
    replicas.retire("b")
    replicas.retire("b")
    assert set(manager.stopped) == {"b"}
    assert replicas.serving() == ("a", OLD)
    assert not replicas.is_lost(), "what dies is not replaced"


def test_the_parts_of_horizontal_scaling() -> None:
    found, _ = options.parse(["--elastic", "--scale-strategy", "horizontal"])
    window = SloWindow(SloTargets(ttft_s=1.0, tpot_s=0.1))
    router = assembly.make_router(found, FakeWire(), RankPolicy(), window)
    assert isinstance(router, ReplicaRouter)
    memory: Any = World()
    manager: Any = OneInstance()
    coordinator, watched = assembly.make_coordinator(found, memory, manager, router)
    assert isinstance(watched, Replicas)
    assert coordinator.serving == ("a", OLD)
    plan = coordinator.submit(ScaleRequest(4, dry_run=True)).plan
    assert [device["device_id"] for device in plan["devices"]] == [0, 1, 2, 3]


# ---- the router ----


class Two:
    """Two replicas of two ranks each; `a` had request r0 before `b` came."""

    def __init__(self) -> None:
        self.wire, self.woken, self.sizes = FakeWire(), list[str](), list[int]()
        window = SloWindow(SloTargets(ttft_s=1.0, tpot_s=0.1))
        policy = RankPolicy(strategy=RankStrategy.ROUND_ROBIN)

        def make() -> RequestRouter:
            return RequestRouter(self.wire, window, policy=policy)

        self.router = ReplicaRouter(self.wire, make, window)
        self.router.listen(FrontListener(self.sizes.append))
        for name in ("a", "b"):
            self.router.connect(name, name, lambda name=name: self.woken.append(name))
        self.router.begin("a", OLD)
        self.router.dispatch(Request("r0"))
        self.spread()
        self.wire.sent.clear()
        self.woken.clear()

    def spread(self) -> None:
        self.router.switch("a+b", both(OLD, SECOND), HandedOver({}, {}))

    def sent_to(self, address: str) -> list[Any]:
        return [message for socket, message in self.wire.sent if socket == address]


@pytest.fixture
def two() -> Two:
    return Two()


def test_requests_are_shared_and_each_replica_counts_its_own_ranks(two: Two) -> None:
    two.spread()  # a second time is harmless
    assert two.sizes == [4]
    assert two.wire.sent == [], "what ran before stays where it is"
    assert two.router.num_running() == 1
    for rank in range(4):
        two.router.dispatch(Request(f"q{rank}", routed_dp_rank=rank))
    assert [(m.rid, m.routed_dp_rank) for m in two.sent_to("a")] == [("q0", 0), ("q1", 1)]
    assert [(m.rid, m.routed_dp_rank) for m in two.sent_to("b")] == [("q2", 0), ("q3", 1)]
    assert two.woken == ["b"]  # `a` has r0 already, and b is awake after its first
    assert two.router.num_running() == 5
    assert two.router.num_tokens() == 15
    assert two.router.attainment(0.0).num_finished == 0


def test_the_replica_with_the_least_to_do_gets_the_next(two: Two) -> None:
    for number in range(5):
        two.router.dispatch(Request(f"q{number}"))
    assert [m.rid for m in two.sent_to("b")] == ["q0", "q2", "q4"]
    assert [m.rid for m in two.sent_to("a")] == ["q1", "q3"]
    two.router.dispatch(Control("flush"))
    assert two.sent_to("a")[-1] == two.sent_to("b")[-1] == Control("flush"), "goes to both"


def test_adapters_change_in_both_when_the_scale_has_ended(two: Two) -> None:
    load = Control("load x", is_adapter_change=True)
    assert not two.router.defer_adapter_changes(1.0)
    two.router.dispatch(load)
    assert two.wire.sent == []
    two.router.scaling(False)
    assert two.sent_to("a") == two.sent_to("b") == [load]
    two.wire.is_changing = True
    with pytest.raises(BusyError):
        two.router.defer_adapter_changes(0.0)


def test_narrow_waits_for_the_second_and_sends_it_nothing_new(two: Two) -> None:
    two.router.dispatch(Request("late", routed_dp_rank=3))
    with pytest.raises(EngineFailedError, match="still runs"):
        two.router.narrow(0.02)
    for number in range(4):
        two.router.dispatch(Request(f"n{number}", routed_dp_rank=number))
    assert [m.rid for m in two.sent_to("b")] == ["late"]
    assert [m.routed_dp_rank for m in two.sent_to("a")] == [0, 1, 0, 1]
    done = threading.Thread(target=two.router.narrow, args=(5.0,))
    done.start()
    two.router.on_output(["late"], ["stop"], [3])
    done.join(5.0)
    assert not done.is_alive()
    for _ in range(2):
        two.router.switch("a", OLD, HandedOver({}, {}))
    assert two.sizes == [4, 2]
    two.router.disconnect("b")
    two.router.dispatch(Request("alone", routed_dp_rank=1))
    assert two.sent_to("a")[-1].rid == "alone"


def test_an_instance_is_warmed_up_before_it_serves(two: Two) -> None:
    two.router.connect("c", "c", lambda: None)
    two.wire.on_send = lambda message: two.router.on_output([message.rid], [None], [1])
    two.router.warm_up("c", 2, timeout_s=5.0)
    assert [message.routed_dp_rank for message in two.sent_to("c")] == [0, 1]
    two.wire.on_send = lambda message: None
    two.router.pause("c")
    assert two.sent_to("c")[-1] == Control("pause")
