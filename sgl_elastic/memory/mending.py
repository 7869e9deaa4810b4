"""A rank was lost, perhaps in an adapter's change: what is whole stays, the rest goes.

    adapters, what each device has --> [whole] --> adapters that every device has in full
                                   --> [surplus] --> slots with pages of adapters that are not
    placement, devices --> [mend] --> whole adapters; no other adapter has a page

A rank maps an adapter's slots, fills them and says that they are valid; unloading, it takes them
back before it says so. So the table of adapters, the pages and their content may each be ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.runs import Runs, Slots, merge, subtract
from sgl_elastic.memory.slots import adapter_slots
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, RegionKind

logger = logging.getLogger(__name__)


def mend(
    shape: MemoryShape,
    placement: Placement,
    adapters: Sequence[AdapterEntry],
    client_of: Callable[[int], DeviceClient],
) -> tuple[AdapterEntry, ...]:
    """The adapters that are whole; pages of others are taken back. No rank may be attached.

    Raises MemoryWorkerError.
    """
    held = {device: client_of(device).expert_slots() for device in placement.device_ids}
    loaded = {device: slots.loaded for device, slots in held.items()}
    kept = whole(shape, placement, adapters, loaded)
    for adapter in adapters:
        if adapter not in kept:
            logger.warning("elastic: adapter %s was not whole, and is unloaded", adapter.name)
    for device, slots in held.items():
        left = surplus(shape, placement.experts_of(device), kept, slots.mapped)
        if left:
            client_of(device).unmap_slots(left)
    return kept


def whole(
    shape: MemoryShape,
    placement: Placement,
    adapters: Iterable[AdapterEntry],
    loaded: Mapping[int, Slots],
) -> tuple[AdapterEntry, ...]:
    """Adapters of which each device has all that is its own. `loaded`: valid slots, by device."""
    return tuple(
        adapter
        for adapter in adapters
        if all(
            _has(slots, adapter_slots(shape, adapter, placement.experts_of(device)))
            for device, slots in loaded.items()
        )
    )


def surplus(
    shape: MemoryShape,
    expert_ids: Iterable[int],
    adapters: Iterable[AdapterEntry],
    mapped: Slots,
) -> dict[str, Runs]:
    """Slots with pages that are adapters', but of none of these on a device with these experts."""
    experts = frozenset(expert_ids)
    own = [adapter_slots(shape, adapter, experts) for adapter in adapters]
    found = {}
    for region in shape.of_kind(RegionKind.EXPERT):
        kept = merge(run for slots in own for run in slots.get(region.name, ()))
        base = (0, shape.num_experts)
        found[region.name] = subtract(mapped.get(region.name, ()), [base, *kept])
    return {name: runs for name, runs in found.items() if runs}


def _has(slots: Slots, wanted: Slots) -> bool:
    return not any(subtract(runs, slots.get(name, ())) for name, runs in wanted.items())
