"""Plans of the strategies that ElasticMoE is compared with: new memory instead of moved memory.

    request, placement --> [FreshPlanner] --> extravagant, colocated: map new, switch, remove old
                           [CutOverPlanner] --> cold restart: remove old, map new
                           [UncopiedPlanner] --> elastic's own plan, its copies left out

No step reads weights from disk: the new instance does, while it is prepared (from_disk.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sgl_elastic.baselines.strategies import ScaleStrategy, check_strategy
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.ports import Memory
from sgl_elastic.errors import BadScaleError, DoesNotFitError
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.plan.request import resolve
from sgl_elastic.types import Placement, Plan, ScaleRequest, Step, StepKind

_COPIES = frozenset({StepKind.COPY_TRUNK, StepKind.COPY_EXPERTS})

# (request, placement that serves, number of devices) -> ids of the new instance's devices.
Choose = Callable[[ScaleRequest, Placement, int], tuple[int, ...]]


class UncopiedPlanner(Planner):
    """The elastic plan without peer copies: what would be copied is read from disk instead."""

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        made = super().make_plan(request, old)
        before = tuple(step for step in made.before if step.kind not in _COPIES)
        return replace(made, before=before)


class FreshPlanner(Planner):
    """Plans for an instance with memory of its own; the old one's goes back after the switch."""

    def __init__(
        self,
        memory: Memory,
        max_devices: int,
        kv_limit: int | None,
        strategy: ScaleStrategy,
        choose: Choose,
    ) -> None:
        super().__init__(memory, max_devices, kv_limit)
        self._memory_of_all = memory
        self._num_devices = max_devices
        self._limit = kv_limit
        self._strategy = strategy
        self._choose = choose

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        """Raises BadScaleError, DoesNotFitError."""
        check_strategy(self._strategy, old.dp_size, request.dp_size, self._num_devices)
        if request.leave:
            raise BadScaleError(f"leave: by {self._strategy} all devices are left; name none")
        device_ids = self._choose(request, old, self._num_devices)
        if request.dp_size == old.dp_size and set(device_ids) == set(old.device_ids):
            return self._plan(old, old, (), ())
        memory = self._memory_of_all
        budgets = {device: memory.budget_pages(device) for device in device_ids}
        shape, adapters = memory.shape(), memory.adapters()
        new = place(shape, device_ids, None, budgets, adapters, self._limit)
        gone = [Step(StepKind.REMOVE_DEVICE, device) for device in old.device_ids]
        return self._ordered(old, new, gone, list(map_steps(new)))

    def _ordered(
        self, old: Placement, new: Placement, gone: Sequence[Step], mapped: Sequence[Step]
    ) -> Plan:
        return self._plan(old, new, mapped, gone)

    def _plan(
        self, old: Placement, new: Placement, before: Sequence[Step], after: Sequence[Step]
    ) -> Plan:
        shape, adapters = self._memory_of_all.shape(), self._memory_of_all.adapters()
        peak, final = peak_and_final_pages(shape, adapters, old, [*before, *after])
        self._check_peaks(peak)
        kv_moves = successors(old.device_ids, new.device_ids)
        return Plan(old, new, tuple(before), tuple(after), peak, final, kv_moves)

    def _check_peaks(self, peak: Mapping[int, int]) -> None:
        for device, num_pages in peak.items():
            budget = self._memory_of_all.budget_pages(device)
            if num_pages > budget:
                raise DoesNotFitError(
                    f"device {device} would need {num_pages} pages and has {budget}: "
                    "give devices more by --device-memory"
                )


class CutOverPlanner(FreshPlanner):
    """The same with the old memory gone first, so all steps come after the point of no return."""

    def _ordered(
        self, old: Placement, new: Placement, gone: Sequence[Step], mapped: Sequence[Step]
    ) -> Plan:
        return self._plan(old, new, (), [*gone, *mapped])


def map_steps(placement: Placement) -> Iterator[Step]:
    """All that the devices of a placement need, from nothing."""
    for device in placement.device_ids:
        yield Step(StepKind.ADD_DEVICE, device)
        yield Step(StepKind.MAP_TRUNK, device)
        yield Step(StepKind.MAP_EXPERTS, device, expert_ids=placement.experts_of(device))
        yield Step(StepKind.MAP_KV, device, num_tokens=placement.kv_tokens_of(device))


def successors(old: Sequence[int], new: Sequence[int]) -> dict[int, int]:
    """Old device that leaves -> the new device whose rank goes on with its requests, in turn."""
    return {device: new[i % len(new)] for i, device in enumerate(old) if device not in new}


def same_devices(request: ScaleRequest, old: Placement, max_devices: int) -> tuple[int, ...]:
    """Cold restart: the devices that elastic scaling would choose."""
    return resolve(request, old, max_devices)


def other_devices(request: ScaleRequest, old: Placement, max_devices: int) -> tuple[int, ...]:
    """Extravagant: the lowest ids that the old instance does not use, or those that are named.

    Raises BadScaleError.
    """
    if request.dp_size == old.dp_size and not request.device_ids:
        return old.device_ids
    free = [device for device in range(max_devices) if device not in old.device_ids]
    wanted = request.device_ids or tuple(free[: request.dp_size])
    if len(wanted) != request.dp_size or not set(wanted) <= set(free):
        raise BadScaleError(
            f"extravagant scaling to {request.dp_size} devices needs as many that are free, of "
            f"{free}; asked for {list(request.device_ids)}"
        )
    return tuple(sorted(wanted))


def other_halves(request: ScaleRequest, old: Placement, max_devices: int) -> tuple[int, ...]:
    """Colocated: the other half of each device, whose memory worker has id device + max_devices.

    `request.device_ids` are ids of devices, 0 to `max_devices` - 1. Raises BadScaleError.
    """
    if request.dp_size == old.dp_size and not request.device_ids:
        return old.device_ids
    physical = replace(old, device_ids=tuple(device % max_devices for device in old.device_ids))
    devices = resolve(request, physical, max_devices)
    offset = 0 if min(old.device_ids) >= max_devices else max_devices
    return tuple(sorted(device + offset for device in devices))
