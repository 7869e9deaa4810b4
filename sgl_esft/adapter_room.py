"""Whether one more adapter has room on a rank's device. Pure; the same answer on every rank.

slots and pages, who has them, who is pinned --> [AdapterRoom] --> nothing, or why not
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sgl_esft.errors import DeviceMemoryError, NoFreeSlotError, OutOfExpertMemoryError


@dataclass(frozen=True)
class AdapterRoom:
    """What the loaded adapters leave; `max_pages` bounds all adapters' pages, None = nothing."""

    num_slots: int
    num_free_slots: int
    max_pages: int | None
    pages: Mapping[str, int]  # adapter id -> the most pages it takes
    pinned: Collection[str]  # adapter ids

    def check_alone(self, name: str, num_pages: int) -> None:
        """Raises DeviceMemoryError for an adapter that is larger than all there is."""
        if self.max_pages is not None and num_pages > self.max_pages:
            raise DeviceMemoryError(
                f"adapter {name!r} needs up to {num_pages} pages, and adapters have "
                f"{self.max_pages} in all: raise --adapter-memory"
            )

    def check_beside_pinned(self, name: str, num_pages: int, *, pinned: bool) -> None:
        """Requests of an adapter that never fits beside the pinned ones would wait for ever.

        Raises NoFreeSlotError or OutOfExpertMemoryError.
        """
        if pinned and len(self.pinned) >= self.num_slots - 1:
            raise NoFreeSlotError(
                f"adapter {name!r} cannot be pinned: one of the {self.num_slots} "
                "slots must stay for the others; load it unpinned, or raise --max-adapters"
            )
        pinned_pages = sum(self.pages[adapter_id] for adapter_id in self.pinned)
        others = (n for i, n in self.pages.items() if i not in self.pinned)
        largest = max(others, default=0)
        if pinned:
            pinned_pages += num_pages
        else:
            largest = max(largest, num_pages)
        if self.max_pages is not None and pinned_pages + largest > self.max_pages:
            raise OutOfExpertMemoryError(
                f"with adapter {name!r}, pinned adapters would take {pinned_pages} pages and "
                f"another one up to {largest}, of {self.max_pages}: pin fewer, or raise "
                "--adapter-memory"
            )

    def check_resident(self, name: str, num_pages: int) -> None:
        """Where an adapter keeps its slot. Raises NoFreeSlotError or OutOfExpertMemoryError."""
        if not self.num_free_slots:
            raise NoFreeSlotError(
                f"adapter {name!r} needs a slot of its own, and all "
                f"{self.num_slots} are taken: unload an adapter, or raise --max-adapters"
            )
        used = sum(self.pages.values())
        if self.max_pages is not None and used + num_pages > self.max_pages:
            raise OutOfExpertMemoryError(
                f"adapter {name!r} needs up to {num_pages} pages of its own, and "
                f"{self.max_pages - used} of {self.max_pages} are left: unload an adapter, or "
                "raise --adapter-memory"
            )
