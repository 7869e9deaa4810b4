"""What memory must look like for a model, worked out from its skeleton.

skeleton (experts on meta, trunk planned), model config --> [MemoryShape] --> HMM
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_elastic.engine.trunk import TrunkLayout
from sgl_elastic.types import MemoryShape, Region, RegionKind

EXPERT_TENSORS = ("w13", "w2")


def expert_region(layer_id: int, tensor: str) -> str:
    """The name of one layer's w13 or w2."""
    return f"experts.{layer_id}.{tensor}"


def kv_region(index: int) -> str:
    """The name of the index-th KV buffer of the pool."""
    return f"kv.{index}"


def memory_shape(
    *,
    page_bytes: int,
    num_experts: int,
    max_adapters: int,
    slots_per_adapter: int,
    trunk: TrunkLayout,
    expert_slots: Sequence[tuple[int, int, tuple[int, int]]],
    kv_row_bytes: Sequence[int],
    max_kv_tokens: int,
) -> MemoryShape:
    """`expert_slots`: (layer id, slots, bytes of a slot of w13 and of w2), by layer."""
    regions = [Region(f"trunk.{trunk.digest}", RegionKind.TRUNK, 1, trunk.num_bytes)]
    for layer_id, num_slots, slot_bytes in expert_slots:
        for tensor, num_bytes in zip(EXPERT_TENSORS, slot_bytes, strict=True):
            name = expert_region(layer_id, tensor)
            regions.append(Region(name, RegionKind.EXPERT, num_slots, num_bytes, layer_id))
    for index, row_bytes in enumerate(kv_row_bytes):
        regions.append(Region(kv_region(index), RegionKind.KV, max_kv_tokens + 1, row_bytes))
    return MemoryShape(page_bytes, num_experts, max_adapters, slots_per_adapter, tuple(regions))
