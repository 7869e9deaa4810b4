"""Plans: which steps in which order, KV during the switch, and `check` on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_elastic.errors import DoesNotFitError, PlanError
from sgl_elastic.plan.check import check
from sgl_elastic.plan.pages import device_pages, expert_bytes, max_kv_tokens, trunk_bytes
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.planner import kv_at_switch, plan, transition_kv
from sgl_elastic.types import MemoryShape, Placement, Plan, StepKind
from tests.fast.elastic.plan_samples import (
    GIB,
    PAGE,
    adapters_of,
    make_adapter,
    make_shape,
    num_moved,
    shapes,
    v2_lite,
)

SINGLES = make_shape(expert_bytes=(64, 128))
PLENTY = dict.fromkeys(range(8), 10_000)


def scale(
    shape: MemoryShape, old: Placement, devices: tuple[int, ...], budget: Mapping[int, int]
) -> Plan:
    """Placed, planned and checked."""
    made = plan(old, place(shape, devices, old, budget, (), None), shape, (), budget)
    check(made, shape, (), budget)
    return made


def kinds(made: Plan, device: int) -> list[str]:
    steps = (*made.before, *made.after)
    return [step.kind.value for step in steps if step.device_id == device]


def test_growing() -> None:
    old = place(SINGLES, (0,), None, PLENTY, (), None)
    made = scale(SINGLES, old, (0, 1), PLENTY)
    assert kinds(made, 1) == [
        "add_device",
        "map_trunk",
        "map_experts",
        "map_kv",
        "copy_trunk",
        "copy_experts",
    ]
    assert kinds(made, 0) == ["unmap_experts"]
    copy = made.before[-1]
    assert (copy.source_id, copy.expert_ids) == (0, (4, 5, 6, 7))
    assert copy.num_bytes == 4 * 2 * (64 + 128)
    assert made.copied_bytes == copy.num_bytes + 200
    assert made.kv_moves == {}


def test_shrinking() -> None:
    old = place(SINGLES, (0, 1, 2), None, PLENTY, (), None)
    made = scale(SINGLES, old, (0, 1), PLENTY)
    assert kinds(made, 0) == ["map_experts", "copy_experts"]
    assert kinds(made, 2) == ["remove_device"]
    assert made.final_pages[2] == 0
    assert made.kv_moves.keys() == {2}


def test_tight_devices_shrink_kv_first_and_grow_it_last() -> None:
    weights = device_pages(SINGLES, range(8), (), -1)
    budget = dict.fromkeys(range(3), weights + 300)
    shape = make_shape(expert_bytes=(64, 128), kv_slots=100_000)
    old = place(shape, (0, 1), None, budget, (), None)
    made = scale(shape, old, (1, 2), budget)
    assert kinds(made, 1) == []
    swapped = Placement((0, 1), tuple(1 - home for home in old.homes), old.kv_tokens)
    made = plan(old, swapped, shape, (), budget)
    check(made, shape, (), budget)
    expected = ["shrink_kv", "map_experts", "copy_experts", "unmap_experts", "grow_kv"]
    assert kinds(made, 0) == kinds(made, 1) == expected
    at_switch = transition_kv(old, swapped, shape, (), budget)
    assert at_switch == kv_at_switch(made) == dict.fromkeys((0, 1), 399)
    assert at_switch[0] == max_kv_tokens(shape, budget[0], range(8), ())
    assert max(made.peak_pages.values()) <= weights + 300


def test_transition_that_does_not_fit_is_refused_before_any_step() -> None:
    shape = make_shape(expert_bytes=(64, 128), kv_slots=100_000)
    both = device_pages(shape, range(8), (), 256)
    old = Placement((0, 1), (0,) * 4 + (1,) * 4, (280, 280))
    swapped = Placement((0, 1), (1,) * 4 + (0,) * 4, (280, 280))
    budget = {0: both, 1: both}
    assert transition_kv(old, swapped, shape, (), budget) == {0: 257, 1: 257}
    with pytest.raises(DoesNotFitError, match=f"device 1 would need {both * 64:,} bytes"):
        plan(old, swapped, shape, (), {0: both, 1: both - 1})
    made = plan(old, swapped, shape, (), {0: both, 1: both - 1}, min_kv_tokens=200)
    check(made, shape, (), {0: both, 1: both - 1})


def test_final_capacity_beyond_the_budget_is_refused() -> None:
    old = Placement((0,), (0,) * 8, (10,))
    new = Placement((0, 1), (0,) * 4 + (1,) * 4, (10, 400))
    with pytest.raises(DoesNotFitError, match="device 1 would need"):
        plan(old, new, SINGLES, (), {0: 100, 1: 100})


def test_smaller_capacity_is_shrunk_to_before_the_switch() -> None:
    old = Placement((0, 1), (0,) * 4 + (1,) * 4, (400, 400))
    new = Placement((0, 1), old.homes, (100, 400))
    made = plan(old, new, SINGLES, (), PLENTY)
    check(made, SINGLES, (), PLENTY)
    assert [(s.kind, s.device_id, s.num_tokens) for s in made.before] == [
        (StepKind.SHRINK_KV, 0, 100)
    ]
    assert made.after == ()


def test_what_is_copied_comes_from_where() -> None:
    old = place(SINGLES, (0, 1), None, PLENTY, (), None)
    made = scale(SINGLES, old, (0, 2), PLENTY)
    (copy,) = [step for step in made.before if step.kind is StepKind.COPY_EXPERTS]
    expected = (1, 2, (4, 5, 6, 7))
    assert (copy.source_id, copy.device_id, copy.expert_ids) == expected, "leaving devices, too"
    assert made.kv_moves == {1: 2}
    made = scale(SINGLES, old, (0, 1, 2, 3), PLENTY)
    sources = [step.source_id for step in made.before if step.kind is StepKind.COPY_TRUNK]
    assert sorted(sources) == [0, 1], "a trunk comes from those who send least"
    made = scale(SINGLES, old, (0, 1), PLENTY)
    assert made.before == made.after == ()
    with pytest.raises(PlanError, match=r"\[0, 1\]"):
        plan(old, old, SINGLES, (), {3: 5})


def test_kv_of_leaving_devices_is_spread() -> None:
    old = place(SINGLES, (0, 1, 2, 3), None, PLENTY, (), 100)
    new = place(SINGLES, (0, 2), old, PLENTY, (), 100)
    made = plan(old, new, SINGLES, (), PLENTY)
    assert set(made.kv_moves) == {1, 3}
    assert set(made.kv_moves.values()) == {0, 2}


def test_adapters_experts_follow_their_base_expert() -> None:
    shape = make_shape(expert_bytes=(64, 128), adapters=(2, 3))
    adapters = [make_adapter(0, {1: (0, 5), 2: (5, 6, 7)}), make_adapter(1, {1: (7,)})]
    old = place(shape, (0,), None, PLENTY, adapters, None)
    new = place(shape, (0, 1), old, PLENTY, adapters, None)
    made = plan(old, new, shape, adapters, PLENTY)
    check(made, shape, adapters, PLENTY)
    copied = 4 * 2 + 1 + 3 + 1  # base of two layers, then adapter 0 twice and adapter 1
    assert made.before[-1].num_bytes == copied * (64 + 128)


@settings(max_examples=150)
@given(st.data())
def test_random_scalings_are_planned_and_pass_the_check(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    adapters = data.draw(adapters_of(shape))
    least = device_pages(shape, range(shape.num_experts), adapters, 0)
    budget = {device: least + data.draw(st.integers(0, 40)) for device in range(5)}
    limit = data.draw(st.none() | st.integers(0, 30))
    old = place(shape, (0,), None, budget, adapters, limit, min_kv_tokens=0)
    for _ in range(3):
        devices = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)))
        new = place(shape, devices, old, budget, adapters, limit, min_kv_tokens=0)
        made = plan(old, new, shape, adapters, budget, min_kv_tokens=0)
        check(made, shape, adapters, budget)
        experts = [s for s in made.before if s.kind is StepKind.COPY_EXPERTS]
        assert sum(len(step.expert_ids) for step in experts) == num_moved(old, new)
        joining = len(set(new.device_ids) - set(old.device_ids))
        moved = [e for e, home in enumerate(new.homes) if home != old.homes[e]]
        assert made.copied_bytes == joining * trunk_bytes(shape) + sum(
            expert_bytes(shape, (expert,), adapters) for expert in moved
        )
        at_switch = transition_kv(old, new, shape, adapters, budget, min_kv_tokens=0)
        assert kv_at_switch(made) == at_switch
        assert all(at_switch[d] <= new.kv_tokens_of(d) for d in new.device_ids)
        old = new


def test_v2_lite_1_2_3_2_1() -> None:
    shape = v2_lite()
    budget = dict.fromkeys(range(3), 40 * GIB // PAGE)
    old = place(shape, (0,), None, budget, (), None)
    expert = 26 * 17_301_504
    trunk = 2_618_000_000
    for devices, experts, trunks in [
        ((0, 1), 32, 1),
        ((0, 1, 2), 20, 1),
        ((0, 1), 20, 0),
        ((0,), 32, 0),
    ]:
        made = scale(shape, old, devices, budget)
        assert made.copied_bytes == experts * expert + trunks * trunk
        assert max(made.peak_pages.values()) <= 40 * GIB // PAGE
        old = made.new
