"""Page counts equal those of bytes laid out one by one, and KV fills what is left exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import PlanError
from sgl_elastic.plan.pages import (
    NO_KV,
    device_pages,
    expert_bytes,
    expert_pages,
    expert_slots,
    group_size,
    kv_pages,
    max_kv_tokens,
    most_kv_tokens,
    pages_of_slots,
    trunk_bytes,
    trunk_pages,
)
from sgl_elastic.types import AdapterEntry, MemoryShape, RegionKind
from tests.fast.elastic.plan_samples import (
    GIB,
    PAGE,
    adapters_of,
    make_adapter,
    make_shape,
    shapes,
    v2_lite,
)


def touched_pages(slots: set[int], slot_bytes: int, page_bytes: int) -> int:
    """The pages of every single byte."""
    return len(
        {byte // page_bytes for s in slots for byte in range(s * slot_bytes, (s + 1) * slot_bytes)}
    )


@given(st.sets(st.integers(0, 20)), st.integers(1, 70), st.sampled_from([1, 8, 16, 64]))
def test_pages_of_slots_are_those_of_their_bytes(
    slots: set[int], slot_bytes: int, page_bytes: int
) -> None:
    counted = pages_of_slots(sorted(slots), slot_bytes, page_bytes)
    assert counted == touched_pages(slots, slot_bytes, page_bytes)


Held = tuple[MemoryShape, list[AdapterEntry], set[int]]


@st.composite
def held(draw: st.DrawFn) -> Held:
    """A shape, adapters for it, and the experts that a device has."""
    shape = draw(shapes())
    return shape, draw(adapters_of(shape)), draw(st.sets(st.integers(0, shape.num_experts - 1)))


@given(held(), st.data())
def test_device_pages_and_bytes_are_those_of_all_its_slots(held: Held, data: st.DataObject) -> None:
    shape, adapters, here = held
    kv_tokens = data.draw(st.integers(NO_KV, most_kv_tokens(shape)))
    pages = copied_bytes = 0
    for region in shape.regions:
        slots = set(range(kv_tokens + 1)) if region.kind is RegionKind.KV else {0}
        if region.kind is RegionKind.EXPERT:
            slots = set(here)
            for adapter in adapters:
                first = shape.num_experts + adapter.adapter_slot * shape.slots_per_adapter
                experts = adapter.experts[region.layer_id]
                slots |= {first + k for k, expert in enumerate(experts) if expert in here}
            copied_bytes += region.slot_bytes * len(slots)
        assert all(slot < region.num_slots for slot in slots)
        pages += touched_pages(slots, region.slot_bytes, shape.page_bytes)
    assert device_pages(shape, here, adapters, kv_tokens) == pages
    assert expert_bytes(shape, here, adapters) == copied_bytes
    assert trunk_bytes(shape) == shape.of_kind(RegionKind.TRUNK)[0].slot_bytes


@pytest.mark.parametrize(
    "adapter", [make_adapter(2, {1: (1,)}), make_adapter(0, {1: (1, 2, 3, 4)})]
)
def test_adapter_beyond_its_slots_is_refused(adapter: object) -> None:
    with pytest.raises(PlanError, match="2 slots of 3"):
        expert_slots(make_shape(adapters=(2, 3)), 1, {1}, [adapter])  # type: ignore[list-item]


@given(held(), st.data())
def test_max_kv_tokens_is_the_last_that_fits(held: Held, data: st.DataObject) -> None:
    shape, adapters, here = held
    weights = device_pages(shape, here, adapters, NO_KV)
    budget = data.draw(st.integers(0, weights + 100))
    tokens = max_kv_tokens(shape, budget, here, adapters)
    assert tokens == NO_KV or device_pages(shape, here, adapters, tokens) <= budget
    full = tokens == most_kv_tokens(shape)
    assert full or device_pages(shape, here, adapters, tokens + 1) > budget


def test_shape_without_kv_has_no_kv_tokens_and_zero_tokens_a_padding_row() -> None:
    shape = make_shape(kv_bytes=())
    assert most_kv_tokens(shape) == 0
    assert max_kv_tokens(shape, 10_000, (), ()) == 0
    assert max_kv_tokens(shape, trunk_pages(shape) - 1, (), ()) == NO_KV
    assert [kv_pages(make_shape(), tokens) for tokens in (NO_KV, 0)] == [0, 2]


@pytest.mark.parametrize(
    ("sizes", "num_experts", "num_devices", "group"),
    [
        ((64,), 8, 1, 1),
        ((96, 48), 8, 2, 4),
        ((96, 48), 8, 3, 1),  # three devices, two groups
        ((96, 48), 6, 1, 1),  # groups of four do not divide six
        ((96, 16), 8, 2, 4),
        ((1,), 64, 1, 64),
        ((1,), 63, 1, 1),
    ],
)
def test_group_size(sizes: tuple[int, ...], num_experts: int, num_devices: int, group: int) -> None:
    shape = make_shape(num_experts=num_experts, expert_bytes=sizes)
    assert group_size(shape, num_devices) == group


@given(shapes(), st.integers(1, 6))
def test_groups_share_no_page(shape: MemoryShape, num_devices: int) -> None:
    group = group_size(shape, num_devices)
    if group == 1:
        return
    parts = [range(i, i + group) for i in range(0, shape.num_experts, group)]
    together = expert_pages(shape, range(shape.num_experts), ())
    assert sum(expert_pages(shape, part, ()) for part in parts) == together


def test_v2_lite() -> None:
    shape = v2_lite()
    assert group_size(shape) == 4
    assert group_size(shape, 16) == 4
    assert group_size(shape, 17) == 1
    assert expert_pages(shape, [0], ()) == 26 * (6 + 3)
    assert expert_pages(shape, range(4), ()) == 26 * (22 + 11)
    assert expert_pages(shape, range(64), ()) * PAGE == 64 * 26 * 17_301_504
    assert kv_pages(shape, 1_000_000) == 27 * -(-1152 * 1_000_001 // PAGE)
    tokens = max_kv_tokens(shape, 64 * GIB // PAGE, range(64), ())
    assert tokens == pytest.approx((64 * GIB - 31.4e9) / 31_104, rel=0.01)
