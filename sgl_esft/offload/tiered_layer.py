"""A woven layer whose slots are virtual: its experts are in fewer rows, or elsewhere.

    placer.py --place/displace--> [TieredLayer] --places of its slots--> tier.py
    create_weights --[create_rows]--> parameters w13, w2, their scales [num_rows, ...]: all memory

Placing an adapter moves no weight: its slots are told where its experts lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.offload.rows import NOT_HERE
from sgl_esft.offload.source import ExpertPlace
from sgl_esft.offload.tier import ExpertTier
from sgl_esft.support import TIER_SCHEMES
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_memory import PaddedMemory, SlotMemory, SlotUsage
from sgl_esft.weave.expert_parameters import parameters_of
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout


class RowMemory(PaddedMemory):
    """The books of virtual slots: which of them have an expert somewhere; memory is the rows'."""

    def __init__(self, num_slots: int, rows: SlotMemory) -> None:
        super().__init__(num_slots, ())
        self.rows = rows

    def usage(self) -> SlotUsage:
        """Of the rows, with their scales: what is really there."""
        return self.rows.usage()

    def check_integrity(self) -> None:
        self.rows.check_integrity()


@dataclass
class TieredLayer(WovenLayer):
    """A WovenLayer over rows. `tier` and `index`, its number in it, are given when it is bound."""

    tier: ExpertTier | None = None
    index: int = -1

    @classmethod
    def num_rows_of(cls, memory: object, num_slots: int) -> int:
        if not isinstance(memory, RowMemory):
            raise InvariantError(f"{num_slots} virtual slots without rows")
        return len(memory.rows.mapped_slots())

    @classmethod
    def scales_of(
        cls, fused_moe: torch.nn.Module, memory: object, layout: SlotLayout
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One for each row; what they hold comes with the row's expert."""
        num_rows = cls.num_rows_of(memory, layout.num_slots)
        assert isinstance(memory, RowMemory)
        return expert_tensor.take_scales(fused_moe, memory.rows, layout, num_rows)

    @property
    def base_slots(self) -> Collection[int]:
        """Those that are in rows now."""
        return self._in_rows(range(self.layout.num_base))

    @property
    def slots_by_adapter(self) -> Mapping[int, Collection[int]]:
        """Those that are in rows now."""
        return {owner: self._in_rows(run) for owner, run in self.adapter_runs.items()}

    def _in_rows(self, slots: range) -> list[int]:
        if self.tier is None:
            return []
        where = self.tier.decisions.where(self.index)
        return [slot for slot in slots if where[slot] != NOT_HERE]

    def join(self, tier: ExpertTier, index: int, base: Mapping[int, ExpertPlace]) -> None:
        """From now on the tier brings its experts; `base`: slot -> place of the base's."""
        self.tier, self.index = tier, index
        tier.add(index, base)

    def place(
        self,
        adapter_slot: int,
        experts: Mapping[int, Any],
        adapter_expert_ids: Sequence[int] = (),
    ) -> None:
        """`experts`: expert id -> ExpertPlace of this rank's experts."""
        region = self.layout.adapter_range(adapter_slot)
        if len(experts) > len(region) or self.tier is None:
            raise InvariantError(f"{len(experts)} experts for {len(region)} slots of {self.tier}")
        run = self.memory.choose(region, len(experts))
        expert_to_slot = dict(zip(sorted(experts), run, strict=True))
        self.memory.map(run)
        self.tier.add(self.index, {slot: experts[e] for e, slot in expert_to_slot.items()})
        self.adapter_runs[adapter_slot] = run
        self.expert_map.write(adapter_slot, expert_to_slot)

    def displace(self, adapter_slot: int) -> None:
        self.expert_map.clear(adapter_slot)
        run = self.adapter_runs.pop(adapter_slot, None)
        if run and self.tier is not None:
            self.tier.remove(self.index, run)
            self.memory.unmap(run)

    @property
    def max_kept(self) -> int | None:
        """Half of the rows: all experts that are not kept go through the others."""
        return int(self.w13.shape[0]) // 2

    def keep(self, adapter_slot: int, kept: bool) -> None:
        """Once in their rows, the experts of an adapter that is kept do not leave for others."""
        run = self.adapter_runs.get(adapter_slot)
        if run and self.tier is not None:
            change = self.tier.decisions.pin if kept else self.tier.decisions.unpin
            change(self.index, run)

    def num_bytes_of(self, adapter_slot: int) -> int:
        """Bytes of the adapter's experts that are in rows now."""
        return len(self._in_rows(self.adapter_runs.get(adapter_slot, range(0)))) * self.slot_bytes


def skip_routed_experts(
    param: torch.nn.Parameter, loaded_weight: torch.Tensor, *_: Any, **__: Any
) -> None:
    """SGLang's weight loader for parameters whose experts are read when they are routed to."""


def create_rows(
    layer: torch.nn.Module,
    layout: SlotLayout,
    config: EsftConfig,
    create: Callable[..., None],
    budget_bytes: int | None,
) -> RowMemory:
    """Create w13 and w2 with rows for `config.tiers`, and let the checkpoint's experts pass unread.

    `create(num_rows, weight_loader=...)` registers the parameters, as SGLang does. Raises
    DeviceMemoryError, and UnsupportedModelError where shared experts are among the routed ones, or
    experts are quantised in a way that was not shown in tiers.
    """
    assert config.tiers is not None
    if layout.num_base != layout.num_routed:
        raise UnsupportedModelError(
            "--expert-cache: this model's shared experts are fused with the routed ones; add "
            "--disable-shared-experts-fusion"
        )
    num_rows = min(config.tiers.num_rows, layout.num_slots)
    rows = expert_tensor.create_mapped(
        layer,
        num_rows,
        num_rows,
        config,
        functools.partial(create, num_rows, weight_loader=skip_routed_experts),
        budget_bytes,
    )
    scheme, _ = parameters_of(layer)
    if scheme is not None and scheme not in TIER_SCHEMES:
        raise UnsupportedModelError(
            f"--expert-cache: experts in {scheme} were not shown in tiers, those in "
            f"{', '.join(sorted(TIER_SCHEMES))} were: leave it out, or quantise the base anew"
        )
    memory = RowMemory(layout.num_slots, rows)
    memory.map(range(layout.num_base))
    return memory
