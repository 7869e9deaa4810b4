"""The adapter plane of one rank: which adapters are loaded, and which are on the device.

    disk --load--> host cache --ensure_on_device--> adapter slots --slot_of--> batch tags

Load order: validate, read, (slot, weights, expert map), publish the name. Unload
is the reverse; SGLang's registry guarantees that no request uses the adapter by
then. Every rank makes the same calls in the same order and decides the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_esft import adapter_format
from sgl_esft.adapter_format import AdapterManifest
from sgl_esft.adapter_pages import pages_needed
from sgl_esft.config import EsftConfig
from sgl_esft.errors import (
    AdapterExistsError,
    DeviceMemoryError,
    EsftError,
    InvariantError,
    NoFreeSlotError,
    OutOfExpertMemoryError,
    UnknownAdapterError,
)
from sgl_esft.host_cache import HostAdapter, read_adapter
from sgl_esft.model_spec import MoeSpec
from sgl_esft.moe_layer import WovenLayer
from sgl_esft.shared_layer import SharedLayer
from sgl_esft.slot_table import Placement, SlotTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSource:
    """What is to be loaded: the id is new for every load, the name is what requests say."""

    adapter_id: str
    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True)
class PlacedAdapter:
    """An adapter whose weights are in their slots, as one engine tells it another."""

    source: AdapterSource
    adapter_slot: int
    experts: Mapping[int, tuple[int, ...]]  # layer id -> expert ids of all ranks, ascending


def check_loadable(
    name: str, folder: str, loaded: Collection[str], spec: MoeSpec, config: EsftConfig
) -> AdapterManifest:
    """Everything that is checked before an adapter is read; `loaded` are the names in use.

    Raises one of the Adapter* errors.
    """
    adapter_format.validate_adapter_name(name)
    if name in loaded:
        raise AdapterExistsError(
            f"adapter {name!r} is loaded already: unload it first, or choose another name"
        )
    path = adapter_format.resolve_adapter_path(folder, config.adapter_root_path)
    manifest = adapter_format.read_manifest(path, spec)
    adapter_format.check_fits(manifest, config.max_experts_per_adapter)
    return manifest


def _adopted(adapter: PlacedAdapter, num_moe_layers: int) -> HostAdapter:
    manifest = AdapterManifest(
        path=Path(adapter.source.path),
        experts=adapter.experts,
        tensors={},
        dtype="",
        num_bytes=0,
        num_moe_layers=num_moe_layers,
    )
    return HostAdapter(adapter.source.name, manifest, {})


class AdapterPlane:
    """Loaded adapters and their places; `layers` maps a model's layer id to its woven layer.

    With `is_resident` an adapter takes its slot when it is loaded and keeps it
    until it is unloaded: under DP attention the ranks see different batches, and
    only the order of loads is common to them. Otherwise slots are a cache over
    the host's adapters, least recently used first out. `max_pages` bounds the
    pages behind all adapters' slots, None = as many as the device has.
    """

    def __init__(
        self,
        layers: Mapping[int, WovenLayer],
        spec: MoeSpec,
        config: EsftConfig,
        *,
        is_resident: bool,
        max_pages: int | None = None,
    ) -> None:
        self._layers = layers
        self._spec = spec
        self._config = config
        self._is_resident = is_resident
        self._max_pages = max_pages
        self._loaded: dict[str, HostAdapter] = {}
        self._pages: dict[str, int] = {}  # of each loaded adapter, the most it can take
        self._slots = SlotTable(config.max_adapters, max_pages, self._pages.__getitem__)
        self._pinned: set[str] = set()
        self.num_changes = 0  # of what is on the device, ever

    @property
    def names(self) -> dict[str, str]:
        """Adapter name -> folder, of everything loaded."""
        return {a.name: str(a.manifest.path) for a in self._loaded.values()}

    @property
    def layers(self) -> Mapping[int, WovenLayer]:
        """The woven layers by layer id."""
        return self._layers

    @property
    def adapter_slots(self) -> dict[str, int]:
        """Adapter name -> adapter slot, of everything on the device."""
        slots = {a.name: self._slots.slot_of(adapter_id) for adapter_id, a in self._loaded.items()}
        return {name: slot for name, slot in slots.items() if slot is not None}

    def load(self, source: AdapterSource) -> None:
        """Validate and read an adapter; give it a slot if one is free.

        Raises one of the Adapter* errors, or NoFreeSlotError when it needs a slot for
        good and none is left, with nothing changed.
        """
        started = time.monotonic()
        manifest = check_loadable(source.name, source.path, self.names, self._spec, self._config)
        shards = {layer_id: layer.readable_shard for layer_id, layer in self._layers.items()}
        adapter = read_adapter(source.name, manifest, shards)
        self._admit(source, adapter)
        logger.info(
            "adapter %s: %d experts, %.1f MiB on this rank, loaded in %.2f s",
            source.name,
            manifest.num_experts,
            adapter.num_bytes / 2**20,
            time.monotonic() - started,
        )

    def _admit(self, source: AdapterSource, adapter: HostAdapter) -> None:
        num_pages = pages_needed(adapter.manifest, self._layers)
        self._check_room(source, num_pages)
        self._loaded[source.adapter_id] = adapter
        self._pages[source.adapter_id] = num_pages
        if self._slots.has_room_for(source.adapter_id):
            try:
                self._bring({source.adapter_id}, may_evict=False)
            except EsftError as error:
                if self._is_resident or not isinstance(error, OutOfExpertMemoryError):
                    self._forget(source.adapter_id)
                    raise
                logger.info("adapter %s stays on the host for now: %s", source.name, error)
        if source.pinned:
            self._pinned.add(source.adapter_id)

    def _check_room(self, source: AdapterSource, num_pages: int) -> None:
        if self._max_pages is not None and num_pages > self._max_pages:
            raise DeviceMemoryError(
                f"adapter {source.name!r} needs up to {num_pages} pages, and adapters have "
                f"{self._max_pages} in all: raise --adapter-memory"
            )
        if self._is_resident:
            self._check_resident_room(source, num_pages)
        else:
            self._check_room_beside_pinned(source, num_pages)

    def _check_room_beside_pinned(self, source: AdapterSource, num_pages: int) -> None:
        """Requests of an adapter that never fits beside the pinned ones would wait for ever."""
        if source.pinned and len(self._pinned) >= self._slots.num_slots - 1:
            raise NoFreeSlotError(
                f"adapter {source.name!r} cannot be pinned: one of the {self._slots.num_slots} "
                "slots must stay for the others; load it unpinned, or raise --max-adapters"
            )
        pinned = sum(self._pages[adapter_id] for adapter_id in self._pinned)
        largest = max((n for i, n in self._pages.items() if i not in self._pinned), default=0)
        if source.pinned:
            pinned += num_pages
        else:
            largest = max(largest, num_pages)
        if self._max_pages is not None and pinned + largest > self._max_pages:
            raise OutOfExpertMemoryError(
                f"with adapter {source.name!r}, pinned adapters would take {pinned} pages and "
                f"another one up to {largest}, of {self._max_pages}: pin fewer, or raise "
                "--adapter-memory"
            )

    def _check_resident_room(self, source: AdapterSource, num_pages: int) -> None:
        if not self._slots.num_free:
            raise NoFreeSlotError(
                f"adapter {source.name!r} needs a slot of its own, and all "
                f"{self._slots.num_slots} are taken: unload an adapter, or raise --max-adapters"
            )
        used = sum(self._pages.values())
        if self._max_pages is not None and used + num_pages > self._max_pages:
            raise OutOfExpertMemoryError(
                f"adapter {source.name!r} needs up to {num_pages} pages of its own, and "
                f"{self._max_pages - used} of {self._max_pages} are left: unload an adapter, or "
                "raise --adapter-memory"
            )

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter that no request uses any more. Raises UnknownAdapterError."""
        if adapter_id not in self._loaded:
            raise UnknownAdapterError(f"adapter id {adapter_id} is not loaded")
        slot = self._slots.remove(adapter_id)
        if slot is not None:
            self._displace(slot)
        self._forget(adapter_id)

    def placed(self) -> list[PlacedAdapter]:
        """Everything on the device, for another engine's `adopt`."""
        return [
            PlacedAdapter(
                AdapterSource(adapter_id, a.name, str(a.manifest.path), adapter_id in self._pinned),
                self.slot_of(adapter_id),
                a.manifest.experts,
            )
            for adapter_id, a in self._loaded.items()
            if self._slots.slot_of(adapter_id) is not None
        ]

    def adopt(self, adapters: Iterable[PlacedAdapter], resident: Collection[int]) -> None:
        """Forget what was loaded; these adapters and base experts are in their slots now.

        For SharedLayers only, whose memory somebody else maps. Reads and writes no weight.
        """
        adapters = list(adapters)
        self._loaded = {a.source.adapter_id: _adopted(a, len(self._layers)) for a in adapters}
        self._pages = dict.fromkeys(self._loaded, 0)
        self._pinned = {a.source.adapter_id for a in adapters if a.source.pinned}
        slots = {a.source.adapter_id: a.adapter_slot for a in adapters}
        self._slots.restore(slots, self._pinned)
        for layer_id, layer in self._layers.items():
            if not isinstance(layer, SharedLayer):
                raise InvariantError(f"layer {layer_id} has memory of its own: it adopts nothing")
            layer.rebind(
                resident, {a.adapter_slot: tuple(a.experts.get(layer_id, ())) for a in adapters}
            )
        self.num_changes += 1

    def _forget(self, adapter_id: str) -> None:
        self._pinned.discard(adapter_id)
        del self._loaded[adapter_id]
        del self._pages[adapter_id]

    def can_run_together(self, adapter_ids: Iterable[str]) -> bool:
        """Whether one batch may hold all of these adapters."""
        return self._is_resident or self._slots.can_admit(adapter_ids)

    def ensure_on_device(self, adapter_ids: Iterable[str]) -> None:
        """Give every adapter of a batch a slot. Raises NoFreeSlotError, UnknownAdapterError.

        Pins take hold here and not when loading: the batches that are running were
        let in by `can_run_together` before, and must still fit beside the pinned ones.
        """
        wanted = set(adapter_ids)
        self._bring(wanted, may_evict=not self._is_resident)
        for adapter_id in wanted & self._pinned:
            self._slots.pin(adapter_id)

    def _bring(self, wanted: set[str], *, may_evict: bool) -> None:
        """All or nothing, but for adapters that were evicted to make room."""
        unknown = wanted - self._loaded.keys()
        if unknown:
            raise UnknownAdapterError(f"adapter ids {sorted(unknown)} are not loaded")
        placements = self._slots.admit(wanted)
        for placement in placements:
            for slot in placement.evicted_slots:
                self._displace(slot)
        for index, placement in enumerate(placements):
            try:
                self._place_evicting(placement, wanted if may_evict else None)
            except EsftError:
                for unplaced in placements[index:]:
                    self._slots.remove(unplaced.adapter_id)
                raise

    def _place_evicting(self, placement: Placement, wanted: set[str] | None) -> None:
        """Place one adapter; while memory is short, evict any but the `wanted` (None: evict none).

        Memory can be short though slots and pages were counted: without --adapter-memory the
        device may have less left than adapters need.
        """
        while True:
            try:
                self._place(placement.adapter_slot, self._loaded[placement.adapter_id])
                return
            except OutOfExpertMemoryError:
                slot = None if wanted is None else self._slots.evict_one(wanted)
                if slot is None:
                    raise
                self._displace(slot)

    def slot_of(self, adapter_id: str) -> int:
        """The adapter slot to tag tokens with. Raises InvariantError if it has none."""
        slot = self._slots.slot_of(adapter_id)
        if slot is None:
            raise InvariantError(f"adapter id {adapter_id} is in a batch but not on the device")
        return slot

    def _place(self, slot: int, adapter: HostAdapter) -> None:
        """All layers or none."""
        self.num_changes += 1
        placed: list[WovenLayer] = []
        try:
            for layer_id, layer in self._layers.items():
                expert_ids = adapter.manifest.experts.get(layer_id, ())
                layer.place(slot, adapter.experts.get(layer_id, {}), expert_ids)
                placed.append(layer)
        except EsftError:
            for layer in placed:
                layer.displace(slot)
            raise

    def _displace(self, slot: int) -> None:
        self.num_changes += 1
        for layer in self._layers.values():
            layer.displace(slot)

    def check_integrity(self) -> None:
        """Raises InvariantError when a map, a layer's memory or the slot table is wrong."""
        self._slots.check_integrity()
        for layer in self._layers.values():
            layer.check_integrity()
