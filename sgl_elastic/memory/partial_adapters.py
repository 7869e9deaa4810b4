"""A rank was lost, perhaps in an adapter's change: what is whole stays, the rest goes.

    adapters, what each device has --> [whole] --> adapters that every device has in full
                                   --> [surplus] --> slots with pages of adapters that are not
    placement, devices --> [drop_partial_adapters] --> whole adapters; no other adapter has a page

A rank maps an adapter's slots, fills them and says that they are valid; unloading, it takes them
back before it says so. So the table of adapters, the pages and their content may each be ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.runs import Runs, Slots, difference
from sgl_elastic.memory.slots import adapter_slots, expert_slots
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement

logger = logging.getLogger(__name__)


def drop_partial_adapters(
    shape: MemoryShape,
    placement: Placement,
    adapters: Sequence[AdapterEntry],
    client_of: Callable[[int], DeviceClient],
    *,
    keeps_copies: bool = False,
) -> tuple[AdapterEntry, ...]:
    """The adapters that are whole; pages of others are taken back. No rank may be attached.

    `keeps_copies`: what whole adapters have on a device that is not the expert's home stays. Raises
    MemoryWorkerError.
    """
    held = {device: client_of(device).expert_slots() for device in placement.device_ids}
    loaded = {device: slots.loaded for device, slots in held.items()}
    kept = whole(shape, placement, adapters, loaded)
    for adapter in adapters:
        if adapter not in kept:
            logger.warning("elastic: adapter %s was not whole, and is unloaded", adapter.name)
    for device, slots in held.items():
        own = range(shape.num_experts) if keeps_copies else placement.experts_of(device)
        left = surplus(shape, own, kept, slots.mapped)
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
            not difference(adapter_slots(shape, adapter, placement.experts_of(device)), slots)
            for device, slots in loaded.items()
        )
    )


def surplus(
    shape: MemoryShape,
    expert_ids: Iterable[int],
    adapters: Sequence[AdapterEntry],
    mapped: Slots,
) -> dict[str, Runs]:
    """Slots with pages that are adapters', but of none of these on a device with these experts.

    `mapped`: of EXPERT regions only.
    """
    own = expert_slots(shape, adapters, expert_ids)
    base = (0, shape.num_experts)
    return difference(mapped, {name: (base, *own.get(name, ())) for name in mapped})
