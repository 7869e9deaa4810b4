"""The steps from one placement to another: nothing that the old instance needs is touched.

    old, new placement, budgets --> [plan] --> Plan(before, after) --> check.py, coordinator

Until the switch both instances run over the same pages, so a device that stays holds the experts
of both. Where that leaves less room than its KV takes, KV shrinks first and grows back last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sgl_elastic.errors import DoesNotFitError, PlanError
from sgl_elastic.plan.pages import device_pages, expert_bytes, max_kv_tokens, trunk_bytes
from sgl_elastic.plan.placement import MIN_KV_TOKENS
from sgl_elastic.plan.replay import peak_and_final_pages
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Plan, Step, StepKind

NOBODY = -1  # in place of a device that something could be copied from


def plan(
    old: Placement,
    new: Placement,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    budget_pages: Mapping[int, int],
    *,
    min_kv_tokens: int = MIN_KV_TOKENS,
) -> Plan:
    """What a scale from `old` to `new` will do; `new.kv_tokens` are the final capacities.

    Equal placements give a plan without steps. An expert whose home in `old` is none of its devices
    is nowhere and is read from disk, as the trunk is where `old` has no device. Raises
    DoesNotFitError when a device cannot hold the experts of both instances beside `min_kv_tokens`
    of KV (or beside all the KV that old and new have, if that is less), or cannot hold what `new`
    says; PlanError for a missing budget.
    """
    _check_budgets(old, new, budget_pages)
    at_switch = transition_kv(old, new, shape, adapters, budget_pages, min_kv_tokens=min_kv_tokens)
    before = (
        *_joining_steps(old, new, shape, adapters),
        *_staying_steps(old, new, shape, adapters, at_switch),
    )
    after = tuple(_steps_after(old, new, at_switch))
    peak, final = peak_and_final_pages(shape, adapters, old, [*before, *after])
    _check_peaks(shape, peak, budget_pages)
    moves = _kv_moves(old, new, at_switch)
    return Plan(old, new, before, after, peak, final, moves)


def transition_kv(
    old: Placement,
    new: Placement,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    budget_pages: Mapping[int, int],
    *,
    min_kv_tokens: int = MIN_KV_TOKENS,
) -> Mapping[int, int]:
    """Device of `new` -> KV tokens that its rank starts with; `new.kv_tokens` come afterwards.

    A device that stays keeps at most what it has, and never has more than in the end. Raises
    DoesNotFitError as `plan` does.
    """
    capacities = {}
    for device in new.device_ids:
        final = new.kv_tokens_of(device)
        if device not in old.device_ids:
            capacities[device] = final
            continue
        wanted = min(old.kv_tokens_of(device), final)
        both = {*old.experts_of(device), *new.experts_of(device)}
        fitting = max_kv_tokens(shape, budget_pages[device], both, adapters)
        floor = min(min_kv_tokens, wanted)
        if fitting < floor:
            needed = device_pages(shape, both, adapters, floor)
            raise _transition_does_not_fit(shape, device, needed, budget_pages[device], floor)
        capacities[device] = min(wanted, fitting)
    return capacities


def kv_at_switch(plan: Plan) -> Mapping[int, int]:
    """`transition_kv` of a plan that is made: read off its steps."""
    kv = {
        device: plan.old.kv_tokens_of(device)
        for device in plan.new.device_ids
        if device in plan.old.device_ids
    }
    sized = {StepKind.SHRINK_KV, StepKind.TRIM_KV, StepKind.MAP_KV}
    return kv | {step.device_id: step.num_tokens for step in plan.before if step.kind in sized}


def is_empty(plan: Plan) -> bool:
    """Whether the wanted configuration is the present one."""
    same = (plan.new.device_ids, plan.new.homes) == (plan.old.device_ids, plan.old.homes)
    return same and not plan.before and not plan.after


def placement_at_switch(plan: Plan) -> Placement:
    """The new placement with the KV capacity that each device has when the new instance starts.

    A device that stays has what the old instance left it; it grows after the switch.
    """
    tokens = kv_at_switch(plan)
    return replace(plan.new, kv_tokens=tuple(tokens[each] for each in plan.new.device_ids))


def _joining_steps(
    old: Placement, new: Placement, shape: MemoryShape, adapters: Sequence[AdapterEntry]
) -> Iterator[Step]:
    """All that devices which join need, device by device."""
    trunk_sources = _trunk_sources(old, new, shape, adapters)
    for device, source in trunk_sources.items():
        yield Step(StepKind.ADD_DEVICE, device)
        yield Step(StepKind.MAP_TRUNK, device)
        incoming = new.experts_of(device)
        if incoming:
            yield Step(StepKind.MAP_EXPERTS, device, expert_ids=incoming)
        yield Step(StepKind.MAP_KV, device, num_tokens=new.kv_tokens_of(device))
        num_bytes = trunk_bytes(shape)
        kind = StepKind.READ_TRUNK if source == NOBODY else StepKind.COPY_TRUNK
        yield Step(kind, device, source_id=source, num_bytes=num_bytes)
        yield from _incoming_experts(old, shape, adapters, device, incoming)


def _staying_steps(
    old: Placement,
    new: Placement,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    at_switch: Mapping[int, int],
) -> Iterator[Step]:
    """What devices of both placements need before the switch: room, then the experts that come."""
    for device in _staying(old, new):
        if at_switch[device] < old.kv_tokens_of(device):
            yield Step(StepKind.SHRINK_KV, device, num_tokens=at_switch[device])
        incoming = _without(new.experts_of(device), old.experts_of(device))
        if incoming:
            yield Step(StepKind.MAP_EXPERTS, device, expert_ids=incoming)
            yield from _incoming_experts(old, shape, adapters, device, incoming)


def _steps_after(old: Placement, new: Placement, at_switch: Mapping[int, int]) -> Iterator[Step]:
    """Memory that only the old instance used goes back; what is freed becomes KV."""
    for device in _without(old.device_ids, new.device_ids):
        yield Step(StepKind.REMOVE_DEVICE, device)
    for device in _staying(old, new):
        left = _without(old.experts_of(device), new.experts_of(device))
        if left:
            yield Step(StepKind.UNMAP_EXPERTS, device, expert_ids=left)
        if at_switch[device] < new.kv_tokens_of(device):
            yield Step(StepKind.GROW_KV, device, num_tokens=new.kv_tokens_of(device))


def _incoming_experts(
    old: Placement,
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    device: int,
    incoming: Sequence[int],
) -> Iterator[Step]:
    """One copy for each device that holds some of them now; those that nobody has are read."""
    for source in old.device_ids:
        ids = tuple(expert for expert in incoming if old.homes[expert] == source)
        if ids:
            num_bytes = expert_bytes(shape, ids, adapters)
            yield Step(StepKind.COPY_EXPERTS, device, source, ids, num_bytes=num_bytes)
    homeless = tuple(expert for expert in incoming if old.homes[expert] not in old.device_ids)
    if homeless:
        num_bytes = expert_bytes(shape, homeless, adapters)
        yield Step(StepKind.READ_EXPERTS, device, expert_ids=homeless, num_bytes=num_bytes)


def _trunk_sources(
    old: Placement, new: Placement, shape: MemoryShape, adapters: Sequence[AdapterEntry]
) -> dict[int, int]:
    """Joining device -> who sends it the trunk: each time the one that sends least so far.

    NOBODY where no device is left that has it.
    """
    if not old.device_ids:
        return dict.fromkeys(new.device_ids, NOBODY)
    sent = dict.fromkeys(old.device_ids, 0)
    for source in old.device_ids:
        movers = [e for e in old.experts_of(source) if new.homes[e] != source]
        sent[source] = expert_bytes(shape, movers, adapters)
    sources = {}
    for device in _without(new.device_ids, old.device_ids):
        sources[device] = min(sent, key=lambda source: sent[source])
        sent[sources[device]] += trunk_bytes(shape)
    return sources


def _kv_moves(old: Placement, new: Placement, at_switch: Mapping[int, int]) -> dict[int, int]:
    """Leaving device -> who takes its requests' KV: the largest first, to where most is free.

    How full ranks are at the switch is not known here; they count as full.
    """
    free = {device: kv - old.kv_tokens_of(device) for device, kv in at_switch.items()}
    leaving = _without(old.device_ids, new.device_ids)
    moves = {}
    for device in sorted(leaving, key=old.kv_tokens_of, reverse=True):
        moves[device] = max(free, key=lambda taker: free[taker])
        free[moves[device]] -= old.kv_tokens_of(device)
    return moves


def _staying(old: Placement, new: Placement) -> tuple[int, ...]:
    return tuple(device for device in new.device_ids if device in old.device_ids)


def _without(ids: Iterable[int], others: Collection[int]) -> tuple[int, ...]:
    excluded = frozenset(others)
    return tuple(each for each in ids if each not in excluded)


def _check_budgets(old: Placement, new: Placement, budget_pages: Mapping[int, int]) -> None:
    unknown = sorted({*old.device_ids, *new.device_ids} - set(budget_pages))
    if unknown:
        raise PlanError(f"devices {unknown} have no memory budget; give one for every device.")


def _check_peaks(
    shape: MemoryShape, peak: Mapping[int, int], budget_pages: Mapping[int, int]
) -> None:
    for device, num_pages in peak.items():
        if num_pages > budget_pages[device]:
            raise DoesNotFitError(
                f"device {device} would need {num_pages * shape.page_bytes:,} bytes at the peak "
                f"but has {budget_pages[device] * shape.page_bytes:,}; plan with less KV."
            )


def _transition_does_not_fit(
    shape: MemoryShape, device: int, needed_pages: int, budget_pages: int, min_kv_tokens: int
) -> DoesNotFitError:
    return DoesNotFitError(
        f"device {device} would need {needed_pages * shape.page_bytes:,} bytes during the switch, "
        f"for the experts that leave and those that come, the trunk and {min_kv_tokens} tokens of "
        f"KV, but has {budget_pages * shape.page_bytes:,}. Scale in smaller steps, or unload "
        "adapters first."
    )
