"""A woven layer whose memory belongs to a page source: fixed slots, changing residents.

    slot e                       base expert e, for every expert id of the model
    B + a*E + k                  adapter slot a's expert that is k-th by id, of all the adapter has

Slots are the same on every device and in every engine, so an expert that moves between devices
is the same pages at the same place (ElasticMoE section 4.6, vpage-remap). An expert that is not
here has slot -1 in the map, the adapters' experts of the same id with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from sgl_esft.errors import InvariantError
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights, WovenLayer, wait_for_readers


@dataclass
class SharedLayer(WovenLayer):
    """A WovenLayer that is told which experts are on this rank."""

    resident: frozenset[int] = frozenset()  # base experts here, by id
    adapter_experts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by adapter slot

    @property
    def base_slots(self) -> Collection[int]:
        return self.resident.union(range(self.layout.num_routed, self.layout.num_base))

    @property
    def slots_by_adapter(self) -> Mapping[int, Collection[int]]:
        return {owner: self.slots_of(owner).values() for owner in self.adapter_experts}

    @property
    def readable_shard(self) -> ExpertShard:
        return replace(self.shard, expert_ids=self.resident)

    def slots_of(self, adapter_slot: int) -> dict[int, int]:
        """Expert id -> slot, of the adapter's experts that are here."""
        return self._slots_for(adapter_slot, self.adapter_experts.get(adapter_slot, ()))

    def _slots_for(self, adapter_slot: int, expert_ids: Sequence[int]) -> dict[int, int]:
        region = self.layout.adapter_range(adapter_slot)
        slots = zip(expert_ids, region, strict=False)
        return {expert_id: slot for expert_id, slot in slots if expert_id in self.resident}

    def _base_row(self, expert_ids: Collection[int]) -> torch.Tensor:
        """[M] int32: the slots of these experts and of the shared ones, -1 for others."""
        row = torch.full_like(self.expert_map.base_row, -1)
        num_routed = self.layout.num_routed
        ids = torch.tensor(sorted(expert_ids), dtype=torch.int32, device=row.device)
        row[ids.long()] = ids
        row[num_routed:] = torch.arange(num_routed, row.numel(), dtype=row.dtype)
        return row

    def place(
        self,
        adapter_slot: int,
        experts: Mapping[int, ExpertWeights],
        adapter_expert_ids: Sequence[int] = (),
    ) -> None:
        slots = self._slots_for(adapter_slot, adapter_expert_ids)
        if set(slots) != set(experts):
            raise InvariantError(f"experts {sorted(experts)} for slots {slots}")
        mapped: list[int] = []
        try:
            for expert_id, slot in slots.items():
                self.memory.map(range(slot, slot + 1))
                mapped.append(slot)
                self.write(slot, experts[expert_id])
        except BaseException:
            for slot in mapped:
                self.memory.unmap(range(slot, slot + 1))
            raise
        self.adapter_experts[adapter_slot] = tuple(adapter_expert_ids)
        self.expert_map.write(adapter_slot, slots)

    def num_bytes_of(self, adapter_slot: int) -> int:
        return len(self.slots_of(adapter_slot)) * self.slot_bytes

    def displace(self, adapter_slot: int) -> None:
        slots = self.slots_of(adapter_slot)
        self.expert_map.clear(adapter_slot)
        self.adapter_experts.pop(adapter_slot, None)
        if slots:
            wait_for_readers(self.w13.device)
        for slot in slots.values():
            self.memory.unmap(range(slot, slot + 1))

    def rebind(
        self,
        resident: Collection[int],
        adapters: Mapping[int, tuple[int, ...]],
        computed: Sequence[Collection[int]] = (),
    ) -> None:
        """Other experts are here now, with their memory mapped; `adapters` by adapter slot.

        `computed`: of the residents, those that this rank computes for tokens of each source;
        nothing = all of them for all tokens, as it is where no expert has a copy.
        """
        self.resident = frozenset(resident)
        self.adapter_experts = dict(adapters)
        rows = [self._base_row(ids) for ids in computed or [self.resident]]
        self.expert_map.rebase(torch.stack(rows))
        for adapter_slot in adapters:
            self.expert_map.write(adapter_slot, self.slots_of(adapter_slot))
