"""How many pages adapters may take on a rank; the same number on every rank.

    manifests, layers -> [pages_needed] -> admission of adapters and batches (plane.py)
    --adapter-memory, first adapters -> [bound_pages] -> its limit

Ranks hold different experts but must admit the same batches, so an adapter counts
with the most pages that it can take on any rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sgl_esft.config import EsftConfig
from sgl_esft.errors import DeviceMemoryError, NoFreeSlotError, OutOfExpertMemoryError
from sgl_esft.formats.manifest import AdapterManifest
from sgl_esft.weave.expert_memory import ExpertArena
from sgl_esft.weave.moe_layer import WovenLayer

Layers = Mapping[int, WovenLayer]


def pages_needed(manifest: AdapterManifest, layers: Layers) -> int:
    """The most pages the adapter takes on any rank, wherever its experts come to lie."""
    num_pages = 0
    for layer_id, expert_ids in manifest.experts.items():
        layer = layers[layer_id]
        experts_of_rank = Counter(e // len(layer.shard.expert_ids) for e in expert_ids)
        num_pages += layer.memory.max_pages(max(experts_of_rank.values(), default=0))
    return num_pages


def bound_pages(
    arena: ExpertArena | None,
    layers: Layers,
    config: EsftConfig,
    initial: Iterable[AdapterManifest],
    *,
    has_limit: bool,
) -> int | None:
    """Pages for all adapters together; None = as many as they want.

    --adapter-memory decides, if given. Otherwise, on a device with limited memory
    (`has_limit`): what the initial adapters need, or, without any, what all slots need. Pages that
    no initial adapter will take are made now, before SGLang sizes the KV cache by what is left.
    Raises DeviceMemoryError when the device has too few.
    """
    if arena is None:
        return None
    if config.adapter_memory_bytes is not None:
        return _reserve(arena, -(-config.adapter_memory_bytes // arena.page_bytes))
    if not has_limit:
        return None
    needed = sorted((pages_needed(manifest, layers) for manifest in initial), reverse=True)
    if needed:
        return sum(needed[: config.max_adapters])
    per_adapter = (
        layer.memory.max_pages(layer.layout.slots_per_adapter) for layer in layers.values()
    )
    return _reserve(arena, config.max_adapters * sum(per_adapter))


def _reserve(arena: ExpertArena, num_pages: int) -> int:
    try:
        arena.reserve_pages(num_pages)
    except OutOfExpertMemoryError as error:
        raise DeviceMemoryError(
            f"no room for adapters: {error}; or set a smaller --adapter-memory"
        ) from error
    return num_pages


def check_pin(name: str, num_pinned: int, num_slots: int, flag: str) -> None:
    """One slot stays for adapters that are not pinned, of either kind in its own slots.

    num_pinned: without this one. flag: by which there are so many slots. Raises NoFreeSlotError.
    """
    if num_pinned >= num_slots - 1:
        raise NoFreeSlotError(
            f"adapter {name!r} cannot be pinned: with it {num_pinned + 1} of {num_slots} slots "
            f"would be, and the others need one; unpin one, load it unpinned, or raise {flag}"
        )


# Whether one more adapter has room on a rank's device. Pure; the same answer on every rank.
#
# slots and pages, who has them, who is pinned --> [AdapterRoom] --> nothing, or why not


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
        if pinned:
            check_pin(name, len(self.pinned), self.num_slots, "--max-adapters")
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
