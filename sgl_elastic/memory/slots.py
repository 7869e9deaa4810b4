"""Which slots of which regions hold what. Pure; the same answer for workers, engines and the plan.

    shape, adapters, experts of a device --> [expert_slots, ..] --> Slots (region name -> runs)

Base expert e is in slot e of each layer's EXPERT regions, an adapter's experts are where
`MemoryShape.slots_of_adapter` says. KV of T tokens takes T + 1 slots: the first is the engine's
padding row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sgl_elastic.memory.runs import Runs, Slots, of_slots
from sgl_elastic.plan import pages
from sgl_elastic.types import AdapterEntry, MemoryShape, RegionKind


def trunk_slots(shape: MemoryShape) -> dict[str, Runs]:
    """All slots of the TRUNK regions."""
    return {region.name: ((0, region.num_slots),) for region in shape.of_kind(RegionKind.TRUNK)}


def kv_slots(shape: MemoryShape, num_tokens: int) -> dict[str, Runs]:
    """KV slots for `num_tokens` tokens, the padding row with them; none for 0 tokens."""
    if num_tokens <= 0:
        return {}
    return {region.name: ((0, num_tokens + 1),) for region in shape.of_kind(RegionKind.KV)}


def kv_slots_above(shape: MemoryShape, num_tokens: int) -> dict[str, Runs]:
    """KV slots that a capacity of `num_tokens` tokens does not need."""
    first = num_tokens + 1 if num_tokens > 0 else 0
    return {
        region.name: ((first, region.num_slots - first),)
        for region in shape.of_kind(RegionKind.KV)
        if region.num_slots > first
    }


def expert_slots(
    shape: MemoryShape, adapters: Sequence[AdapterEntry], expert_ids: Iterable[int]
) -> dict[str, Runs]:
    """Slots of base experts in all layers, and of the adapters' experts that go with them.

    Raises PlanError for an adapter that the shape has no room for.
    """
    experts = frozenset(expert_ids)
    if not experts:
        return {}
    return {
        region.name: of_slots(pages.expert_slots(shape, region.layer_id, experts, adapters))
        for region in shape.of_kind(RegionKind.EXPERT)
    }


def copy_slots(
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    copies: Mapping[int, Sequence[int]],
) -> dict[str, Runs]:
    """Slots of copied experts, by layer id, with the adapters' experts that go with them."""
    return {
        region.name: of_slots(
            pages.expert_slots(shape, region.layer_id, copies[region.layer_id], adapters)
        )
        for region in shape.of_kind(RegionKind.EXPERT)
        if copies.get(region.layer_id)
    }


def adapter_slots(
    shape: MemoryShape, adapter: AdapterEntry, expert_ids: Iterable[int]
) -> dict[str, Runs]:
    """Slots of one adapter's experts on a device that has the base experts `expert_ids`."""
    experts = frozenset(expert_ids)
    found = {
        region.name: of_slots(shape.slots_of_adapter(adapter, region.layer_id, experts))
        for region in shape.of_kind(RegionKind.EXPERT)
    }
    return {name: runs for name, runs in found.items() if runs}


def part_slots(
    shape: MemoryShape,
    adapters: Sequence[AdapterEntry],
    parts: Iterable[tuple[int, Sequence[int]]],
) -> dict[str, Runs]:
    """As `expert_slots`, of (layer id, expert ids) only."""
    ids = dict(parts)
    return {
        region.name: of_slots(
            pages.expert_slots(shape, region.layer_id, ids[region.layer_id], adapters)
        )
        for region in shape.of_kind(RegionKind.EXPERT)
        if ids.get(region.layer_id)
    }


def loaded_parts(
    shape: MemoryShape, adapters: Sequence[AdapterEntry], loaded: Slots
) -> frozenset[tuple[int, int]]:
    """(layer id, expert id) of base experts with valid content, all adapters' of the same ids too.

    `loaded`: the slots of EXPERT regions with valid content.
    """
    found = {
        (region.layer_id, expert)
        for region in shape.of_kind(RegionKind.EXPERT)
        for expert in range(shape.num_experts)
    }
    for region in shape.of_kind(RegionKind.EXPERT):
        slots = {slot for run in loaded.get(region.name, ()) for slot in range(run[0], sum(run))}
        found -= {
            (region.layer_id, expert)
            for expert in range(shape.num_experts)
            if not slots.issuperset(pages.expert_slots(shape, region.layer_id, (expert,), adapters))
        }
    return frozenset(found)
