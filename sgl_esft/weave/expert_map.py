"""The ESFT expert map: for each MoE layer, adapter slot and expert id, the slot to use.

    moe_layer.py --write/clear--> [expert_map] --rows--> reroute.py

The paper's Pi (ExpertWeave section 4.1), with one more row that is the base's.
This module is the only writer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sgl_esft.errors import InvariantError
from sgl_esft.weave.slot_layout import SlotLayout


class ExpertMap:
    """One MoE layer's map on one rank.

    table: [S * (N + 1), M] int32 on the device, M the model's expert ids (fused shared
    experts included). S is 1, or where experts have copies the number of ranks that
    tokens may come from: who computes an expert depends on that (batch_tags.py,
    `rows_of_source`). Of each S, row a is adapter slot a's, row N the base's. A value is a
    slot of this rank's expert tensor, or -1 for an expert that another rank computes.
    The tensor is updated in place and never replaced, so captured graphs see updates.
    """

    def __init__(
        self,
        base_row: torch.Tensor,
        layout: SlotLayout,
        device: torch.device | str,
        num_sources: int = 1,
    ) -> None:
        """base_row: [M] int32, this rank's slot of each expert id or -1; adapters start as base."""
        self.layout = layout
        self.num_sources = num_sources
        rows = num_sources * (layout.num_adapters + 1)
        self.table = base_row.to(device).repeat(rows, 1)
        self._by_source = self.table.view(num_sources, layout.num_adapters + 1, -1)

    @property
    def num_rows(self) -> int:
        """S * (N + 1): what a batch's tags must be below."""
        return self.num_sources * (self.layout.num_adapters + 1)

    @property
    def base_row(self) -> torch.Tensor:
        """[M] int32 view: what SGLang itself would use, where experts have no copies."""
        return self.table[-1]

    def write(self, adapter_slot: int, expert_to_slot: Mapping[int, int]) -> None:
        """Make adapter_slot the base, except for the given expert ids. Weights must be there first.

        Raises InvariantError for an adapter slot that is not there and for a slot outside the
        adapter's own range, before any change.
        """
        own = self.layout.adapter_range(adapter_slot)
        strays = {e: s for e, s in expert_to_slot.items() if s not in own}
        if strays:
            raise InvariantError(f"slots {strays} are not in {own} of adapter slot {adapter_slot}")
        rows = self._by_source[:, -1].clone()
        if expert_to_slot:
            slots = torch.tensor(
                list(expert_to_slot.values()), dtype=torch.int32, device=rows.device
            )
            ids = list(expert_to_slot)
            # A copy that is here is not this rank's to compute for tokens of each source.
            is_elsewhere = (rows[:, ids] < 0) & (self.num_sources > 1)
            rows[:, ids] = torch.where(is_elsewhere, -1, slots)
        self._by_source[:, adapter_slot].copy_(rows)

    def clear(self, adapter_slot: int) -> None:
        """Make adapter_slot the base again. Call before its weights go."""
        self.layout.adapter_range(adapter_slot)  # a row index alone would also take the base's, -1
        self._by_source[:, adapter_slot].copy_(self._by_source[:, -1])

    def rebase(self, base_rows: torch.Tensor) -> None:
        """Other base experts are here: [M] int32, or [S, M] where that differs by source.

        Every adapter becomes the base again.
        """
        rows = base_rows.to(self.table.device).view(-1, 1, self.table.shape[1])
        self._by_source.copy_(rows.expand_as(self._by_source))

    def check_integrity(self, mapped_slots: set[int]) -> None:
        """Raises InvariantError when a value is neither -1 nor one of `mapped_slots`."""
        strays = set(self.table.unique().tolist()) - mapped_slots - {-1}
        if strays:
            raise InvariantError(f"the expert map names unmapped slots {sorted(strays)}")


def base_row(
    *, num_experts: int, num_routed_global: int, num_routed_local: int, ep_rank: int
) -> torch.Tensor:
    """[num_experts] int32: SGLang's own slot of each expert id on this rank, -1 if elsewhere.

    Routed experts are dealt to ranks in runs; fused shared experts, whose ids
    follow the routed ones, are on every rank, after its routed experts.
    """
    row = torch.full((num_experts,), -1, dtype=torch.int32)
    first = ep_rank * num_routed_local
    row[first : first + num_routed_local] = torch.arange(num_routed_local, dtype=torch.int32)
    num_shared = num_experts - num_routed_global
    row[num_routed_global:] = torch.arange(num_shared, dtype=torch.int32) + num_routed_local
    return row
