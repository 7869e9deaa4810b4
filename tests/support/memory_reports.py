"""Memory reports of small devices whose pages are really mapped."""

from __future__ import annotations

from collections.abc import Sequence

import sgl_vmm

from sgl_esft.memory.report import (
    DeviceMemory,
    KvMemory,
    LayerMemory,
    MemoryReport,
    PoolMemory,
    layer_memory,
)
from sgl_esft.weave.expert_memory import ExpertArena, PaddedMemory, VirtualMemory
from sgl_esft.weave.slot_layout import SlotLayout

PAGE_BYTES = 4096
SLOT_BYTES = (5 * PAGE_BYTES // 2, 5 * PAGE_BYTES // 4)  # w13, w2: neighbours share pages
LAYOUT = SlotLayout.plan(num_base=8, num_routed=8, num_adapters=3, max_experts_per_adapter=4)
ADAPTERS = {"law": 0, 'in<t&"ent': 2}
# Adapter slot -> its number of experts in layers 1 and 2; adapter slot 1 is empty.
EXPERTS = {0: (1, 3), 2: (4, 0)}


def virtual_device(rank: int = 0) -> DeviceMemory:
    """Two layers on the host backend, with `ADAPTERS` placed as a server places them."""
    backend = sgl_vmm.open_backend("host", page_bytes=PAGE_BYTES, capacity_bytes=1 << 20)
    arena = ExpertArena(backend, PAGE_BYTES, None)
    memories = [arena.make_layer(LAYOUT.num_slots, SLOT_BYTES) for _ in range(2)]
    layers = [_virtual_layer(memory, index) for index, memory in enumerate(memories)]
    state = arena.pool.state()
    pool = PoolMemory(
        page_bytes=state.page_bytes,
        budget_bytes=None,
        used_bytes=state.num_used * state.page_bytes,
        free_bytes=state.num_free * state.page_bytes,
        peak_used_bytes=state.peak_used * state.page_bytes,
        num_created=state.num_created,
        num_destroyed=state.num_destroyed,
    )
    return _device(rank, "virtual", pool, backend.resident_bytes, layers)


def padded_device(rank: int = 1) -> DeviceMemory:
    """The same slots with memory behind all of them."""
    layers = []
    for index in range(2):
        memory = PaddedMemory(LAYOUT.num_slots, SLOT_BYTES)
        runs = {slot: LAYOUT.adapter_range(slot)[: EXPERTS[slot][index]] for slot in EXPERTS}
        for run in (range(LAYOUT.num_base), *runs.values()):
            memory.map(run)
        layers.append(layer_memory(index + 1, LAYOUT, sum(SLOT_BYTES), memory.usage(), runs))
    return _device(rank, "padded", None, None, layers)


def report() -> MemoryReport:
    return MemoryReport((virtual_device(), padded_device()))


def _virtual_layer(memory: VirtualMemory, index: int) -> LayerMemory:
    memory.map(range(LAYOUT.num_base))
    runs: dict[int, range] = {}
    for adapter_slot, counts in EXPERTS.items():
        runs[adapter_slot] = memory.choose(LAYOUT.adapter_range(adapter_slot), counts[index])
        memory.map(runs[adapter_slot])
    return layer_memory(index + 1, LAYOUT, sum(SLOT_BYTES), memory.usage(), runs)


def _device(
    rank: int,
    kind: str,
    pool: PoolMemory | None,
    resident_bytes: int | None,
    layers: Sequence[LayerMemory],
) -> DeviceMemory:
    return DeviceMemory(
        rank=rank,
        device="cpu",
        expert_memory=kind,
        pool=pool,
        resident_bytes=resident_bytes,
        adapters=ADAPTERS,
        kv=KvMemory(num_tokens=4096, bytes_per_token=100),
        layers=tuple(layers),
    )
