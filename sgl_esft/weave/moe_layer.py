"""One woven MoE layer on one rank: its weights, its slots, its part of the expert map.

    SGLang's FusedMoE --bind--> [WovenLayer] <--place/displace-- placer.py
                                     |
                                  reroute.py (reads expert_map)

SGLang keeps owning the parameters; they are only longer than it knows, by the
slots of the adapters. Which of them have memory is expert_memory.py's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.weave import expert_tensor, page_source
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.expert_memory import SlotMemory
from sgl_esft.weave.expert_parameters import parameters_of
from sgl_esft.weave.slot_layout import SlotLayout


@dataclass(frozen=True)
class ExpertShard:
    """What one rank holds of a layer's experts."""

    expert_ids: Collection[int]  # routed experts of this rank, by the model's own ids
    intermediate: range  # rows of an expert's width I of this rank (tensor parallelism)


@dataclass(frozen=True)
class ExpertWeights:
    """One expert's tensors, cut to a rank's shard: on the host, or what a slot holds.

    w13: [2 * I_local, H], gate rows then up rows; w2: [H, I_local]; in the checkpoint's dtype.
    Quantised: numbers, packed as SGLang packs them, and scales as SGLang has them, w13's in the
    order of its rows or one for both halves. Without quantisation no scales.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        every = (self.w13, self.w2, self.w13_scale, self.w2_scale)
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


# One expert's numbers and scales of w13 or w2, as SGLang's loader lays them out -> its numbers as
# the device computes them, of the same shape. The scales are in the layer's dtype.
Pack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class WovenLayer:
    """A FusedMoE layer made longer by adapter slots.

    Where experts are quantised, w13 and w2 are numbers, of int4 two along the input in a byte.
    """

    layer_id: int
    shard: ExpertShard
    layout: SlotLayout
    w13: torch.Tensor  # [num_slots, 2 * I_local, H], device; SGLang's parameter
    w2: torch.Tensor  # [num_slots, H, I_local], device; SGLang's parameter
    expert_map: ExpertMap
    memory: SlotMemory
    is_up_first: bool = False  # SGLang keeps w13 as up rows then gate rows, for its runner backend
    scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of w13, w2 [num_slots, ...], device
    pack: Pack | None = None  # None: SGLang's layout is the device's
    adapter_runs: dict[int, range] = field(default_factory=dict)  # adapter slot -> mapped slots

    @classmethod
    def bind(cls, fused_moe: torch.nn.Module, layout: SlotLayout, pack: Pack | None = None) -> Self:
        """Take over a FusedMoE whose parameters were created with `layout`.

        Raises UnsupportedModelError when SGLang has replaced them since.
        """
        _, parameters = parameters_of(fused_moe)
        w13, w2 = (getattr(fused_moe, name) for name in parameters.weights)
        assert isinstance(w13, torch.Tensor)
        assert isinstance(w2, torch.Tensor)
        memory = fused_moe.esft_memory
        num_rows = cls.num_rows_of(memory, layout.num_slots)
        if w13.shape[0] != num_rows or w2.shape[0] != num_rows:
            raise InvariantError(
                f"layer {fused_moe.layer_id}: {w13.shape[0]} slots, planned {num_rows}"
            )
        expert_tensor.check_still_there(fused_moe, memory)  # type: ignore[arg-type]
        shard = _shard_of(fused_moe)
        row = base_row(
            num_experts=_int(fused_moe.num_experts),
            num_routed_global=_int(fused_moe.num_global_routed_experts),
            num_routed_local=len(shard.expert_ids),
            ep_rank=_int(fused_moe.moe_ep_rank),
        )
        return cls(
            layer_id=_int(fused_moe.layer_id),
            shard=shard,
            layout=layout,
            w13=w13.data,
            w2=w2.data,
            expert_map=ExpertMap(row, layout, w13.device, page_source.num_sources()),
            memory=memory,  # type: ignore[arg-type]
            scales=cls.scales_of(fused_moe, memory, layout),
            pack=pack,
            is_up_first=bool(
                getattr(
                    getattr(fused_moe, "quant_method", None), "load_up_proj_weight_first", False
                )
            ),
        )

    @classmethod
    def num_rows_of(cls, memory: object, num_slots: int) -> int:
        """Rows of the tensors of a layer with so many slots: as many, where none is virtual."""
        return num_slots

    @classmethod
    def scales_of(
        cls, fused_moe: torch.nn.Module, memory: object, layout: SlotLayout
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`expert_tensor.take_scales`."""
        return expert_tensor.take_scales(fused_moe, memory, layout)  # type: ignore[arg-type]

    @property
    def mapped_slots(self) -> set[int]:
        """Slots that may be read."""
        return self.memory.mapped_slots()

    @property
    def base_slots(self) -> Collection[int]:
        """Slots of the base's experts that are here."""
        return range(self.layout.num_base)

    @property
    def slots_by_adapter(self) -> Mapping[int, Collection[int]]:
        """Adapter slot -> slots of its experts that are here."""
        return self.adapter_runs

    @property
    def readable_shard(self) -> ExpertShard:
        """What is worth reading of an adapter: the experts that are here now."""
        return self.shard

    def place(
        self,
        adapter_slot: int,
        experts: Mapping[int, ExpertWeights],
        adapter_expert_ids: Sequence[int] = (),
    ) -> None:
        """Map slots, copy the adapter's experts in, then publish them in the expert map.

        `experts` holds this rank's experts of the layer, by expert id; it may be empty.
        `adapter_expert_ids` are those of all ranks, ascending.
        Raises OutOfExpertMemoryError; whatever it raises, nothing is changed.
        """
        region = self.layout.adapter_range(adapter_slot)
        if len(experts) > len(region):
            raise InvariantError(f"{len(experts)} experts for {len(region)} slots")
        run = self.memory.choose(region, len(experts))
        expert_to_slot = dict(zip(sorted(experts), run, strict=True))
        self.memory.map(run)
        try:
            for expert_id, slot in expert_to_slot.items():
                self.write(slot, experts[expert_id])
        except BaseException:
            self.release(run)
            raise
        self.adapter_runs[adapter_slot] = run
        self.expert_map.write(adapter_slot, expert_to_slot)

    def at(self, slot: int) -> ExpertWeights:
        """What a slot holds; of one without memory nothing may be read but shapes."""
        scales = () if self.scales is None else (scale[slot] for scale in self.scales)
        return ExpertWeights(self.w13[slot], self.w2[slot], *scales)

    def write(self, slot: int, expert: ExpertWeights) -> None:
        """Copy an expert into a mapped slot, its rows in the order of the base's.

        Raises InvariantError for one that is quantised in another way than the layer.
        """
        own = self.at(slot)
        if self.scales is not None or expert.w13_scale is not None:
            _check_alike(expert, own)
        if self.pack is not None:
            expert = _packed(expert, own, self.pack)
        for number, (theirs, ours) in enumerate(zip(expert.tensors, own.tensors, strict=True)):
            is_of_w13 = number % 2 == 0
            _copy(ours, theirs, is_swapped=is_of_w13 and self.is_up_first)

    def displace(self, adapter_slot: int) -> None:
        """The reverse of `place`: the map first, then the slots' memory."""
        self.expert_map.clear(adapter_slot)
        run = self.adapter_runs.pop(adapter_slot, None)
        if run:
            wait_for_readers(self.w13.device)
            self.release(run)

    def release(self, slots: range) -> None:
        """Take the slots' memory back; a scale that is left there must not pass for another's."""
        for scale in self.scales or ():
            scale[slots.start : slots.stop] = torch.nan
        self.memory.unmap(slots)

    @property
    def max_kept(self) -> int | None:
        """The most experts that may be kept here for good; None = all that have slots."""
        return None

    def keep(self, adapter_slot: int, kept: bool) -> None:
        """Whether the adapter's experts stay on the device: here they do until it is displaced."""

    def num_bytes_of(self, adapter_slot: int) -> int:
        """Bytes of the experts in an adapter slot, on this rank."""
        return len(self.adapter_runs.get(adapter_slot, ())) * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """One expert's, all its tensors together."""
        return self.at(0).num_bytes

    def check_integrity(self) -> None:
        """Raises InvariantError when the map names an unmapped slot or the memory's books lie."""
        self.memory.check_integrity()
        self.expert_map.check_integrity(self.memory.mapped_slots())


def _copy(ours: torch.Tensor, theirs: torch.Tensor, *, is_swapped: bool) -> None:
    """`is_swapped`: halves change places; one number for both has none."""
    if not is_swapped or ours.ndim == 0:
        ours.copy_(theirs)
        return
    for half, other in zip(ours.chunk(2), reversed(theirs.chunk(2)), strict=True):
        half.copy_(other)


def _check_alike(expert: ExpertWeights, own: ExpertWeights) -> None:
    """Copying broadcasts: one scale would do for a thousand. Scales may be cast, as SGLang does."""
    seen, wanted = ([*map(_described, each.tensors)] for each in (expert, own))
    if seen != wanted:
        raise InvariantError(f"an expert of {', '.join(seen)} for a slot of {', '.join(wanted)}")


def _packed(expert: ExpertWeights, own: ExpertWeights, pack: Pack) -> ExpertWeights:
    """`own`: of the slot it is for."""
    if own.w13_scale is None or expert.w13_scale is None or expert.w2_scale is None:
        raise InvariantError("an expert without scales was to be packed")
    scales = [scale.to(own.w13_scale.dtype) for scale in (expert.w13_scale, expert.w2_scale)]
    return ExpertWeights(pack(expert.w13, scales[0]), pack(expert.w2, scales[1]), *scales)


def _described(tensor: torch.Tensor) -> str:
    dtype = "float" if tensor.dtype.itemsize > 1 else str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


def wait_for_readers(device: torch.device) -> None:
    """Call before memory goes: it must outlive the kernels that were started on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def plan_layout(
    fused_moe: torch.nn.Module, num_base: int, num_adapters: int, max_experts_per_adapter: int
) -> SlotLayout:
    """The slots of a FusedMoE that is just creating `num_base` experts' weights."""
    num_routed = num_base - _int(fused_moe.num_fused_shared_experts)
    return SlotLayout.plan(
        num_base=num_base,
        num_routed=num_routed,
        num_adapters=num_adapters,
        max_experts_per_adapter=max_experts_per_adapter,
    )


def _shard_of(fused_moe: torch.nn.Module) -> ExpertShard:
    num_local = _int(fused_moe.num_local_experts) - _int(fused_moe.num_fused_shared_experts)
    first_expert = _int(fused_moe.moe_ep_rank) * num_local
    width = _int(fused_moe.intermediate_size_per_partition)
    first_row = _int(fused_moe.moe_tp_rank) * width
    return ExpertShard(
        expert_ids=range(first_expert, first_expert + num_local),
        intermediate=range(first_row, first_row + width),
    )


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise UnsupportedModelError(f"FusedMoE describes itself by {value!r}, not a number")
    return value
