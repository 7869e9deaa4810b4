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

from sgl_esft import adapter_format
from sgl_esft.adapter_format import AdapterManifest
from sgl_esft.config import EsftConfig
from sgl_esft.errors import (
    AdapterExistsError,
    InvariantError,
    NoFreeSlotError,
    UnknownAdapterError,
)
from sgl_esft.host_cache import HostAdapter, read_adapter
from sgl_esft.model_spec import MoeSpec
from sgl_esft.moe_layer import WovenLayer
from sgl_esft.slot_table import SlotTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSource:
    """What is to be loaded: the id is new for every load, the name is what requests say."""

    adapter_id: str
    name: str
    path: str
    pinned: bool = False


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


class AdapterPlane:
    """Loaded adapters and their places; `layers` maps a model's layer id to its woven layer.

    With `is_resident` an adapter takes its slot when it is loaded and keeps it
    until it is unloaded: under DP attention the ranks see different batches, and
    only the order of loads is common to them. Otherwise slots are a cache over
    the host's adapters, least recently used first out.
    """

    def __init__(
        self,
        layers: Mapping[int, WovenLayer],
        spec: MoeSpec,
        config: EsftConfig,
        *,
        is_resident: bool,
    ) -> None:
        self._layers = layers
        self._spec = spec
        self._config = config
        self._is_resident = is_resident
        self._slots = SlotTable(config.max_adapters)
        self._loaded: dict[str, HostAdapter] = {}
        self._pinned: set[str] = set()

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
        manifest = check_loadable(source.name, source.path, self.names, self._spec, self._config)
        shards = {layer_id: layer.shard for layer_id, layer in self._layers.items()}
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
        self._check_room(source)
        self._loaded[source.adapter_id] = adapter
        if source.pinned:
            self._pinned.add(source.adapter_id)
        if self._slots.num_free:
            self._bring({source.adapter_id})

    def _check_room(self, source: AdapterSource) -> None:
        if self._is_resident:
            if self._slots.num_free:
                return
            raise NoFreeSlotError(
                f"adapter {source.name!r} needs a slot of its own, and all "
                f"{self._slots.num_slots} are taken: unload an adapter, or raise --max-adapters"
            )
        if source.pinned and len(self._pinned) >= self._slots.num_slots - 1:
            raise NoFreeSlotError(
                f"adapter {source.name!r} cannot be pinned: one of the {self._slots.num_slots} "
                "slots must stay for the others; load it unpinned, or raise --max-adapters"
            )

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter that no request uses any more. Raises UnknownAdapterError."""
        if adapter_id not in self._loaded:
            raise UnknownAdapterError(f"adapter id {adapter_id} is not loaded")
        slot = self._slots.remove(adapter_id)
        if slot is not None:
            self._displace(slot)
        self._pinned.discard(adapter_id)
        del self._loaded[adapter_id]

    def can_run_together(self, adapter_ids: Iterable[str]) -> bool:
        """Whether one batch may hold all of these adapters."""
        return self._is_resident or self._slots.can_admit(adapter_ids)

    def ensure_on_device(self, adapter_ids: Iterable[str]) -> None:
        """Give every adapter of a batch a slot. Raises NoFreeSlotError, UnknownAdapterError.

        Pins take hold here and not when loading: the batches that are running were
        let in by `can_run_together` before, and must still fit beside the pinned ones.
        """
        wanted = set(adapter_ids)
        self._bring(wanted)
        for adapter_id in wanted & self._pinned:
            self._slots.pin(adapter_id)

    def _bring(self, wanted: set[str]) -> None:
        unknown = wanted - self._loaded.keys()
        if unknown:
            raise UnknownAdapterError(f"adapter ids {sorted(unknown)} are not loaded")
        for placement in self._slots.admit(wanted):
            if placement.evicted is not None:
                self._displace(placement.adapter_slot)
            self._place(placement.adapter_slot, self._loaded[placement.adapter_id])

    def slot_of(self, adapter_id: str) -> int:
        """The adapter slot to tag tokens with. Raises InvariantError if it has none."""
        slot = self._slots.slot_of(adapter_id)
        if slot is None:
            raise InvariantError(f"adapter id {adapter_id} is in a batch but not on the device")
        return slot

    def _place(self, slot: int, adapter: HostAdapter) -> None:
        for layer_id, layer in self._layers.items():
            layer.place(slot, adapter.experts.get(layer_id, {}))

    def _displace(self, slot: int) -> None:
        for layer in self._layers.values():
            layer.displace(slot)

    def check_integrity(self) -> None:
        """Raises InvariantError when a map names an unmapped slot or the slot table is wrong."""
        self._slots.check_integrity()
        for layer in self._layers.values():
            layer.expert_map.check_integrity(layer.mapped_slots)
