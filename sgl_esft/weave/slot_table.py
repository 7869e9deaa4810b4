"""Which adapter sits in which adapter slot: a pure table, no tensors.

    adapter id --admit--> adapter slot 0..N-1 --evict/remove--> free

Least recently used first out; pinned adapters and those of the batch at hand
stay. Besides the slots, the pages of all adapters on the device may be bounded.
Every rank runs the same calls in the same order and so gets the same slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from sgl_esft.errors import InvariantError, NoFreeSlotError


@dataclass(frozen=True)
class Placement:
    """One step of an admission: the `evicted` leave their slots, then `adapter_id` enters one."""

    adapter_id: str
    adapter_slot: int
    evicted_slots: tuple[int, ...] = ()


@dataclass
class SlotUses:
    """What the slots did as a cache, since the start."""

    num_hits: int = 0  # adapters of a batch, and not of the one before, that had a slot
    num_misses: int = 0  # those that had none
    num_evictions: int = 0  # adapters that lost their slot to others
    num_changes: int = 0  # of what is on the device; only grows


class SlotTable:
    """N adapter slots, who is in them, and in which order they were last used.

    `max_pages` bounds the sum of `pages_of(adapter_id)` over the adapters in slots, None = nothing.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int | None = None,
        pages_of: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.num_slots = num_slots
        self._max_pages = max_pages
        self._pages_of = pages_of
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._pinned: set[str] = set()

    def slot_of(self, adapter_id: str) -> int | None:
        """The adapter's slot; None when it is not on the device."""
        return self._slot_of.get(adapter_id)

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self._slot_of)

    def can_admit(self, adapter_ids: Iterable[str]) -> bool:
        """Whether all of `adapter_ids` fit beside the pinned adapters."""
        return self._fit(set(adapter_ids) | self._pinned)

    def has_room_for(self, adapter_id: str) -> bool:
        """Whether the adapter fits without an eviction."""
        return self._fit({*self._slot_of, adapter_id})

    def _fit(self, adapter_ids: set[str]) -> bool:
        if len(adapter_ids) > self.num_slots:
            return False
        return self._max_pages is None or sum(map(self._pages_of, adapter_ids)) <= self._max_pages

    def admit(self, adapter_ids: Iterable[str]) -> list[Placement]:
        """Give each adapter a slot, evicting others if need be; mark all as just used.

        Raises NoFreeSlotError, with the table unchanged, when they cannot all fit.
        """
        wanted = sorted(set(adapter_ids))
        if not self.can_admit(wanted):
            raise NoFreeSlotError(
                f"{len(wanted)} adapters are needed at once beside {len(self._pinned)} pinned "
                f"ones, but there are {self.num_slots} slots and pages for {self._max_pages}: "
                "raise --max-adapters or --adapter-memory, or unpin"
            )
        for adapter_id in wanted:
            if adapter_id in self._slot_of:
                self._slot_of.move_to_end(adapter_id)
        return [self._place(name, wanted) for name in wanted if name not in self._slot_of]

    def _place(self, adapter_id: str, wanted: list[str]) -> Placement:
        evicted: list[int] = []
        while not self.has_room_for(adapter_id):
            slot = self.evict_one(wanted)
            if slot is None:
                raise InvariantError("can_admit said there is room, but every slot is taken")
            evicted.append(slot)
        slot = evicted[0] if evicted else self._lowest_free()
        self._slot_of[adapter_id] = slot
        return Placement(adapter_id, slot, tuple(evicted))

    def evict_one(self, wanted: Collection[str]) -> int | None:
        """The slot left by the adapter used longest ago, neither pinned nor wanted; else None."""
        for adapter_id in self._slot_of:
            if adapter_id not in self._pinned and adapter_id not in wanted:
                return self._slot_of.pop(adapter_id)
        return None

    def _lowest_free(self) -> int:
        taken = set(self._slot_of.values())
        return next(slot for slot in range(self.num_slots) if slot not in taken)

    def pin(self, adapter_id: str) -> None:
        """Keep the adapter, which must be on the device, from being evicted."""
        if adapter_id not in self._slot_of:
            raise InvariantError(f"cannot pin {adapter_id}: it has no slot")
        self._pinned.add(adapter_id)

    @property
    def pinned(self) -> Collection[str]:
        """Adapters that are kept in their slots."""
        return self._pinned

    def unpin(self, adapter_id: str) -> None:
        """The adapter may be evicted from now on."""
        self._pinned.discard(adapter_id)

    def remove(self, adapter_id: str) -> int | None:
        """Forget the adapter. Returns the slot it leaves, None if it had none."""
        self._pinned.discard(adapter_id)
        return self._slot_of.pop(adapter_id, None)

    def restore(self, slots: Mapping[str, int], pinned: Collection[str]) -> None:
        """Take over another table: adapter id -> slot. Raises InvariantError if it is wrong."""
        self._slot_of = OrderedDict(slots)
        self._pinned = set(pinned)
        self.check_integrity()

    def check_integrity(self) -> None:
        """Raises InvariantError when two adapters share a slot or a slot is out of range."""
        slots = list(self._slot_of.values())
        if len(set(slots)) != len(slots) or not all(0 <= s < self.num_slots for s in slots):
            raise InvariantError(f"slots {slots} are not distinct in [0, {self.num_slots})")
        if not self._pinned <= set(self._slot_of):
            raise InvariantError("a pinned adapter has no slot")
