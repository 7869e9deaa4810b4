"""Shapes, adapters and placements that the planner's tests share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Region, RegionKind

PAGE = 2 << 20
GIB = 1 << 30


def make_shape(
    *,
    page_bytes: int = 64,
    num_experts: int = 8,
    expert_bytes: Sequence[int] = (96, 48),
    layers: Sequence[int] = (1, 2),
    adapters: tuple[int, int] = (0, 0),  # N, E_max
    trunk_bytes: int = 200,
    kv_bytes: Sequence[int] = (24, 24),
    kv_slots: int = 501,
) -> MemoryShape:
    num_slots = num_experts + adapters[0] * adapters[1]
    experts = [
        Region(f"{layer}.{i}", RegionKind.EXPERT, num_slots, size, layer)
        for layer in layers
        for i, size in enumerate(expert_bytes)
    ]
    kv = [Region(f"kv.{i}", RegionKind.KV, kv_slots, size) for i, size in enumerate(kv_bytes)]
    trunk = Region("trunk", RegionKind.TRUNK, 1, trunk_bytes)
    return MemoryShape(page_bytes, num_experts, *adapters, (trunk, *experts, *kv))


def v2_lite(adapters: tuple[int, int] = (0, 0)) -> MemoryShape:
    """DeepSeek-V2-Lite in bf16, as it is on a device with pages of 2 MiB."""
    return make_shape(
        page_bytes=PAGE,
        num_experts=64,
        expert_bytes=(11_534_336, 5_767_168),
        layers=range(1, 27),
        adapters=adapters,
        trunk_bytes=2_618_000_000,
        kv_bytes=[1152] * 27,
        kv_slots=3_000_001,
    )


def make_adapter(slot: int, experts: dict[int, tuple[int, ...]]) -> AdapterEntry:
    return AdapterEntry(f"id{slot}", f"adapter{slot}", f"/{slot}", slot, False, experts)


def counts(placement: Placement) -> list[int]:
    """Experts of each rank."""
    return [len(placement.experts_of(device)) for device in placement.device_ids]


def num_moved(old: Placement, new: Placement) -> int:
    return sum(was != now for was, now in zip(old.homes, new.homes, strict=True))


@st.composite
def shapes(draw: st.DrawFn, max_experts: int = 12) -> MemoryShape:
    page_bytes = draw(st.sampled_from([16, 64]))
    sizes = st.integers(1, 3 * page_bytes)
    return make_shape(
        page_bytes=page_bytes,
        num_experts=draw(st.integers(1, max_experts)),
        expert_bytes=draw(st.lists(sizes, min_size=1, max_size=2)),
        layers=draw(st.sampled_from([(0,), (1, 2), (3, 5, 6)])),
        adapters=(draw(st.integers(0, 2)), draw(st.integers(0, 3))),
        trunk_bytes=draw(st.integers(1, 300)),
        kv_bytes=draw(st.lists(st.integers(1, page_bytes), min_size=1, max_size=3)),
        kv_slots=draw(st.integers(1, 60)),
    )


@st.composite
def adapters_of(draw: st.DrawFn, shape: MemoryShape) -> tuple[AdapterEntry, ...]:
    """An adapter in some of the shape's adapter slots, with up to E_max experts a layer."""
    layers = sorted({r.layer_id for r in shape.of_kind(RegionKind.EXPERT)})
    ids = st.sets(st.integers(0, shape.num_experts - 1), max_size=shape.slots_per_adapter)
    layer_experts = st.fixed_dictionaries(dict.fromkeys(layers, ids))
    slots = draw(st.sets(st.integers(0, shape.max_adapters - 1))) if shape.max_adapters else ()
    return tuple(
        make_adapter(slot, {k: tuple(sorted(v)) for k, v in draw(layer_experts).items()})
        for slot in sorted(slots)
    )
