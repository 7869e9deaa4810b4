"""Fake memory, instances and front that record every call, keep a model, and fail where told."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Journal, Operation
from sgl_elastic.coordinator.progress import Clock
from sgl_elastic.coordinator.scale import CarryOut, scale
from sgl_elastic.coordinator.steps import RetryPolicy
from sgl_elastic.errors import MemoryLostError, StepFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import FrozenInstance, HandedOver
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.types import (
    AdapterEntry,
    MemoryShape,
    OperationState,
    Placement,
    Plan,
    Region,
    RegionKind,
    ScaleRequest,
    Step,
    StepKind,
)

OLD = Placement(device_ids=(0, 1), homes=(0, 0, 0, 1, 1, 1), kv_tokens=(100, 100))
NEW = Placement(device_ids=(0, 1, 2), homes=(0, 0, 2, 1, 1, 2), kv_tokens=(150, 150, 120))
BEFORE = (
    Step(StepKind.ADD_DEVICE, 2),
    Step(StepKind.MAP_TRUNK, 2),
    Step(StepKind.MAP_KV, 2, num_tokens=120),
    Step(StepKind.COPY_TRUNK, 2, source_id=0, num_bytes=10),
    Step(StepKind.SHRINK_KV, 0, num_tokens=80),
    Step(StepKind.MAP_EXPERTS, 2, expert_ids=(2, 5)),
    Step(StepKind.COPY_EXPERTS, 2, source_id=1, expert_ids=(5,), num_bytes=4),
)
AFTER = (
    Step(StepKind.UNMAP_EXPERTS, 0, expert_ids=(2,)),
    Step(StepKind.GROW_KV, 0, num_tokens=150),
    Step(StepKind.GROW_KV, 1, num_tokens=150),
)
UP = ScaleRequest(dp_size=3)
PLAN = Plan(OLD, NEW, BEFORE, AFTER, peak_pages={}, final_pages={}, kv_moves={})

SHAPE = MemoryShape(
    page_bytes=4096,
    num_experts=6,
    max_adapters=0,
    slots_per_adapter=0,
    regions=(
        Region("trunk", RegionKind.TRUNK, 1, 10000),
        Region("experts.0", RegionKind.EXPERT, 6, 4096, layer_id=0),
        Region("kv.0", RegionKind.KV, 100000, 64),
    ),
)

WAIT_S = 10.0
Call = tuple[Any, ...]
# Whether the call at this position, of this name, fails; the error, or None.
Fault = Callable[[int, str], Exception | None]


def never(_position: int, _name: str) -> None:
    """No call fails."""


def once(position: int) -> Fault:
    """The call at `position` fails."""
    return lambda at, name: StepFailedError(f"{name} failed") if at == position else None


def always(name: str, first: int = 0) -> Fault:
    """All calls of `name` fail, from position `first` on."""
    return lambda at, n: StepFailedError(f"{n} failed") if n == name and at >= first else None


class World:
    """The three ports in one. A call that fails has changed nothing."""

    def __init__(self, placement: Placement = OLD, fault: Fault = never) -> None:
        self.fault = fault
        self.calls: list[Call] = []
        self.executed: list[Step] = []
        self.kv = {d: placement.kv_tokens_of(d) for d in placement.device_ids}
        first = Instance("i0", placement.device_ids, InstanceState.ACTIVE, placement)
        self.instances = {"i0": first}
        self.table: tuple[str, Placement] = ("i0", placement)
        self.is_held = False
        self.handed_over = HandedOver({}, {})  # as the last switch got it
        self.may_hand_over = {InstanceState.FROZEN}
        self.lost_devices: set[int] = set()
        self.gate: Callable[[str], None] = lambda name: None
        self.has_changed_adapters = False
        self.are_adapters_deferred = False
        self._numbers = itertools.count(1)

    def call(self, name: str, *args: Any) -> None:
        """Record a call; fail it if told so."""
        position = len(self.calls)
        self.calls.append((name, *args))
        self.gate(name)
        error = self.fault(position, name)
        if error is not None:
            raise error

    def named(self, *names: str) -> list[Call]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]

    def state_of(self, instance: str) -> InstanceState:
        return self.instances[instance].state

    def active(self) -> list[str]:
        return [n for n, each in self.instances.items() if each.state is InstanceState.ACTIVE]

    def model(self) -> dict[str, Any]:
        """All that a roll-back must bring back."""
        holding = {n: e.placement for n, e in self.instances.items() if e.placement}
        return {
            "executed": list(self.executed),
            "kv": dict(self.kv),
            "active": self.active(),
            "holding": holding,
            "table": self.table,
            "held": self.is_held,
        }

    def _move(self, name: str, to: InstanceState, placement: Placement | None = None) -> None:
        self.instances[name] = self.instances[name].with_state(to, 0.0, placement)

    # Memory
    def shape(self) -> MemoryShape:
        return SHAPE

    def adapters(self) -> tuple[AdapterEntry, ...]:
        return ()

    def headroom_pages(self) -> int:
        return 0

    def node_name(self, device_id: int) -> str:
        return ""

    def budget_pages(self, device_id: int) -> int:
        return 60

    def require(self, device_ids: Iterable[int]) -> None:
        if self.lost_devices & set(device_ids):
            raise MemoryLostError(f"devices {self.lost_devices} are lost")

    def lost(self, device_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.lost_devices & set(device_ids)))

    def forget(self, device_ids: Iterable[int]) -> None:
        self.call("forget", *device_ids)

    def held(self, device_ids: Iterable[int]) -> dict[int, frozenset[tuple[int, int]]]:
        return dict.fromkeys(device_ids, frozenset())

    def drop_changed_adapters(self, expert_ids: Iterable[int]) -> bool:
        return False

    def keep_only(self, placement: Placement) -> None:
        self.call("keep_only", placement)

    def drop_partial_adapters(self, placement: Placement, *, keeps_copies: bool = False) -> None:
        self.call("drop_partial_adapters", placement)

    def execute(self, step: Step) -> int:
        self.call("execute", step)
        if step in self.executed:
            return 0
        self.executed.append(step)
        return self.copied_of(step)

    @staticmethod
    def copied_of(step: Step) -> int:
        """Not what the plan says, so that a record of the plan's own figure is seen."""
        return 3 * step.num_bytes

    def undo(self, step: Step) -> None:
        self.call("undo", step)
        if step in self.executed:
            self.executed.remove(step)

    def commit(self) -> None:
        """Nothing is undone by the same step in a later operation here."""

    # Instances
    def drain_messages(self, timeout_s: float) -> None:
        self.call("drain_messages")

    def serving(self) -> tuple[str, Placement]:
        self.call("serving")
        return self.table

    def prepare(self, placement: Placement, reads: Sequence[Step] = ()) -> str:
        self.call("prepare", placement, *reads)
        name = f"i{next(self._numbers)}"
        self.instances[name] = Instance(name, placement.device_ids)
        for state in (InstanceState.PARKED, InstanceState.ATTACHED, InstanceState.WARM):
            self._move(name, state, placement)
        return name

    def num_read(self, instance: str, device_id: int) -> int:
        """As `copied_of`: no plan says this."""
        return 7 + device_id

    def cancel(self, instance: str) -> None:
        self.call("cancel", instance)
        self._move(instance, InstanceState.PARKED)

    def freeze(self, instance: str) -> FrozenInstance:
        self.call("freeze", instance)
        self._move(instance, InstanceState.FROZEN)
        device_ids = self.instances[instance].device_ids
        return FrozenInstance(instance, device_ids, (m.Frozen((), ()),) * len(device_ids))

    def resume(self, instance: str) -> None:
        self.call("resume", instance)
        self._move(instance, InstanceState.ACTIVE)

    def drain(self, instance: str, timeout_s: float) -> None:
        self.call("drain", instance, timeout_s)
        self._move(instance, InstanceState.DRAINING)

    def activate(
        self, instance: str, frozen: FrozenInstance, kv_moves: Mapping[int, int]
    ) -> HandedOver:
        self.call("activate", instance, frozen.instance_id, dict(kv_moves))
        assert self.state_of(frozen.instance_id) in self.may_hand_over
        self._move(instance, InstanceState.ACTIVE)
        placement = self.instances[instance].placement
        self.kv = {d: placement.kv_tokens_of(d) for d in placement.device_ids}
        return HandedOver({f"of {frozen.instance_id}": 0}, {})

    def start_serving(self, instance: str) -> None:
        self.call("start_serving", instance)

    def retire(self, instance: str) -> None:
        self.call("retire", instance)
        if self.state_of(instance) is not InstanceState.PARKED:
            self._move(instance, InstanceState.PARKED)

    def resize_kv(self, device_id: int, num_tokens: int) -> None:
        self.call("resize_kv", device_id, num_tokens)
        assert device_id in self.kv
        self.kv[device_id] = num_tokens
        name, placement = self.table
        tokens = tuple(self.kv[d] for d in placement.device_ids)
        self.table = (name, replace(placement, kv_tokens=tokens))

    # Front
    def defer_adapter_changes(self, timeout_s: float) -> bool:
        self.are_adapters_deferred = True
        return self.has_changed_adapters

    def scaling(self, is_running: bool) -> None:
        self.are_adapters_deferred = is_running

    def hold(self) -> None:
        self.call("hold")
        self.is_held = True

    def switch(self, instance: str, placement: Placement, handover: HandedOver) -> None:
        self.call("switch", instance, placement)
        self.handed_over = handover
        assert self.state_of(instance) is InstanceState.ACTIVE
        self.table = (instance, placement)

    def release(self) -> None:
        self.call("release")
        self.is_held = False


class Ticks:
    """A clock that moves a second each time it is read, and sleeps in no time."""

    def __init__(self) -> None:
        self._seconds = itertools.count(1)
        self.slept: list[float] = []

    def clock(self) -> Clock:
        return Clock(
            now=lambda: 1000.0 + next(self._seconds),
            monotonic=lambda: float(next(self._seconds)),
            sleep=self.slept.append,
        )


def make_coordinator(
    world: World,
    plan: Callable[[ScaleRequest, Placement], Plan] = lambda request, old: PLAN,
    journal: Journal | None = None,
    ticks: Ticks | None = None,
    carry_out: CarryOut = scale,
) -> Coordinator:
    """A coordinator over a world, with a plan that is always the same unless told otherwise."""
    numbers = itertools.count(1)
    return Coordinator(
        world,
        world,
        world,
        plan,
        lambda made: {"copied_bytes": made.copied_bytes},
        journal,
        retry_policy=RetryPolicy(attempts=3, first_pause_s=0.5, drain_timeout_s=7.0),
        clock=(ticks or Ticks()).clock(),
        new_id=lambda: f"op{next(numbers)}",
        carry_out=carry_out,
    )


def finished(coordinator: Coordinator, request: ScaleRequest | Operation = UP) -> Operation:
    """The end of an operation, which is submitted first if it is a request."""
    begun = coordinator.submit(request) if isinstance(request, ScaleRequest) else request
    ended = coordinator.wait(begun.operation_id, WAIT_S)
    assert ended.finished
    return ended


def recovered(coordinator: Coordinator) -> Operation:
    """The recovery that has succeeded."""
    operation = coordinator.recover()
    assert operation.state is OperationState.SUCCEEDED
    return operation


class Paused:
    """A coordinator whose first `prepare` waits until told to go on."""

    def __init__(self) -> None:
        self.world = World()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.world.gate = self._gate
        self.coordinator = make_coordinator(self.world)

    def _gate(self, name: str) -> None:
        if name == "prepare" and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
