"""What a plan's steps do, played through on paper: the state of each device after each step.

    Placement --> [state_of] --> State --> [after_step, after_undo] --> State --> [pages_of]

The planner takes peaks from it, `check` what a step may do. Impossible steps raise PlanError.
An expert that comes in parts counts as loaded with the first of them: `check` looks at each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_elastic.errors import PlanError
from sgl_elastic.plan.pages import NO_KV, expert_pages, kv_pages, trunk_pages
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step, StepKind


@dataclass(frozen=True)
class DeviceState:
    """What one device has. Loaded: with its content, not only with pages."""

    mapped: frozenset[int] = frozenset()  # experts
    loaded: frozenset[int] = frozenset()  # of them
    trunk_mapped: bool = False
    trunk_loaded: bool = False
    kv_tokens: int = NO_KV


State = Mapping[int, DeviceState]  # devices that have a worker


def state_of(placement: Placement) -> State:
    """Every device of a placement with all it must have, and nothing else."""
    return {
        device: DeviceState(
            mapped=frozenset(placement.experts_of(device)),
            loaded=frozenset(placement.experts_of(device)),
            trunk_mapped=True,
            trunk_loaded=True,
            kv_tokens=placement.kv_tokens_of(device),
        )
        for device in placement.device_ids
    }


def pages_of(shape: MemoryShape, device: DeviceState, adapters: Sequence[AdapterEntry]) -> int:
    """Pages that a device in this state has."""
    trunk = trunk_pages(shape) if device.trunk_mapped else 0
    experts = expert_pages(shape, device.mapped, adapters)
    return trunk + experts + kv_pages(shape, device.kv_tokens)


def states(start: State, steps: Iterable[Step]) -> Iterator[tuple[Step, State]]:
    """Each step with the state after it."""
    state = start
    for step in steps:
        state = after_step(state, step)
        yield step, state


def last_state(start: State, steps: Iterable[Step]) -> State:
    """The state after all of the steps."""
    state = start
    for step in steps:
        state = after_step(state, step)
    return state


def peak_and_final_pages(
    shape: MemoryShape, adapters: Sequence[AdapterEntry], old: Placement, steps: Iterable[Step]
) -> tuple[dict[int, int], dict[int, int]]:
    """(device -> most pages at any moment, device -> pages at the end); 0 once it is removed."""
    start = state_of(old)
    now = {device: pages_of(shape, held, adapters) for device, held in start.items()}
    peak = dict(now)
    for step, state in states(start, steps):
        device = step.device_id
        now[device] = pages_of(shape, state[device], adapters) if device in state else 0
        peak[device] = max(peak.get(device, 0), now[device])
    return peak, now


def after_step(state: State, step: Step) -> State:
    """The state after a step. Raises PlanError when the step cannot or must not be done then."""
    device = state.get(step.device_id)
    if step.kind is StepKind.ADD_DEVICE:
        _require(device is None, step, "the device is there already")
        return {**state, step.device_id: DeviceState()}
    if device is None:
        raise PlanError(f"{step}: the device has no worker at that moment.")
    if step.kind is StepKind.REMOVE_DEVICE:
        return {each: held for each, held in state.items() if each != step.device_id}
    if step.kind in COPIES:
        _check_source(state, step)
    return {**state, step.device_id: _EFFECTS[step.kind](device, step)}


def after_undo(state: State, step: Step, kv_tokens: int) -> State:
    """The state after a step of `before` is taken back; `kv_tokens`: of the device before it."""
    if step.kind is StepKind.ADD_DEVICE:
        return {each: held for each, held in state.items() if each != step.device_id}
    device = state[step.device_id]
    ids = frozenset(step.expert_ids)
    undone = {
        StepKind.MAP_TRUNK: replace(device, trunk_mapped=False),
        StepKind.COPY_TRUNK: replace(device, trunk_loaded=False),
        StepKind.MAP_EXPERTS: replace(device, mapped=device.mapped - ids),
        StepKind.COPY_EXPERTS: replace(device, loaded=device.loaded - ids),
        StepKind.MAP_KV: replace(device, kv_tokens=NO_KV),
        StepKind.SHRINK_KV: replace(device, kv_tokens=kv_tokens),
        StepKind.TRIM_KV: replace(device, kv_tokens=kv_tokens),
        StepKind.READ_TRUNK: replace(device, trunk_loaded=False),
        StepKind.READ_EXPERTS: replace(device, loaded=device.loaded - ids),
    }
    _require(step.kind in undone, step, "it cannot be taken back")
    return {**state, step.device_id: undone[step.kind]}


COPIES = frozenset({StepKind.COPY_TRUNK, StepKind.COPY_EXPERTS})


def _require(condition: bool, step: Step, problem: str) -> None:
    if not condition:
        raise PlanError(f"{step}: {problem}.")


def _check_source(state: State, step: Step) -> None:
    """A copy's source must hold, at that moment, what is copied."""
    source = state.get(step.source_id)
    if source is None or step.source_id == step.device_id:
        raise PlanError(f"{step}: device {step.source_id} cannot be its source.")
    if step.kind is StepKind.COPY_TRUNK:
        _require(source.trunk_loaded, step, "the source has no trunk")
    missing = sorted(set(step.expert_ids) - source.loaded) if not step.parts else []
    _require(not missing, step, f"the source does not hold experts {missing}")


def _map_trunk(device: DeviceState, step: Step) -> DeviceState:
    _require(not device.trunk_mapped, step, "the trunk is mapped already")
    return replace(device, trunk_mapped=True)


def _copy_trunk(device: DeviceState, step: Step) -> DeviceState:
    _require(device.trunk_mapped, step, "the trunk is not mapped")
    _require(not device.trunk_loaded, step, "the trunk is in use")
    return replace(device, trunk_loaded=True)


def _map_experts(device: DeviceState, step: Step) -> DeviceState:
    ids = _distinct_ids(step)
    _require(not ids & device.mapped, step, "some of them are mapped already")
    return replace(device, mapped=device.mapped | ids)


def _copy_experts(device: DeviceState, step: Step) -> DeviceState:
    ids = _distinct_ids(step)
    _require(ids <= device.mapped, step, "some of them are not mapped")
    _require(not ids & device.loaded or bool(step.parts), step, "some of them are in use")
    return replace(device, loaded=device.loaded | ids)


def _unmap_experts(device: DeviceState, step: Step) -> DeviceState:
    ids = _distinct_ids(step)
    _require(ids <= device.mapped, step, "some of them are not mapped")
    return replace(device, mapped=device.mapped - ids, loaded=device.loaded - ids)


def _map_kv(device: DeviceState, step: Step) -> DeviceState:
    _require(device.kv_tokens == NO_KV, step, "KV is mapped already")
    return _with_kv(device, step)


def _shrink_kv(device: DeviceState, step: Step) -> DeviceState:
    _require(step.num_tokens < device.kv_tokens, step, f"the device has {device.kv_tokens} tokens")
    return _with_kv(device, step)


def _grow_kv(device: DeviceState, step: Step) -> DeviceState:
    _require(device.kv_tokens != NO_KV, step, "no KV is mapped")
    _require(step.num_tokens > device.kv_tokens, step, f"the device has {device.kv_tokens} tokens")
    return _with_kv(device, step)


def _with_kv(device: DeviceState, step: Step) -> DeviceState:
    _require(step.num_tokens >= 0, step, "a capacity cannot be negative")
    return replace(device, kv_tokens=step.num_tokens)


def _distinct_ids(step: Step) -> frozenset[int]:
    ids = frozenset(step.expert_ids)
    _require(bool(ids) and len(ids) == len(step.expert_ids), step, "experts: none, or some twice")
    return ids


_EFFECTS: Mapping[StepKind, Callable[[DeviceState, Step], DeviceState]] = {
    StepKind.MAP_TRUNK: _map_trunk,
    StepKind.COPY_TRUNK: _copy_trunk,
    StepKind.MAP_EXPERTS: _map_experts,
    StepKind.COPY_EXPERTS: _copy_experts,
    StepKind.UNMAP_EXPERTS: _unmap_experts,
    StepKind.MAP_KV: _map_kv,
    StepKind.SHRINK_KV: _shrink_kv,
    StepKind.TRIM_KV: _shrink_kv,
    StepKind.READ_TRUNK: _copy_trunk,
    StepKind.READ_EXPERTS: _copy_experts,
    StepKind.GROW_KV: _grow_kv,
}
