"""Adapters' weights in their slots: placed in all layers of a rank or in none, and taken out.

plane.py --host adapters--> [Placer] --slots--> SlotTable (who leaves for whom)
                                     --weights, expert map--> moe_layer.py, layer by layer
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_esft.errors import EsftError, OutOfExpertMemoryError
from sgl_esft.weave.host_cache import HostAdapter
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.shared_mlp import SharedMlp
from sgl_esft.weave.slot_table import Placement, SlotTable, SlotUses


class Placer:
    """The layers of one rank, and the slots that are alike in all of them."""

    def __init__(
        self, layers: Mapping[int, WovenLayer], shared: Mapping[int, SharedMlp], slots: SlotTable
    ) -> None:
        self._layers = layers
        self._shared = shared
        self._slots = slots
        self.uses = SlotUses()

    def bring(self, wanted: Mapping[str, HostAdapter], *, may_evict: bool) -> None:
        """Give every adapter a slot: all or nothing, but for those that were evicted for it.

        wanted: adapter id -> adapter. may_evict: whether others leave while memory is short.
        Raises NoFreeSlotError, OutOfExpertMemoryError.
        """
        placements = self._slots.admit(wanted)
        for placement in placements:
            for slot in placement.evicted_slots:
                self._evict(slot)
        for index, placement in enumerate(placements):
            try:
                self._place_evicting(placement, wanted, may_evict=may_evict)
            except EsftError:
                for unplaced in placements[index:]:
                    self._slots.remove(unplaced.adapter_id)
                raise

    def _place_evicting(
        self, placement: Placement, wanted: Mapping[str, HostAdapter], *, may_evict: bool
    ) -> None:
        """Memory can be short though slots and pages were counted: without --adapter-memory the
        device may have less left than adapters need.
        """
        while True:
            try:
                self._place(placement.adapter_slot, wanted[placement.adapter_id])
                return
            except OutOfExpertMemoryError:
                slot = self._slots.evict_one(wanted) if may_evict else None
                if slot is None:
                    raise
                self._evict(slot)

    def _evict(self, slot: int) -> None:
        self.uses.num_evictions += 1
        self.displace(slot)

    def _place(self, slot: int, adapter: HostAdapter) -> None:
        """All layers or none."""
        begun: list[int] = []
        try:
            for layer_id in self._layers:
                begun.append(layer_id)
                self.place_layer(layer_id, slot, adapter)
        except EsftError:
            for layer_id in begun:
                self._displace_layer(layer_id, slot)
            raise

    def place_layer(self, layer_id: int, slot: int, adapter: HostAdapter) -> None:
        """One layer's experts. Raises OutOfExpertMemoryError, with this layer unchanged."""
        self.uses.num_changes += 1
        expert_ids = adapter.manifest.experts.get(layer_id, ())
        self._layers[layer_id].place(slot, adapter.experts.get(layer_id, {}), expert_ids)
        if layer_id in adapter.shared:
            self._shared[layer_id].place(slot, adapter.shared[layer_id])

    def displace(self, slot: int) -> None:
        """Take what is in the slot out of every layer."""
        self.uses.num_changes += 1
        for layer_id in self._layers:
            self._displace_layer(layer_id, slot)

    def _displace_layer(self, layer_id: int, slot: int) -> None:
        if layer_id in self._shared:
            self._shared[layer_id].displace(slot)
        self._layers[layer_id].displace(slot)
