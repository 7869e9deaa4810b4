"""The adapter plane of one rank: which adapters are loaded, and which are on the device.

    disk --load--> host cache --ensure_on_device--> adapter slots --slot_of--> batch tags

Load order: validate, read, (slot, weights, expert map), publish the name. Unload
is the reverse; SGLang's registry guarantees that no request uses the adapter by
then. Every rank makes the same calls in the same order and decides the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sgl_esft.config import EsftConfig
from sgl_esft.errors import (
    EsftError,
    InvariantError,
    NoFreeSlotError,
    OutOfExpertMemoryError,
    UnknownAdapterError,
)
from sgl_esft.formats.manifest import AdapterManifest, check_loadable
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.weave.adapter_pages import AdapterRoom, pages_needed
from sgl_esft.weave.host_cache import HostAdapter, OnRead, read_for_base
from sgl_esft.weave.moe_layer import ExpertShard, WovenLayer
from sgl_esft.weave.placer import Placer
from sgl_esft.weave.shared_layer import SharedLayer
from sgl_esft.weave.shared_mlp import NO_SHARED_MLPS, SharedMlps
from sgl_esft.weave.slot_table import SlotTable

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


class AdapterFiles(Protocol):
    """Where experts are in tiers: adapters' files, from which experts are read when needed."""

    def prepare(
        self, manifest: AdapterManifest, on_size: Callable[[int], None], on_read: OnRead
    ) -> Any:
        """What is to be registered, kept while it is held. For any thread.

        on_size is told the bytes that on_read will be told of. Raises one of the Adapter* errors.
        """

    def register(
        self, adapter_id: str, stored: Any, shards: Mapping[int, ExpertShard]
    ) -> Mapping[int, Mapping[int, Any]]:
        """Keep the files open. Returns layer id -> expert id -> place, of this rank's experts.

        Raises AdapterFormatError when they are not what was validated.
        """

    def forget(self, adapter_id: str) -> None:
        """Close the files of an adapter that is unloaded."""


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
    pages behind all adapters' slots, None = as many as the device has. `files`: given where
    experts are in tiers; a loaded adapter is then its places in files, and takes no host memory.
    `shared`: what adapters that tune shared experts need besides.
    """

    def __init__(
        self,
        layers: Mapping[int, WovenLayer],
        spec: MoeSpec,
        config: EsftConfig,
        *,
        is_resident: bool,
        max_pages: int | None = None,
        files: AdapterFiles | None = None,
        shared: SharedMlps = NO_SHARED_MLPS,
    ) -> None:
        self.layers = layers
        self._shared = shared
        self._spec = spec
        self._config = config
        self.is_resident = is_resident
        self.num_slots = config.max_adapters
        self._max_pages = max_pages
        self._files = files
        self._loaded: dict[str, HostAdapter] = {}
        self._pages: dict[str, int] = {}  # of each loaded adapter, the most it can take
        self._slots = SlotTable(config.max_adapters, max_pages, self._pages.__getitem__)
        self._pinned: set[str] = set()
        self._placing: dict[str, list[int]] = {}  # adapter id -> layers still without its weights
        self._last_wanted: set[str] = set()
        self._placer = Placer(layers, shared.layers, self._slots)
        self.uses = self._placer.uses

    @property
    def names(self) -> dict[str, str]:
        """Adapter name -> folder, of everything loaded."""
        return {a.name: str(a.manifest.path) for a in self._loaded.values()}

    def load(self, source: AdapterSource) -> None:
        """Validate and read an adapter; give it a slot if one is free.

        Raises one of the Adapter* errors, or NoFreeSlotError when it needs a slot for
        good and none is left, with nothing changed.
        """
        started = time.monotonic()
        adapter = self.read(source)
        self.admit(source, adapter)
        logger.info(
            "adapter %s: %d experts, %.1f MiB on this rank, loaded in %.2f s",
            source.name,
            adapter.manifest.num_experts,
            adapter.num_bytes / 2**20,
            time.monotonic() - started,
        )

    def read(
        self,
        source: AdapterSource,
        on_size: Callable[[int], None] = lambda num_bytes: None,
        on_read: OnRead = lambda num_bytes: None,
    ) -> HostAdapter:
        """Validate and read an adapter; changes nothing here, so another thread may call it.

        on_size is told the bytes that on_read will be told of. Raises one of the Adapter* errors.
        """
        manifest = check_loadable(source.name, source.path, (), self._spec, self._config)
        self._shared.check(source.name, manifest)
        if self._files is not None:
            stored = self._files.prepare(manifest, on_size, on_read)
            return HostAdapter(source.name, manifest, {}, stored=stored)
        shards = {layer_id: layer.readable_shard for layer_id, layer in self.layers.items()}
        device = next(iter(self.layers.values())).w13.device
        return read_for_base(
            source.name,
            manifest,
            self._spec,
            shards,
            self._config,
            on_size,
            on_read,
            shared=self._shared.rows,
            pin_memory=device.type == "cuda",
        )

    def admit(self, source: AdapterSource, adapter: HostAdapter) -> None:
        """Take in what was read, all at once. Raises as `load` does."""
        self.begin(source, adapter)
        try:
            self.finish(source.adapter_id)
        except EsftError as error:
            if self.is_resident or not isinstance(error, OutOfExpertMemoryError):
                self.unload(source.adapter_id)
                raise
            logger.info("adapter %s stays on the host for now: %s", source.name, error)

    def begin(self, source: AdapterSource, adapter: HostAdapter) -> int:
        """Take in what was read, its slot chosen if one is free and still without weights.

        Returns how often to call `place_next`. Raises as `load` does.
        """
        num_pages = pages_needed(adapter.manifest, self.layers)
        self._check_room(source.name, num_pages, pinned=source.pinned)
        if source.pinned:
            self._check_kept(source.name, adapter.manifest)
        if self._files is not None:
            shards = {layer_id: layer.shard for layer_id, layer in self.layers.items()}
            places = self._files.register(source.adapter_id, adapter.stored, shards)
            adapter = replace(adapter, experts=places)
        self._loaded[source.adapter_id] = adapter
        self._pages[source.adapter_id] = num_pages
        if source.pinned:
            self._pinned.add(source.adapter_id)
        if not self._slots.has_room_for(source.adapter_id):
            return 0
        self._slots.admit({source.adapter_id})
        self._placing[source.adapter_id] = list(self.layers)
        return len(self.layers)

    def place_next(self, adapter_id: str) -> int:
        """Copy one more layer of what `begin` took in; returns how many are left.

        Raises OutOfExpertMemoryError; the adapter is on the host only, then.
        """
        left, slot = self._placing.get(adapter_id, []), self._slots.slot_of(adapter_id)
        if not left or slot is None:  # placed, or its slot went to a batch's adapter
            self._placing.pop(adapter_id, None)
            return 0
        try:
            self._placer.place_layer(left[0], slot, self._loaded[adapter_id])
        except EsftError:
            self.stay_on_host(adapter_id)
            raise
        del left[0]
        return len(left)

    def finish(self, adapter_id: str) -> None:
        """Place all layers that are left. Raises OutOfExpertMemoryError as `place_next` does."""
        while self.place_next(adapter_id):
            pass

    def stay_on_host(self, adapter_id: str) -> None:
        """Take a loaded adapter off the device."""
        self._placing.pop(adapter_id, None)
        slot = self._slots.remove(adapter_id)
        if slot is not None:
            self._placer.displace(slot)

    def _check_kept(self, name: str, manifest: AdapterManifest) -> None:
        """Where experts are in tiers, pinned ones must leave rows for all others."""
        pinned = [self._loaded[adapter_id].manifest for adapter_id in self._pinned]
        for layer_id, layer in self.layers.items():
            num_kept = sum(len(each.experts.get(layer_id, ())) for each in (*pinned, manifest))
            if layer.max_kept is not None and num_kept > layer.max_kept:
                raise NoFreeSlotError(
                    f"adapter {name!r} cannot be pinned: pinned experts would take {num_kept} rows "
                    f"of layer {layer_id}, and may have {layer.max_kept}: pin fewer, or raise "
                    "--expert-cache"
                )

    def _check_room(self, name: str, num_pages: int, *, pinned: bool) -> None:
        slots = self._slots
        room = AdapterRoom(
            slots.num_slots, slots.num_free, self._max_pages, self._pages, self._pinned
        )
        room.check_alone(name, num_pages)
        if self.is_resident:
            room.check_resident(name, num_pages)
        else:
            room.check_beside_pinned(name, num_pages, pinned=pinned)

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter that no request uses any more. Raises UnknownAdapterError."""
        if adapter_id not in self._loaded:
            raise UnknownAdapterError(f"adapter id {adapter_id} is not loaded")
        self.stay_on_host(adapter_id)
        self._pinned.discard(adapter_id)
        del self._loaded[adapter_id]
        del self._pages[adapter_id]
        if self._files is not None:
            self._files.forget(adapter_id)

    def is_loaded(self, adapter_id: str) -> bool:
        """Whether the adapter is in host memory, so that batches may ask for it."""
        return adapter_id in self._loaded

    def name_of(self, adapter_id: str) -> str | None:
        """What requests call a loaded adapter; None if it is not loaded."""
        adapter = self._loaded.get(adapter_id)
        return None if adapter is None else adapter.name

    def set_pinned(self, adapter_id: str, pinned: bool) -> None:
        """Keep a loaded adapter in its slot, or let it go.

        Raises NoFreeSlotError or OutOfExpertMemoryError, with nothing changed, when the others
        would have no room beside it.
        """
        if not pinned:
            self._pinned.discard(adapter_id)
            self._slots.unpin(adapter_id)
            self._keep(adapter_id, False)
            return
        if adapter_id in self._pinned:
            return
        adapter = self._loaded[adapter_id]
        self._check_kept(adapter.name, adapter.manifest)
        if not self.is_resident:
            self._check_room(adapter.name, self._pages[adapter_id], pinned=True)
        self._pinned.add(adapter_id)

    def placements(self) -> dict[str, tuple[int, int]]:
        """Adapter id -> (adapter slot, bytes of memory behind it), of everything on the device."""
        return {
            adapter_id: (slot, self._num_bytes_of(slot))
            for adapter_id in self._loaded
            if (slot := self._slots.slot_of(adapter_id)) is not None
        }

    def _num_bytes_of(self, slot: int) -> int:
        routed = sum(layer.num_bytes_of(slot) for layer in self.layers.values())
        return routed + self._shared.num_bytes_of(slot)

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
        self._loaded = {a.source.adapter_id: _adopted(a, len(self.layers)) for a in adapters}
        self._pages = dict.fromkeys(self._loaded, 0)
        self._pinned = {a.source.adapter_id for a in adapters if a.source.pinned}
        slots = {a.source.adapter_id: a.adapter_slot for a in adapters}
        self._slots.restore(slots, self._pinned)
        self._placing = {}
        for layer_id, layer in self.layers.items():
            if not isinstance(layer, SharedLayer):
                raise InvariantError(f"layer {layer_id} has memory of its own: it adopts nothing")
            layer.rebind(
                resident, {a.adapter_slot: tuple(a.experts.get(layer_id, ())) for a in adapters}
            )
        self.uses.num_changes += 1

    def can_run_together(self, adapter_ids: Iterable[str]) -> bool:
        """Whether one batch may hold all of these adapters."""
        return self.is_resident or self._slots.can_admit(adapter_ids)

    def ensure_on_device(self, adapter_ids: Iterable[str]) -> None:
        """Give every adapter of a batch a slot. Raises NoFreeSlotError, UnknownAdapterError.

        Pins take hold here and not when loading: the batches that are running were
        let in by `can_run_together` before, and must still fit beside the pinned ones.
        """
        wanted = set(adapter_ids)
        fresh = wanted - self._last_wanted
        num_hits = sum(self._slots.slot_of(adapter_id) is not None for adapter_id in fresh)
        self.uses.num_hits += num_hits
        self.uses.num_misses += len(fresh) - num_hits
        self._last_wanted = wanted
        unknown = wanted - self._loaded.keys()
        if unknown:
            raise UnknownAdapterError(f"adapter ids {sorted(unknown)} are not loaded")
        adapters = {adapter_id: self._loaded[adapter_id] for adapter_id in wanted}
        self._placer.bring(adapters, may_evict=not self.is_resident)
        pinned = wanted & self._pinned
        for adapter_id in pinned and pinned.difference(self._slots.pinned):
            self._slots.pin(adapter_id)
            self._keep(adapter_id, True)

    def _keep(self, adapter_id: str, kept: bool) -> None:
        slot = self._slots.slot_of(adapter_id)
        if slot is not None:
            for layer in self.layers.values():
                layer.keep(slot, kept)

    def slot_of(self, adapter_id: str) -> int:
        """The adapter slot to tag tokens with. Raises InvariantError if it has none."""
        slot = self._slots.slot_of(adapter_id)
        if slot is None:
            raise InvariantError(f"adapter id {adapter_id} is in a batch but not on the device")
        return slot

    def check_integrity(self) -> None:
        """Raises InvariantError when a map, a layer's memory or the slot table is wrong."""
        self._slots.check_integrity()
        self._shared.check_integrity(
            {
                slot: adapter.shared.keys()
                for adapter_id, adapter in self._loaded.items()
                if (slot := self._slots.slot_of(adapter_id)) is not None
            }
        )
        for layer in self.layers.values():
            layer.check_integrity()
