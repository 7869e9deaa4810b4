"""Woven layers without SGLang: DeepSeek-V2-Lite's expert, on the memory that a bench chooses.

    Subject (device, backend, library) -> [make_layer] -> WovenLayer -> place, displace, forward

A contract simulator's memory lies in this process, so torch's CPU tensors are laid over it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import sgl_vmm
import torch
from torch.utils.dlpack import from_dlpack

from sgl_esft.weave.expert_map import ExpertMap
from sgl_esft.weave.expert_memory import ExpertArena, PaddedMemory, SlotMemory
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights, WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert; the default is DeepSeek-V2-Lite's, 5.5 and 2.75 pages of 2 MiB."""

    hidden: int = 2048
    width: int = 1408

    @property
    def w13(self) -> tuple[int, int]:
        return (2 * self.width, self.hidden)

    @property
    def w2(self) -> tuple[int, int]:
        return (self.hidden, self.width)

    @property
    def slot_bytes(self) -> tuple[int, int]:
        sizes = (rows * columns * DTYPE.itemsize for rows, columns in (self.w13, self.w2))
        w13, w2 = sizes
        return (w13, w2)

    @property
    def num_bytes(self) -> int:
        return sum(self.slot_bytes)


@dataclass(frozen=True)
class Subject:
    """Where a bench's layers live."""

    backend: str = "host"
    library: str = ""  # a contract simulator's
    page_bytes: int = 2 << 20

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" and not self.library else "cpu"

    def open_arena(self, *, capacity_bytes: int = 0, populate: bool = True) -> ExpertArena:
        """Host arenas are bounded, so that one bench can have several."""
        backend = sgl_vmm.open_backend(
            self.backend,
            page_bytes=self.page_bytes,
            capacity_bytes=capacity_bytes,
            populate=populate,
            library=self.library,
        )
        return ExpertArena(backend, max(self.page_bytes, backend.granularity))

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_layer(
    subject: Subject,
    layout: SlotLayout,
    shape: ExpertShape,
    arena: ExpertArena | None,
    layer_id: int = 0,
) -> WovenLayer:
    """A layer on an arena's pages, or padded where that is None; nothing is mapped yet."""
    shapes = [(layout.num_slots, *shape.w13), (layout.num_slots, *shape.w2)]
    memory: SlotMemory
    if arena is None:
        memory = PaddedMemory(layout.num_slots, shape.slot_bytes)
        w13, w2 = (torch.empty(each, dtype=DTYPE, device=subject.device) for each in shapes)
    else:
        memory = arena.make_layer(layout.num_slots, shape.slot_bytes)
        pairs = zip(memory.tensors, shapes, strict=True)
        w13, w2 = (_tensor_over(subject, tensor, each) for tensor, each in pairs)
    # Experts beyond the base's slots are another rank's, as under expert parallelism.
    base_row = torch.arange(max(layout.num_routed, layout.num_base), dtype=torch.int32)
    base_row[layout.num_base :] = -1
    return WovenLayer(
        layer_id=layer_id,
        shard=ExpertShard(range(layout.num_base), range(shape.width)),
        layout=layout,
        w13=w13,
        w2=w2,
        expert_map=ExpertMap(base_row, layout, subject.device),
        memory=memory,
    )


def _tensor_over(
    subject: Subject, memory: sgl_vmm.VirtualTensor, shape: tuple[int, ...]
) -> torch.Tensor:
    if not subject.library:
        return from_dlpack(memory.to_dlpack(list(shape), "bfloat16"))
    num_bytes = memory.state().num_slots * memory.state().slot_bytes
    raw = (ctypes.c_char * num_bytes).from_address(memory.address)
    tensor = torch.frombuffer(raw, dtype=DTYPE).view(shape)
    tensor._keeps_alive = memory  # type: ignore[attr-defined]
    return tensor


def random_experts(count: int, shape: ExpertShape, seed: int) -> dict[int, ExpertWeights]:
    """Experts 0, 1, ... in host memory, as an adapter's come from the cache."""
    generator = torch.Generator().manual_seed(seed)
    experts = {}
    for expert in range(count):
        w13 = torch.randn(shape.w13, generator=generator).mul_(shape.hidden**-0.5).to(DTYPE)
        w2 = torch.randn(shape.w2, generator=generator).mul_(shape.width**-0.5).to(DTYPE)
        experts[expert] = ExpertWeights(w13, w2)
    return experts
