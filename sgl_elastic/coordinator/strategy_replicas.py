"""Horizontal scaling: a second, whole replica beside the first, and requests for both.

    scale up:   memory, weights from disk --> replica runs --> [spread]: new requests go to either
    scale down: [narrow]: new ones go to the first --> wait for the second's --> it ends

The replicas look like one instance to the front: ranks 0 to N - 1 are the first's, N to 2 N - 1 the
second's. They share nothing. A replica that dies is not replaced; this is a baseline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from sgl_elastic.coordinator.coordinator import Coordinator, Remainder, Task
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Progress
from sgl_elastic.coordinator.strategies import ScaleStrategy, check_strategy
from sgl_elastic.coordinator.strategy_plans import map_steps
from sgl_elastic.errors import BadScaleError
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.plan.replicas import both, parts, replica_on
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
    """replica_board.py's ReplicaSwitchboard."""

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
            self._remainder = Remainder(progress, deque(self._shrink_tasks(progress, plan)))
            self._go_on(self._remainder)

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
        self._remainder = Remainder(progress, deque(tasks))
        self._go_on(self._remainder)

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
