"""What a lost device costs: on which devices it goes on, and where each expert comes from. Pure.

    placement, Loss --[what_is_left]--> Placement of the devices that are left --> planner.py
                    --[candidates]--> device sets, the best first --[plan_loss]--> Plan

The sources of an expert, in this order: a device that has a copy becomes its home, and nothing
moves; what has to move is copied from a peer; what no device has is read from disk. KV of a lost
device is computed again by whoever takes its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias

from sgl_elastic.plan.pages import part_bytes
from sgl_elastic.plan.placement import MIN_KV_TOKENS, place
from sgl_elastic.plan.planner import NOBODY, kv_at_switch, plan
from sgl_elastic.types import (
    AdapterEntry,
    MemoryShape,
    Placement,
    Plan,
    RegionKind,
    Step,
    StepKind,
)

Part: TypeAlias = tuple[int, int]  # an expert in one layer: layer id, expert id


@dataclass(frozen=True)
class Loss:
    """What is gone, and what is left.

    `lost`: devices whose memory is gone. `held`: device that is left -> (layer id, expert id) that
    it has with content, adapters' experts with it, whoever's home it is; what the placement says
    need not be named. `is_serving`: the old instance computes on, over the pages that it has
    mapped.
    """

    lost: tuple[int, ...] = ()
    held: Mapping[int, Collection[Part]] = field(default_factory=dict)
    is_serving: bool = False


@dataclass(frozen=True)
class Limits:
    """What devices can have: `place`'s and `plan`'s arguments of these names."""

    budget_pages: Mapping[int, int]
    kv_budget_pages: Mapping[int, int]  # less what adapters that come later are to find
    kv_limit: int | None = None
    min_kv_tokens: int = MIN_KV_TOKENS


def what_is_left(old: Placement, loss: Loss, layer_ids: Collection[int]) -> Placement:
    """The devices that are left. An expert with a copy on one of them has its home there now.

    A copy in all layers, that is; of several devices the one with the fewest experts. An expert
    that no device has so stays at home on one that is lost.
    """
    left = [device for device in old.device_ids if device not in loss.lost]
    homes = list(old.homes)
    load = Counter(home for home in homes if home in left)
    for expert, home in enumerate(homes):
        whole = {(layer_id, expert) for layer_id in layer_ids}
        holders = [device for device in left if whole <= set(loss.held.get(device, ()))]
        if home in loss.lost and holders:
            homes[expert] = min(holders, key=lambda device: load[device])
            load[homes[expert]] += 1
    kv_tokens = tuple(old.kv_tokens_of(device) for device in left)
    return Placement(tuple(left), tuple(homes), kv_tokens)


def candidates(old: Placement, loss: Loss, max_devices: int) -> tuple[tuple[int, ...], ...]:
    """Where it may go on, the best first: the devices left, then fresh ones beside them.

    Last the lost ones with fresh memory. Ascending ids, as of every placement.
    """
    left = [device for device in old.device_ids if device not in loss.lost]
    free = [device for device in range(max_devices) if device not in old.device_ids]
    fresh = [*left, *free[: len(loss.lost)]]
    wanted = [left, fresh, [*left, *loss.lost]]
    return tuple(dict.fromkeys(tuple(sorted(devices)) for devices in wanted if devices))


def plan_loss(
    old: Placement,
    loss: Loss,
    device_ids: Sequence[int],
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    limits: Limits,
) -> Plan:
    """From `old`, of which `loss` is gone, to `device_ids`; the plan's `old` is what is left.

    What no device has are READ_EXPERTS steps. Raises DoesNotFitError.
    """
    left = what_is_left(old, loss, layers_of(shape))
    least = limits.min_kv_tokens
    new = place(
        shape,
        device_ids,
        left,
        limits.kv_budget_pages,
        adapters,
        limits.kv_limit,
        min_kv_tokens=least,
    )
    made = plan(left, new, shape, adapters, limits.budget_pages, min_kv_tokens=least)
    moves = {**made.kv_moves, **_takers(made, loss)}
    made = replace(
        made,
        before=tuple(_restored(made, loss, shape, adapters)),
        kv_moves=moves,
        lost=tuple(sorted(loss.lost)),
        copies={d: frozenset(parts) for d, parts in loss.held.items() if d in left.device_ids},
    )
    return made if loss.is_serving else _without_rank(made)


def layers_of(shape: MemoryShape) -> tuple[int, ...]:
    """The MoE layers, ascending."""
    return tuple(sorted({region.layer_id for region in shape.of_kind(RegionKind.EXPERT)}))


def _restored(
    made: Plan, loss: Loss, shape: MemoryShape, adapters: Sequence[AdapterEntry]
) -> Iterator[Step]:
    """The steps, with copies instead of readings for what some device has in some layers."""
    held = {d: frozenset(loss.held.get(d, ())) for d in made.old.device_ids}
    for step in made.before:
        if step.kind is StepKind.READ_EXPERTS:
            yield from _in_parts(step, held, shape, adapters)
        else:
            yield step


def _in_parts(
    read: Step,
    held: Mapping[int, Collection[Part]],
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
) -> Iterator[Step]:
    """A copy from each device that has something of it, and what is left to read."""
    sources: dict[int, dict[int, list[int]]] = {}  # source -> layer id -> expert ids
    for layer_id, expert in product(layers_of(shape), read.expert_ids):
        holders = [device for device, parts in held.items() if (layer_id, expert) in parts]
        if read.device_id in holders:
            continue
        source = min(holders, key=lambda d: len(sources.get(d, ())), default=NOBODY)
        sources.setdefault(source, {}).setdefault(layer_id, []).append(expert)
    if sources.keys() == {NOBODY} and all(
        len(sources[NOBODY].get(layer_id, ())) == len(read.expert_ids)
        for layer_id in layers_of(shape)
    ):
        yield read
        return
    for source, layers in sorted(sources.items(), key=lambda found: found[0] == NOBODY):
        parts = tuple((layer_id, tuple(ids)) for layer_id, ids in layers.items())
        yield Step(
            StepKind.READ_EXPERTS if source == NOBODY else StepKind.COPY_EXPERTS,
            read.device_id,
            source,
            tuple(sorted({expert for _, ids in parts for expert in ids})),
            num_bytes=part_bytes(shape, parts, adapters),
            parts=parts,
        )


def _takers(made: Plan, loss: Loss) -> dict[int, int]:
    """Lost device -> who goes on with its requests: in turn those with the most KV."""
    kv = kv_at_switch(made)
    takers = sorted(made.new.device_ids, key=lambda device: -kv[device])
    gone = [device for device in sorted(loss.lost) if device not in made.new.device_ids]
    return {device: takers[i % len(takers)] for i, device in enumerate(gone)}


def _without_rank(made: Plan) -> Plan:
    """No rank serves that could shrink its KV, and nobody uses it: the pages go back at once."""
    return replace(
        made,
        before=tuple(
            replace(step, kind=StepKind.TRIM_KV) if step.kind is StepKind.SHRINK_KV else step
            for step in made.before
        ),
    )
