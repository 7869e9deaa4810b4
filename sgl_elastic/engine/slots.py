"""The memory of one layer's slots when it belongs to the HMM (sgl_esft's SlotMemory).

    adapters.py --map/unmap--> [ElasticSlots] --> memory worker (pages), own addresses (mapping)

Base slots are mapped by rank.py as placements change; an adapter's slots when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_elastic.engine.shape import EXPERT_TENSORS, expert_region
from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.runs import Runs
from sgl_esft.errors import InvariantError, OutOfExpertMemoryError
from sgl_esft.expert_memory import SlotUsage

if TYPE_CHECKING:
    from sgl_elastic.engine.memory import EngineMemory


class ElasticSlots:
    """One layer's slots on this rank."""

    def __init__(self, memory: EngineMemory, layer_id: int, num_slots: int) -> None:
        self._memory = memory
        self._layer_id = layer_id
        self._num_slots = num_slots
        self._mapped: set[int] = set()

    def note(self, mapped: set[int]) -> None:
        """Somebody else has mapped exactly these slots."""
        self._mapped = set(mapped)

    def choose(self, region: range, count: int) -> range:
        return region[:count]

    def map(self, slots: range) -> None:
        if self._mapped.intersection(slots):
            raise InvariantError(f"layer {self._layer_id}: some of slots {slots} are mapped")
        runs = self._runs(slots)
        client = self._memory.required_client()
        try:
            client.map_slots(runs)
        except MemoryWorkerError as error:
            raise OutOfExpertMemoryError(
                f"{error}: unload an adapter, or give devices more by --device-memory"
            ) from error
        self._memory.required_mapping().extend(client, runs)
        self._mapped.update(slots)

    def unmap(self, slots: range) -> None:
        runs = self._runs(slots)
        self._memory.required_mapping().shrink(runs)
        self._memory.required_client().unmap_slots(runs)
        self._mapped.difference_update(slots)

    def _runs(self, slots: range) -> dict[str, Runs]:
        run = ((slots.start, len(slots)),)
        return {expert_region(self._layer_id, tensor): run for tensor in EXPERT_TENSORS}

    def max_pages(self, count: int) -> int:
        return 0  # the HMM's budget decides

    def mapped_slots(self) -> set[int]:
        return set(self._mapped)

    def usage(self) -> SlotUsage:
        shape, mapping = self._memory.shape, self._memory.required_mapping()
        if shape is None:
            raise InvariantError("no memory is planned")
        regions = [r for r in shape.regions if r.layer_id == self._layer_id]
        pages = sum(sum(mapping.range_of(r.name).mapped_pages()) for r in regions)
        slot_bytes = sum(r.slot_bytes for r in regions)
        return SlotUsage(
            reserved_bytes=self._num_slots * slot_bytes,
            mapped_bytes=pages * shape.page_bytes,
            shared_bytes=0,
            used_bytes=len(self._mapped) * slot_bytes,
        )

    def check_integrity(self) -> None:
        if not all(0 <= slot < self._num_slots for slot in self._mapped):
            raise InvariantError(f"layer {self._layer_id}: slots {self._mapped} are out of range")
