"""Whether a plan keeps its promises, found out by playing it through and not by trusting it.

    Plan --> [check] --> PlanError, or nothing

Run on every plan before its first step. A failure is a defect of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sgl_elastic.errors import PlanError
from sgl_elastic.plan.pages import expert_bytes, part_bytes, trunk_bytes
from sgl_elastic.plan.replay import (
    State,
    after_undo,
    last_state,
    peak_and_final_pages,
    state_of,
    states,
)
from sgl_elastic.types import (
    AdapterEntry,
    MemoryShape,
    Placement,
    Plan,
    RegionKind,
    Step,
    StepKind,
)

# What may be done only when the old instance is gone; everything else only while it serves.
KINDS_AFTER = frozenset({StepKind.UNMAP_EXPERTS, StepKind.GROW_KV, StepKind.REMOVE_DEVICE})


def check(
    plan: Plan,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    budget_pages: Mapping[int, int],
) -> None:
    """Raise PlanError unless all of this holds:

    - both placements give every expert one home among their devices, and every rank a capacity;
    - each step is possible when it comes, and each copy's source holds the content then; only
      what no device has is read from disk;
    - nothing that the old instance needs is unmapped or overwritten before the switch, and undoing
      `before` backwards leads to exactly the old state;
    - at the switch the new instance finds everything, in the end there is nothing else;
    - no device is over its budget at any moment; bytes, pages and KV moves are what they say.
    """
    _check_placement(plan.old, shape, plan.lost)
    _check_placement(plan.new, shape)
    _check_kinds(plan)
    _check_bytes(plan, shape, adapters)
    switch = last_state(state_of(plan.old), plan.before)
    _check_switch(plan, switch)
    _check_undo(plan)
    _check_end(plan, last_state(switch, plan.after))
    _check_pages(plan, shape, adapters, budget_pages)
    _check_reads(plan, shape)
    _check_kv_moves(plan)


def _check_placement(placement: Placement, shape: MemoryShape, lost: Sequence[int] = ()) -> None:
    """`lost`: devices that experts may be at home on although they are not there any more."""
    devices = placement.device_ids
    _require(
        bool(devices or lost) and len({*devices, *lost}) == len(devices) + len(lost),
        f"devices are {devices}, lost {lost}",
    )
    _require(
        len(placement.homes) == shape.num_experts and set(placement.homes) <= {*devices, *lost},
        f"homes {placement.homes} of {shape.num_experts} experts are not all on devices {devices}",
    )
    _require(
        len(placement.kv_tokens) == len(devices) and min(placement.kv_tokens, default=0) >= 0,
        f"KV tokens {placement.kv_tokens} do not go with devices {devices}",
    )


def _check_kinds(plan: Plan) -> None:
    for step in plan.before:
        _require(step.kind not in KINDS_AFTER, f"{step} must not come before the switch")
    for step in plan.after:
        _require(step.kind in KINDS_AFTER, f"{step} must not come after the switch")


def _check_bytes(plan: Plan, shape: MemoryShape, adapters: Sequence[AdapterEntry]) -> None:
    for step in (*plan.before, *plan.after):
        expected = 0
        if step.kind in (StepKind.COPY_TRUNK, StepKind.READ_TRUNK):
            expected = trunk_bytes(shape)
        elif step.parts:
            expected = part_bytes(shape, step.parts, adapters)
        elif step.kind in (StepKind.COPY_EXPERTS, StepKind.READ_EXPERTS):
            expected = expert_bytes(shape, step.expert_ids, adapters)
        _require(step.num_bytes == expected, f"{step} moves {expected} bytes")


def _check_reads(plan: Plan, shape: MemoryShape) -> None:
    """Disk is the last source, and what comes in parts comes once, from who has it, and whole."""
    layers = frozenset(region.layer_id for region in shape.of_kind(RegionKind.EXPERT))
    homes = {e: home for e, home in enumerate(plan.old.homes) if home in plan.old.device_ids}
    held = {device: set(parts) for device, parts in plan.copies.items()}
    for expert, home in homes.items():
        held.setdefault(home, set()).update((layer, expert) for layer in layers)
    somewhere = set().union(*held.values())
    came: dict[tuple[int, int], set[int]] = {}
    for step in plan.before:
        parts = _parts_of(step, layers)
        if step.kind is StepKind.READ_TRUNK:
            _require(not plan.old.device_ids, f"{step} reads what every device has")
        if step.kind is StepKind.READ_EXPERTS:
            needless = sorted(somewhere & parts)
            _require(not needless, f"{step} reads {needless}, which a device has")
        if step.kind is StepKind.COPY_EXPERTS:
            missing = sorted(parts - held.get(step.source_id, set()))
            _require(not missing, f"{step} copies {missing}, which its source does not have")
        for layer, expert in parts:
            known = came.setdefault((step.device_id, expert), set())
            _require(layer not in known, f"expert {expert} comes to {step.device_id} twice")
            known.add(layer)
    for (device, expert), known in came.items():
        had = {layer for layer in layers if (layer, expert) in held.get(device, ())}
        _require(had | known == layers, f"device {device} lacks layers of expert {expert}")


def _parts_of(step: Step, layers: Iterable[int]) -> set[tuple[int, int]]:
    """(layer id, expert id) that a step brings."""
    if step.kind not in (StepKind.COPY_EXPERTS, StepKind.READ_EXPERTS):
        return set()
    parts = step.parts or [(layer, step.expert_ids) for layer in layers]
    return {(layer, expert) for layer, ids in parts for expert in ids}


def _check_switch(plan: Plan, state: State) -> None:
    """The old instance still has everything but some KV; the new one finds everything."""
    for device, needed in state_of(plan.old).items():
        held = state[device]
        _require(
            needed.loaded <= held.loaded and held.trunk_loaded,
            f"device {device} has lost what the old instance needs",
        )
    for device, needed in state_of(plan.new).items():
        _require(device in state, f"device {device} is not there at the switch")
        held = state[device]
        _require(
            needed.loaded <= held.loaded and held.trunk_loaded,
            f"device {device} lacks the trunk or some of experts {sorted(needed.loaded)}",
        )
        _require(
            0 <= held.kv_tokens <= needed.kv_tokens,
            f"device {device} has {held.kv_tokens} KV tokens at the switch, then "
            f"{needed.kv_tokens}",
        )


def _check_undo(plan: Plan) -> None:
    """Taken back in reverse order, the steps before the switch leave no trace."""
    start = state_of(plan.old)
    before = [start, *(state for _, state in states(start, plan.before))]
    state = before[-1]
    for step, earlier in reversed(list(zip(plan.before, before, strict=False))):
        held = earlier.get(step.device_id)
        state = after_undo(state, step, held.kv_tokens if held else 0)
    _require(state == start, "undoing the steps before the switch does not lead back")


def _check_end(plan: Plan, state: State) -> None:
    wanted = state_of(plan.new)
    wrong = sorted(d for d in {*state, *wanted} if state.get(d) != wanted.get(d))
    _require(not wrong, f"devices {wrong} do not end up with what the new placement says")


def _check_pages(
    plan: Plan,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    budget_pages: Mapping[int, int],
) -> None:
    steps = (*plan.before, *plan.after)
    peak, final = peak_and_final_pages(shape, adapters, plan.old, steps)
    _require(plan.peak_pages == peak, f"peaks are {peak}, not {dict(plan.peak_pages)}")
    _require(plan.final_pages == final, f"final pages are {final}, not {dict(plan.final_pages)}")
    for device, num_pages in peak.items():
        budget = budget_pages.get(device, 0)
        _require(
            num_pages <= budget, f"device {device} has {num_pages} pages of {budget} at its peak"
        )


def _check_kv_moves(plan: Plan) -> None:
    leaving = {*plan.old.device_ids, *plan.lost} - set(plan.new.device_ids)
    _require(
        set(plan.kv_moves) == leaving and set(plan.kv_moves.values()) <= set(plan.new.device_ids),
        f"KV moves {dict(plan.kv_moves)} are not from {sorted(leaving)} to {plan.new.device_ids}",
    )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise PlanError(f"the plan is wrong: {problem}.")
