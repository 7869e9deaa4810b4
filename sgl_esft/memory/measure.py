"""One rank's expert memory, counted now.

plane.py (who is where), expert_tensor.py (pages) -> [measure_device] -> report.py
"""

from __future__ import annotations

import torch

from sgl_esft.config import ExpertMemoryKind
from sgl_esft.memory.report import (
    DeviceMemory,
    ExpertTiers,
    KvMemory,
    LayerMemory,
    LoraMemory,
    PoolMemory,
    layer_memory,
)
from sgl_esft.weave import expert_tensor
from sgl_esft.weave.expert_memory import ExpertArena
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.plane import AdapterPlane


def measure_device(
    plane: AdapterPlane,
    expert_memory: ExpertMemoryKind,
    rank: int,
    device: torch.device,
    kv: KvMemory | None,
    tiers: ExpertTiers | None = None,
    lora: LoraMemory | None = None,
) -> DeviceMemory:
    """Everything GET /v1/memory says of this rank."""
    arena = expert_tensor.arena_of(device)
    return DeviceMemory(
        rank=rank,
        device=str(device),
        expert_memory=expert_memory,
        pool=None if arena is None else _pool_memory(arena),
        resident_bytes=None if arena is None else arena.backend.resident_bytes,
        adapters={each.source.name: each.adapter_slot for each in plane.placed()},
        kv=kv,
        layers=tuple(_layer_memory(layer) for layer in plane.layers.values()),
        tiers=tiers,
        lora=lora,
    )


def _layer_memory(layer: WovenLayer) -> LayerMemory:
    usage = layer.memory.usage()
    adapters, base = layer.slots_by_adapter, layer.base_slots
    return layer_memory(layer.layer_id, layer.layout, layer.slot_bytes, usage, adapters, base)


def _pool_memory(arena: ExpertArena) -> PoolMemory:
    state = arena.pool.state()
    page_bytes = state.page_bytes
    return PoolMemory(
        page_bytes=page_bytes,
        budget_bytes=arena.budget_bytes,
        used_bytes=state.num_used * page_bytes,
        free_bytes=state.num_free * page_bytes,
        peak_used_bytes=state.peak_used * page_bytes,
        num_created=state.num_created,
        num_destroyed=state.num_destroyed,
    )
