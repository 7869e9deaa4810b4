"""Horizontal scaling: a second, whole replica beside the first, and requests for both.

    scale up:   memory, weights from disk --> replica runs --> [spread]: new requests go to either
    scale down: [narrow]: new ones go to the first --> wait for the second's --> it ends

The replicas look like one instance to the front: ranks 0 to N - 1 are the first's, N to 2 N - 1 the
second's. They share nothing. A replica that dies is not replaced; this is a baseline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from sgl_elastic.baselines.from_disk import DiskInstances
from sgl_elastic.baselines.plans import map_steps
from sgl_elastic.baselines.strategies import ScaleStrategy, check_strategy
from sgl_elastic.coordinator.coordinator import Coordinator, PostSwitchTasks, Task
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Progress
from sgl_elastic.errors import BadScaleError, EngineFailedError
from sgl_elastic.front.router import RequestRouter
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.types import Placement, Plan, ScaleRequest, Step, StepKind

_ATTEMPT_S = 60.0  # to wait for the second replica's requests, each of the coordinator's attempts


class ReplicaPlanner(Planner):
    """Twice as many devices, or half of them again."""

    def __init__(self, memory: Memory, max_devices: int, kv_limit: int | None = None) -> None:
        super().__init__(memory, max_devices, kv_limit)
        self._memory_of_all = memory
        self._num_devices = max_devices

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        """Raises BadScaleError."""
        first, second = parts(old)
        if request.dp_size == old.dp_size and not request.device_ids:
            return Plan(old, old, (), (), {}, {})
        check_strategy(ScaleStrategy.HORIZONTAL, old.dp_size, request.dp_size, self._num_devices)
        if request.device_ids or request.leave:
            raise BadScaleError("horizontal scaling chooses its devices itself: name only dp_size")
        if request.dp_size < old.dp_size:
            return self._down(old, first, second)
        return self._up(old, second)

    def _up(self, old: Placement, second: Placement | None) -> Plan:
        if second is not None:
            raise BadScaleError("there are two replicas and can be no more: halve them first")
        free = [d for d in range(self._num_devices) if d not in old.device_ids]
        replica = replica_on(free[: old.dp_size], old)
        steps = tuple(map_steps(replica))
        peak, final = self._pages(old, steps)
        return Plan(old, both(old, replica), steps, (), peak, final)

    def _down(self, old: Placement, first: Placement, second: Placement | None) -> Plan:
        if second is None:
            raise BadScaleError(
                f"one replica of {old.dp_size} devices cannot be halved: it can only be doubled"
            )
        steps = tuple(Step(StepKind.REMOVE_DEVICE, device) for device in second.device_ids)
        peak, final = self._pages(second, steps)
        stays, _ = self._pages(first, ())
        return Plan(old, first, (), steps, {**stays, **peak}, {**stays, **final})

    def _pages(
        self, placement: Placement, steps: Sequence[Step]
    ) -> tuple[dict[int, int], dict[int, int]]:
        memory = self._memory_of_all
        return peak_and_final_pages(memory.shape(), memory.adapters(), placement, steps)


class Replicas(Instances, Protocol):
    """instance/replicated.py's ReplicatedInstances."""

    def join(self, instance: str) -> str:
        """A prepared replica runs beside the first; the name of the two together."""

    def first(self) -> str:
        """The name of the first by itself."""

    def end_second(self) -> None:
        """The second replica ends; harmless a second time."""


class ReplicaFront(Front, Protocol):
    """replica_board.py's ReplicaRequestRouter."""

    def spread(self, group: str, placement: Placement) -> None:
        """From now on requests go to both; those that run stay where they are."""

    def narrow(self, num_ranks: int, timeout_s: float) -> None:
        """New requests go to the first; returns when the second has none. EngineFailedError."""

    def unite(self, instance: str, placement: Placement) -> None:
        """The first serves alone."""


class ReplicaCoordinator(Coordinator):
    """A Coordinator that adds and takes away a replica; nothing is ever held."""

    def __init__(
        self, memory: Memory, instances: Replicas, front: ReplicaFront, *args: Any, **options: Any
    ) -> None:
        super().__init__(memory, instances, front, *args, **options)
        self._replicas = instances
        self._replica_front = front

    def scale(self, progress: Progress, plan: Plan) -> None:
        """Carry a plan out. Raises what stopped it; before the switch everything is undone."""
        if plan.before:
            self._grow(progress, plan)
        else:
            progress.switched()
            self._post_switch = PostSwitchTasks(progress, deque(self._shrink_tasks(progress, plan)))
            self._go_on(self._post_switch)

    def _grow(self, progress: Progress, plan: Plan) -> None:
        _, replica = parts(plan.new)
        if replica is None:
            raise BadScaleError(f"{plan.new.device_ids} are not two replicas")
        with ExitStack() as stack:
            undo = partial(self._undo_later, stack, progress)
            new = self._prepared(progress, plan, replica, undo)
            progress.enter("switch")
            group = self._replicas.join(new)
            stack.pop_all()
            progress.switched()
        spread = partial(self._replica_front.spread, group, plan.new)
        tasks = [
            Task("switch", spread),
            Task("switch", partial(self._note_serving, group, plan.new)),
        ]
        self._post_switch = PostSwitchTasks(progress, deque(tasks))
        self._go_on(self._post_switch)

    def _shrink_tasks(self, progress: Progress, plan: Plan) -> list[Task]:
        narrow = partial(self._replica_front.narrow, plan.new.dp_size, _ATTEMPT_S)
        first = self._replicas.first()
        steps = enumerate(plan.after)
        return [
            Task("drain", narrow),
            Task("switch", partial(self._replica_front.unite, first, plan.new)),
            Task("switch", partial(self._note_serving, first, plan.new)),
            Task("retire", self._replicas.end_second),
            *(Task("after", partial(self._do, progress, index, step)) for index, step in steps),
        ]


# The router of horizontal scaling: two instances of equal size serve at once.
#
#     dispatch --> [ReplicaRequestRouter] --> the first replica: ranks 0 to N - 1
#                                      '--> the second: ranks N to 2 N - 1
#
# A group of two is named `first+second`. What is no request goes to both.

_POLL_S = 0.01


class ReplicaRequestRouter(RequestRouter):
    """`ReplicaFront` of strategy_replicas.py."""

    def __init__(self, *args: Any, wake: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, wake=self._wake_all, **options)
        self._wake_one = wake
        self._num_open: int | None = None  # ranks that new requests may go to; None = all

    def spread(self, group: str, placement: Placement) -> None:
        """From now on requests go to both; those that run stay where they are."""
        self._regroup(group, placement)

    def narrow(self, num_ranks: int, timeout_s: float) -> None:
        """New requests go to the first `num_ranks`; returns when the others have none left.

        Raises EngineFailedError at the time-out; new requests then still go to the first.
        """
        with self._lock:
            self._num_open = num_ranks
        deadline = time.monotonic() + timeout_s
        while self._num_between(num_ranks, 2 * num_ranks):
            if time.monotonic() > deadline:
                raise EngineFailedError(f"the second replica still runs after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def unite(self, instance: str, placement: Placement) -> None:
        """The first serves alone; the second has no requests."""
        self._regroup(instance, placement)

    def _regroup(self, name: str, placement: Placement) -> None:
        with self._lock:
            former = self.routing.table
            if former.instance_id == name:
                return
            kept = {r: r for r in range(min(former.placement.dp_size, placement.dp_size))}
            self._book.rebase(kept, placement.dp_size, placement.kv_tokens)
            self._on_switch(placement)
            self.routing.swap(name, placement, self._clock())
            self._num_open = None

    def _num_between(self, first: int, end: int) -> int:
        with self._lock:
            return sum(first <= request.rank < end for request in self._requests.values())

    def _choose_rank(self, request: Any) -> int:
        rank = super()._choose_rank(request)
        return rank if self._num_open is None else rank % self._num_open

    def _send(self, instance: str, message: Any) -> None:
        members = instance.split("+")
        if len(members) > 1 and self._wire.is_request(message):
            self._send_to_one(members, message)
            return
        for member in members:
            super()._send(member, message)

    def _send_to_one(self, members: list[str], request: Any) -> None:
        size = self.routing.table.placement.dp_size // len(members)
        place, rank = divmod(request.routed_dp_rank, size)
        if self._num_between(place * size, (place + 1) * size) <= 1:  # this one: they may sleep
            self._wake_one(members[place])
        super()._send(members[place], self._wire.with_rank(request, rank))

    def _wake_all(self, instance: str) -> None:
        for member in instance.split("+"):
            self._wake_one(member)


# Two instances that serve at once, for horizontal scaling.
#
#     strategy_replicas.py --> [ReplicatedInstances] --> the first instance, and a second beside it
#
# Together they are named `first+second`. The second reads its weights from disk and shares nothing.


class ReplicatedInstances(DiskInstances):
    """`Replicas` of coordinator/strategy_replicas.py."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, shares_memory=False, **options)
        self._second = ""

    def serving(self) -> tuple[str, Placement]:
        name, placement = super().serving()
        second = self._running.get(self._second)
        if second is None or second.record.placement is None:
            return name, placement
        return f"{name}+{self._second}", both(placement, second.record.placement)

    def is_lost(self) -> bool:
        return False  # a baseline: what dies is not replaced

    def join(self, instance: str) -> str:
        """A prepared replica runs beside the first; the name of the two together."""
        running = self._running[instance]
        self._run(running)
        self._advance(running, InstanceState.ACTIVE)
        self._second = instance
        return self.serving()[0]

    def first(self) -> str:
        """The name of the first by itself."""
        return self._active

    def end_second(self) -> None:
        """The second replica ends; harmless a second time."""
        self.stop(self._second)
        self._second = ""


# Two replicas of a model as one placement, and back.
#
# first, second --> [both] --> Placement --> [parts] --> first, second


def both(first: Placement, second: Placement) -> Placement:
    """Two replicas as one placement. `homes` are the first's."""
    return Placement(
        (*first.device_ids, *second.device_ids), first.homes, (*first.kv_tokens, *second.kv_tokens)
    )


def parts(placement: Placement) -> tuple[Placement, Placement | None]:
    """The first replica, and the second where there is one.

    Homes say which: a placement of one replica has experts on all of its devices.
    """
    num_ranks = placement.dp_size // 2
    if any(home in placement.device_ids[num_ranks:] for home in placement.homes):
        return placement, None
    first = Placement(
        placement.device_ids[:num_ranks], placement.homes, placement.kv_tokens[:num_ranks]
    )
    return first, replica_on(placement.device_ids[num_ranks:], first)


def replica_on(device_ids: Sequence[int], first: Placement) -> Placement:
    """The same layout on as many other devices, rank by rank."""
    twins = dict(zip(first.device_ids, device_ids, strict=True))
    homes = tuple(twins[home] for home in first.homes)
    return Placement(tuple(device_ids), homes, first.kv_tokens)
