"""Plans of the strategies that ElasticMoE is compared with: new memory instead of moved memory.

    request, placement --> [FreshPlanner] --> extravagant, colocated: map new, switch, remove old
                                              cold restart: remove old, map new
    elastic's own plan --> [without_copies] --> the same, its copies left out
    copy steps --> [StagedMemory] --> source worker --> staging worker --> the device's worker

No step reads weights from disk: the new instance does, while it is prepared (from_disk.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sgl_elastic.baselines.strategies import ScaleStrategy, check_strategy
from sgl_elastic.coordinator.coordinator import MakePlan
from sgl_elastic.coordinator.ports import Memory
from sgl_elastic.errors import BadScaleError, DoesNotFitError
from sgl_elastic.memory.control import Hmm
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.plan.request import resolve
from sgl_elastic.types import (
    Placement,
    Plan,
    ScaleRequest,
    Step,
    StepKind,
)

# A copy -> what puts pages behind the same slots.
_MAPS = {StepKind.COPY_TRUNK: StepKind.MAP_TRUNK, StepKind.COPY_EXPERTS: StepKind.MAP_EXPERTS}

# (request, placement that serves, number of devices) -> ids of the new instance's devices.
Choose = Callable[[ScaleRequest, Placement, int], tuple[int, ...]]


def without_copies(make_plan: MakePlan) -> MakePlan:
    """The elastic plan without peer copies: what would be copied is read from disk instead."""

    def make(request: ScaleRequest, old: Placement) -> Plan:
        made = make_plan(request, old)
        return replace(made, before=tuple(s for s in made.before if s.kind not in _MAPS))

    return make


@dataclass(frozen=True)
class FreshPlanner:
    """Plans for an instance with memory of its own; the old one's goes back after the switch.

    With `removes_first` it goes back before, so all steps come after the point of no return.
    """

    memory: Memory
    max_devices: int
    kv_limit: int | None
    strategy: ScaleStrategy
    choose: Choose
    removes_first: bool = False

    def make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        """Raises BadScaleError, DoesNotFitError."""
        check_strategy(self.strategy, old.dp_size, request.dp_size, self.max_devices)
        if request.leave:
            raise BadScaleError(f"leave: by {self.strategy} all devices are left; name none")
        device_ids = self.choose(request, old, self.max_devices)
        if request.dp_size == old.dp_size and set(device_ids) == set(old.device_ids):
            return self._plan(old, old, (), ())
        budgets = {device: self.memory.budget_pages(device) for device in device_ids}
        shape, adapters = self.memory.shape(), self.memory.adapters()
        new = place(shape, device_ids, None, budgets, adapters, self.kv_limit)
        gone = [Step(StepKind.REMOVE_DEVICE, device) for device in old.device_ids]
        mapped = list(map_steps(new))
        if self.removes_first:
            return self._plan(old, new, (), [*gone, *mapped])
        return self._plan(old, new, mapped, gone)

    def _plan(
        self, old: Placement, new: Placement, before: Sequence[Step], after: Sequence[Step]
    ) -> Plan:
        shape, adapters = self.memory.shape(), self.memory.adapters()
        peak, final = peak_and_final_pages(shape, adapters, old, [*before, *after])
        for device, num_pages in peak.items():
            budget = self.memory.budget_pages(device)
            if num_pages > budget:
                raise DoesNotFitError(
                    f"device {device} would need {num_pages} pages and has {budget}: "
                    "give devices more by --device-memory"
                )
        kv_moves = successors(old.device_ids, new.device_ids)
        return Plan(old, new, tuple(before), tuple(after), peak, final, kv_moves)


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


class StagedMemory:
    """`Memory` without an IPC-safe allocator: what a device gets lands in a staging buffer first.

    The paper's ablation of its IpcSafeAllocator: tensors from an ordinary allocator cannot be
    opened by another process, so what is exchanged is copied to memory that can, and from there to
    its place. The worker of device d + `num_devices` stages for device d: it holds nothing between
    copies, and is counted by `resident` figures, but not by plans, as it comes on top of
    --device-memory.
    """

    def __init__(self, hmm: Hmm, num_devices: int) -> None:
        self._hmm = hmm
        self._num_devices = num_devices
        self.shape, self.adapters, self.budget_pages = hmm.shape, hmm.adapters, hmm.budget_pages
        self.require, self.commit = hmm.require, hmm.commit
        self.drop_partial_adapters = hmm.drop_partial_adapters
        self.lost, self.forget = hmm.lost, hmm.forget
        self.held, self.keep_only = hmm.held, hmm.keep_only
        self.drop_changed_adapters = hmm.drop_changed_adapters

    def add_staging(self) -> None:
        """Start the staging workers, so that no scale waits for them."""
        for device_id in range(self._num_devices):
            self._hmm.add_device(device_id + self._num_devices)

    def execute(self, step: Step) -> int:
        if step.kind not in _MAPS:
            return self._hmm.execute(step)
        staging_id = step.device_id + self._num_devices
        staged = replace(step, device_id=staging_id)
        mapped = Step(_MAPS[step.kind], staging_id, expert_ids=step.expert_ids)
        self._hmm.add_device(staging_id)  # it may have died
        try:
            self._hmm.execute(mapped)
            to_staging = self._hmm.execute(staged)
            return to_staging + self._hmm.execute(replace(step, source_id=staging_id))
        finally:
            self._hmm.undo(staged)
            self._hmm.undo(mapped)

    def undo(self, step: Step) -> None:
        is_copy = step.kind in _MAPS
        source_id = step.device_id + self._num_devices if is_copy else step.source_id
        self._hmm.undo(replace(step, source_id=source_id))
