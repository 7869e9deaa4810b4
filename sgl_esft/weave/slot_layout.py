"""Where experts sit along the first dimension of one rank's expert tensor. Pure arithmetic.

    slot            owner
    [0, B)          base experts of this rank, as SGLang numbers them (B of them)
    [B + a*E, ...)  adapter slot a, a = 0..N-1, E slots each

With expert parallelism a rank holds an adapter's expert exactly when it holds
the base expert of the same id, so E = min(E_max, routed experts of this rank)
(ExpertWeave section 4.1, with M taken per rank).
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_esft.errors import InvariantError


@dataclass(frozen=True)
class SlotLayout:
    """The layout of one MoE layer's slots on one rank."""

    num_base: int  # B: SGLang's local experts, fused shared experts included
    num_routed: int  # of them, routed
    num_adapters: int  # N
    slots_per_adapter: int  # E

    @classmethod
    def plan(
        cls, *, num_base: int, num_routed: int, num_adapters: int, max_experts_per_adapter: int
    ) -> SlotLayout:
        return cls(num_base, num_routed, num_adapters, min(max_experts_per_adapter, num_routed))

    @property
    def num_slots(self) -> int:
        return self.num_base + self.num_adapters * self.slots_per_adapter

    def adapter_range(self, adapter_slot: int) -> range:
        """The slots reserved for one adapter slot. Raises InvariantError if there is none such."""
        if not 0 <= adapter_slot < self.num_adapters:
            raise InvariantError(f"adapter slot {adapter_slot} is not in [0, {self.num_adapters})")
        start = self.num_base + adapter_slot * self.slots_per_adapter
        return range(start, start + self.slots_per_adapter)
