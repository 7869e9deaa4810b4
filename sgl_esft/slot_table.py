"""Which adapter sits in which adapter slot: a pure table, no tensors.

    adapter id --admit--> adapter slot 0..N-1 --evict/remove--> free

Least recently used first out; pinned adapters and those of the batch at hand
stay. Every rank runs the same calls in the same order and so gets the same slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from sgl_esft.errors import InvariantError, NoFreeSlotError


@dataclass(frozen=True)
class Placement:
    """One step of an admission: `evicted` (if any) leaves the slot, `adapter_id` enters it."""

    adapter_id: str
    adapter_slot: int
    evicted: str | None = None


class SlotTable:
    """N adapter slots, who is in them, and in which order they were last used."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pinned: set[str] = set()

    def slot_of(self, adapter_id: str) -> int | None:
        """The adapter's slot; None when it is not on the device."""
        return self._slot_of.get(adapter_id)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._slot_of)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def can_admit(self, adapter_ids: Iterable[str], pinned: Iterable[str] = ()) -> bool:
        """Whether all of `adapter_ids` fit beside the adapters pinned here and `pinned`."""
        return len(set(adapter_ids) | self._pinned | set(pinned)) <= self.num_slots

    def admit(self, adapter_ids: Iterable[str]) -> list[Placement]:
        """Give each adapter a slot, evicting others if need be; mark all as just used.

        Raises NoFreeSlotError, with the table unchanged, when they cannot all fit.
        """
        wanted = sorted(set(adapter_ids))
        if not self.can_admit(wanted):
            raise NoFreeSlotError(
                f"{len(wanted)} adapters are needed at once beside {len(self._pinned)} pinned "
                f"ones, but there are {self.num_slots} slots: raise --max-adapters or unpin"
            )
        for adapter_id in wanted:
            if adapter_id in self._slot_of:
                self._slot_of.move_to_end(adapter_id)
        return [self._place(name, wanted) for name in wanted if name not in self._slot_of]

    def _place(self, adapter_id: str, wanted: list[str]) -> Placement:
        evicted = None if self.num_free else self._victim(wanted)
        slot = self._lowest_free() if evicted is None else self._slot_of.pop(evicted)
        self._slot_of[adapter_id] = slot
        return Placement(adapter_id, slot, evicted)

    def _victim(self, wanted: list[str]) -> str:
        for adapter_id in self._slot_of:
            if adapter_id not in self._pinned and adapter_id not in wanted:
                return adapter_id
        raise InvariantError("can_admit said there is room, but every slot is taken")

    def _lowest_free(self) -> int:
        taken = set(self._slot_of.values())
        return next(slot for slot in range(self.num_slots) if slot not in taken)

    def pin(self, adapter_id: str) -> None:
        """Keep the adapter, which must be on the device, from being evicted."""
        if adapter_id not in self._slot_of:
            raise InvariantError(f"cannot pin {adapter_id}: it has no slot")
        self._pinned.add(adapter_id)

    def remove(self, adapter_id: str) -> int | None:
        """Forget the adapter. Returns the slot it leaves, None if it had none."""
        self._pinned.discard(adapter_id)
        return self._slot_of.pop(adapter_id, None)

    def check_integrity(self) -> None:
        """Raises InvariantError when two adapters share a slot or a slot is out of range."""
        slots = list(self._slot_of.values())
        if len(set(slots)) != len(slots) or not all(0 <= s < self.num_slots for s in slots):
            raise InvariantError(f"slots {slots} are not distinct in [0, {self.num_slots})")
        if not self._pinned <= set(self._slot_of):
            raise InvariantError("a pinned adapter has no slot")
