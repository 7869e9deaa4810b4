"""Exact page arithmetic: what a device holds -> the pages behind it.

    shape, experts, adapters, KV tokens --> [pages] --> pages, bytes, KV tokens that fit

Slot s of a region is bytes [s*S, (s+1)*S) of its addresses, page p bytes [p*P, (p+1)*P). A page at
the edge of two resident slots is counted once, as csrc/virtual_tensor.h does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from sgl_elastic.errors import PlanError
from sgl_elastic.types import AdapterEntry, MemoryShape, RegionKind

NO_KV = -1  # KV tokens of a device without KV; 0 tokens still have the padding row


def pages_of_slots(slots: Iterable[int], slot_bytes: int, page_bytes: int) -> int:
    """Pages that these slots (ascending) of one region touch."""
    num_pages = 0
    next_page = 0  # the first page that has not been counted
    for slot in slots:
        first = max(slot * slot_bytes // page_bytes, next_page)
        end = -(-(slot + 1) * slot_bytes // page_bytes)
        num_pages += max(end - first, 0)
        next_page = max(end, next_page)
    return num_pages


def expert_slots(
    shape: MemoryShape, layer_id: int, expert_ids: Iterable[int], adapters: Iterable[AdapterEntry]
) -> tuple[int, ...]:
    """Slots, ascending, that a device with these experts has in the regions of a layer.

    Raises PlanError when an adapter has more experts, or a higher slot, than the shape has room
    for.
    """
    here = frozenset(expert_ids)
    slots = set(here)
    for adapter in adapters:
        experts = adapter.experts.get(layer_id, ())
        if len(experts) > shape.slots_per_adapter or adapter.adapter_slot >= shape.max_adapters:
            raise PlanError(
                f"adapter {adapter.name} in slot {adapter.adapter_slot} has {len(experts)} experts "
                f"in layer {layer_id}; there are {shape.max_adapters} slots of "
                f"{shape.slots_per_adapter}."
            )
        slots.update(shape.slots_of_adapter(adapter, layer_id, here))
    return tuple(sorted(slots))


def trunk_pages(shape: MemoryShape) -> int:
    """Pages of the trunk; the same on each device."""
    return sum(
        _whole_pages(region.num_slots * region.slot_bytes, shape.page_bytes)
        for region in shape.of_kind(RegionKind.TRUNK)
    )


def expert_pages(
    shape: MemoryShape, expert_ids: Iterable[int], adapters: Sequence[AdapterEntry]
) -> int:
    """Pages of these experts and of the adapters' experts that live with them, in all layers."""
    # Without adapters all layers look the same, so each look is worked out once.
    looks = _expert_looks(shape, expert_ids, adapters)
    return sum(
        count * pages_of_slots(slots, slot_bytes, shape.page_bytes)
        for (slots, slot_bytes), count in looks.items()
    )


def kv_pages(shape: MemoryShape, kv_tokens: int) -> int:
    """Pages of KV slots [0, kv_tokens + 1) in all KV regions; 0 for NO_KV."""
    sizes = Counter(region.slot_bytes for region in shape.of_kind(RegionKind.KV))
    return sum(
        count * _whole_pages((kv_tokens + 1) * slot_bytes, shape.page_bytes)
        for slot_bytes, count in sizes.items()
    )


def device_pages(
    shape: MemoryShape,
    expert_ids: Iterable[int],
    adapters: Sequence[AdapterEntry],
    kv_tokens: int,
) -> int:
    """Pages of a device with the trunk, these experts and this KV capacity (NO_KV: none)."""
    experts = expert_pages(shape, expert_ids, adapters)
    return trunk_pages(shape) + experts + kv_pages(shape, kv_tokens)


def max_kv_tokens(
    shape: MemoryShape,
    budget_pages: int,
    expert_ids: Iterable[int],
    adapters: Sequence[AdapterEntry],
) -> int:
    """The largest KV capacity that fits beside trunk and experts, within the regions' addresses.

    NO_KV (-1) when not even weights and padding row fit.
    """
    free_pages = budget_pages - device_pages(shape, expert_ids, adapters, NO_KV)
    capacities = range(most_kv_tokens(shape) + 1)
    return bisect_right(capacities, free_pages, key=lambda tokens: kv_pages(shape, tokens)) - 1


def most_kv_tokens(shape: MemoryShape) -> int:
    """The KV capacity that the regions have addresses for; 0 for a shape without KV."""
    return min((region.num_slots for region in shape.of_kind(RegionKind.KV)), default=1) - 1


def trunk_bytes(shape: MemoryShape) -> int:
    """Bytes that a copy of the trunk moves."""
    return sum(region.num_slots * region.slot_bytes for region in shape.of_kind(RegionKind.TRUNK))


def expert_bytes(
    shape: MemoryShape, expert_ids: Iterable[int], adapters: Sequence[AdapterEntry]
) -> int:
    """Bytes that a copy of these experts moves, in all layers and with the adapters' experts."""
    looks = _expert_looks(shape, expert_ids, adapters)
    return sum(len(slots) * slot_bytes * count for (slots, slot_bytes), count in looks.items())


def part_bytes(
    shape: MemoryShape,
    parts: Iterable[tuple[int, Iterable[int]]],
    adapters: Sequence[AdapterEntry],
) -> int:
    """Bytes of (layer id, expert ids), with the adapters' experts."""
    slot_bytes = Counter[int]()
    for region in shape.of_kind(RegionKind.EXPERT):
        slot_bytes[region.layer_id] += region.slot_bytes
    return sum(
        len(expert_slots(shape, layer_id, ids, adapters)) * slot_bytes[layer_id]
        for layer_id, ids in parts
    )


def group_size(shape: MemoryShape, num_devices: int = 1) -> int:
    """The fewest neighbouring experts whose bytes are whole pages in every expert region.

    Devices that exchange such groups never keep a page for half of an expert that left. It is 1,
    and edge pages are then paid for twice, where groups do not divide the experts evenly or where
    there would be fewer groups than devices.
    """
    group = math.lcm(
        *(
            shape.page_bytes // math.gcd(region.slot_bytes, shape.page_bytes)
            for region in shape.of_kind(RegionKind.EXPERT)
        )
    )
    fits = shape.num_experts % group == 0 and group * num_devices <= shape.num_experts
    return group if fits else 1


def _expert_looks(
    shape: MemoryShape, expert_ids: Iterable[int], adapters: Collection[AdapterEntry]
) -> Counter[tuple[tuple[int, ...], int]]:
    """(Resident slots, bytes of a slot) -> in how many expert regions it looks like that."""
    here = frozenset(expert_ids)
    regions = shape.of_kind(RegionKind.EXPERT)
    slots = {
        layer_id: expert_slots(shape, layer_id, here, adapters)
        for layer_id in {region.layer_id for region in regions}
    }
    return Counter((slots[region.layer_id], region.slot_bytes) for region in regions)


def _whole_pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)
