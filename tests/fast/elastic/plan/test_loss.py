"""Plans of a loss: where each expert comes from, on which devices it goes on, what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_elastic.errors import DoesNotFitError, PlanError
from sgl_elastic.plan.check import check
from sgl_elastic.plan.loss import (
    Limits,
    Loss,
    candidates,
    layers_of,
    plan_loss,
    what_is_left,
)
from sgl_elastic.plan.pages import device_pages, expert_bytes, trunk_bytes
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Plan, Step, StepKind
from tests.fast.elastic.plan_samples import adapters_of, make_adapter, make_shape, shapes

SHAPE = make_shape(expert_bytes=(64, 128), adapters=(1, 2))
ADAPTER = make_adapter(0, {1: (4, 5), 2: (5, 7)})
PLENTY = dict.fromkeys(range(8), 10_000)
TWO = Placement((0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (300, 300))


def limits(budget: Mapping[int, int] = PLENTY, least: int = 1) -> Limits:
    return Limits(budget, budget, 300, least)


LAYERS = (1, 2)


def whole(*expert_ids: int) -> set[tuple[int, int]]:
    """These experts in both layers of SHAPE."""
    return {(layer, expert) for layer in LAYERS for expert in expert_ids}


def planned(
    old: Placement,
    loss: Loss,
    devices: tuple[int, ...],
    *,
    shape: MemoryShape = SHAPE,
    adapters: tuple[AdapterEntry, ...] = (ADAPTER,),
    budget: Mapping[int, int] = PLENTY,
) -> Plan:
    """Planned and checked."""
    made = plan_loss(old, loss, devices, shape, adapters, limits(budget))
    check(made, shape, adapters, budget)
    return made


def kinds(made: Plan) -> list[tuple[str, int]]:
    return [(step.kind.value, step.device_id) for step in (*made.before, *made.after)]


def test_what_nobody_has_is_read_with_its_adapters() -> None:
    made = planned(TWO, Loss((1,)), (0,))
    assert kinds(made) == [("map_experts", 0), ("read_experts", 0)]
    read = made.before[-1]
    assert read.expert_ids == (4, 5, 6, 7)
    assert read.num_bytes == made.read_bytes == expert_bytes(SHAPE, (4, 5, 6, 7), (ADAPTER,))
    assert read.num_bytes == (2 * 4 + 4) * (64 + 128), "four experts in two layers, and an adapter"
    assert made.copied_bytes == 0
    assert (made.old.device_ids, made.lost) == ((0,), (1,))
    assert made.kv_moves == {1: 0}, "who goes on with its requests"


def test_a_copy_is_a_home_and_nothing_is_read_or_moved() -> None:
    three = Placement((0, 1, 2), (0, 0, 0, 1, 1, 1, 2, 2), (300, 300, 300))
    made = planned(three, Loss((1,), held={0: whole(3), 2: whole(4, 5)}), (0, 2))
    assert made.new.homes == (0, 0, 0, 0, 2, 2, 2, 2)
    assert (made.read_bytes, made.copied_bytes) == (0, 0)
    assert made.before == ()


def test_of_several_copies_that_of_the_lighter_device() -> None:
    three = Placement((0, 1, 2), (0, 0, 0, 0, 0, 1, 1, 2), (300, 300, 300))
    left = what_is_left(three, Loss((1,), held={0: whole(5, 6), 2: whole(5, 6)}), LAYERS)
    assert left == Placement((0, 2), (0, 0, 0, 0, 0, 2, 2, 2), (300, 300))


def test_what_has_to_move_is_copied_from_a_peer() -> None:
    """A device that joins gets the trunk from one that is left; its experts are nowhere."""
    made = planned(TWO, Loss((1,)), (0, 2))
    assert [name for name, device in kinds(made) if device == 2] == [
        "add_device",
        "map_trunk",
        "map_experts",
        "map_kv",
        "copy_trunk",
        "read_experts",
    ]
    assert made.copied_bytes == trunk_bytes(SHAPE)


def test_with_no_device_left_all_is_read() -> None:
    one = Placement((0,), (0,) * 8, (300,))
    made = planned(one, Loss((0,)), (0,))
    assert [name for name, _ in kinds(made)] == [
        "add_device",
        "map_trunk",
        "map_experts",
        "map_kv",
        "read_trunk",
        "read_experts",
    ]
    assert made.read_bytes == trunk_bytes(SHAPE) + expert_bytes(SHAPE, range(8), (ADAPTER,))
    assert made.kv_moves == {}


def test_kv_gives_way_by_the_rank_that_serves_or_at_once() -> None:
    held = device_pages(SHAPE, range(4), (), 300)
    budget = dict.fromkeys(range(2), held + 8)
    for is_serving, kind in ((True, "shrink_kv"), (False, "trim_kv")):
        loss = Loss((1,), is_serving=is_serving)
        made = planned(TWO, loss, (0,), adapters=(), budget=budget)
        assert kinds(made) == [(kind, 0), ("map_experts", 0), ("read_experts", 0)]


def test_what_does_not_fit_is_refused() -> None:
    budget = dict.fromkeys(range(2), device_pages(SHAPE, range(4), (), 10))
    with pytest.raises(DoesNotFitError):
        planned(TWO, Loss((1,)), (0,), adapters=(), budget=budget)


@pytest.mark.parametrize(
    ("devices", "lost", "max_devices", "wanted"),
    [
        ((0, 1), (1,), 2, ((0,), (0, 1))),
        ((0, 1), (0,), 4, ((1,), (1, 2), (0, 1))),
        ((0, 1, 2, 3), (2,), 4, ((0, 1, 3), (0, 1, 2, 3))),
        ((0, 1, 2), (0, 2), 4, ((1,), (1, 3), (0, 1, 2))),
        ((0,), (0,), 2, ((1,), (0,))),
        ((0,), (0,), 1, ((0,),)),
        ((0, 1), (), 4, ((0, 1),)),
    ],
)
def test_where_it_may_go_on(
    devices: tuple[int, ...],
    lost: tuple[int, ...],
    max_devices: int,
    wanted: tuple[tuple[int, ...], ...],
) -> None:
    old = Placement(devices, (devices[0],) * 8, (300,) * len(devices))
    assert candidates(old, Loss(lost), max_devices) == wanted


@st.composite
def losses(draw: st.DrawFn) -> tuple[MemoryShape, tuple[AdapterEntry, ...], Placement, Loss]:
    shape = draw(shapes())
    adapters = draw(adapters_of(shape))
    devices = tuple(sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=4))))
    homes = draw(
        st.lists(st.sampled_from(devices), min_size=shape.num_experts, max_size=shape.num_experts)
    )
    old = Placement(devices, tuple(homes), (10,) * len(devices))
    lost = tuple(sorted(draw(st.sets(st.sampled_from(devices)))))
    left = [device for device in devices if device not in lost]
    parts = [(layer, e) for layer in layers_of(shape) for e in range(shape.num_experts)]
    held = {device: draw(st.sets(st.sampled_from(parts))) for device in left}
    return shape, adapters, old, Loss(lost, held, draw(st.booleans()))


@settings(max_examples=300, deadline=None)
@given(losses(), st.data())
def test_each_expert_has_one_source_and_disk_is_the_last(
    case: tuple[MemoryShape, tuple[AdapterEntry, ...], Placement, Loss], data: st.DataObject
) -> None:
    shape, adapters, old, loss = case
    devices = data.draw(st.sampled_from(candidates(old, loss, 6)))
    made = planned(old, loss, devices, shape=shape, adapters=adapters)
    layers = layers_of(shape)
    nowhere = {
        (layer, e)
        for layer in layers
        for e, home in enumerate(old.homes)
        if home in loss.lost and not any((layer, e) in parts for parts in loss.held.values())
    }
    read = [p for s in made.before if s.kind is StepKind.READ_EXPERTS for p in parts_of(s, layers)]
    assert sorted(read) == sorted(nowhere)
    for device in made.new.device_ids:
        at_home = {e for e, home in enumerate(made.old.homes) if home == device}
        came = {
            part
            for s in made.before
            if s.device_id == device and s.kind in (StepKind.COPY_EXPERTS, StepKind.READ_EXPERTS)
            for part in parts_of(s, layers)
        }
        had = {*loss.held.get(device, ()), *((layer, e) for layer in layers for e in at_home)}
        assert {(layer, e) for layer in layers for e in made.new.experts_of(device)} <= came | had


def parts_of(step: Step, layers: tuple[int, ...]) -> list[tuple[int, int]]:
    parts = step.parts or [(layer, step.expert_ids) for layer in layers]
    return [(layer, expert) for layer, ids in parts for expert in ids]


def test_what_is_somewhere_in_each_layer_is_not_read() -> None:
    """Copies by layer, as of hot experts: nobody has the expert whole."""
    three = Placement((0, 1, 2), (0, 0, 0, 1, 1, 1, 2, 2), (300, 300, 300))
    held = {0: {(1, 3), (1, 4), (2, 5)}, 2: {(2, 3), (2, 4), (1, 5), (2, 5)}}
    made = planned(three, Loss((1,), held=held), (0, 2))
    assert made.read_bytes == 0
    copies = [
        (s.device_id, s.source_id, s.parts) for s in made.before if s.kind is StepKind.COPY_EXPERTS
    ]
    assert made.new.homes == (0, 0, 0, 0, 2, 2, 2, 2)
    assert copies == [(0, 2, ((2, (3,)),)), (2, 0, ((1, (4,)),))], "5 has its home on device 2"
    assert made.copied_bytes == (1 + 1 + 1) * (64 + 128), "of 4 with the adapter's in layer 1"


def test_only_what_is_in_no_layer_anywhere_is_read() -> None:
    made = planned(TWO, Loss((1,), held={0: {(1, 4), (2, 5)}}), (0,))
    [read] = [step for step in made.before if step.kind is StepKind.READ_EXPERTS]
    assert read.parts == ((1, (5, 6, 7)), (2, (4, 6, 7)))
    assert read.expert_ids == (4, 5, 6, 7)
    assert read.num_bytes == ((3 + 1) + (3 + 1)) * (64 + 128), "adapters: 5 in layer 1, 7 in 2"


def test_a_plan_that_reads_what_a_device_has_is_wrong() -> None:
    three = Placement((0, 1, 2), (0, 0, 0, 1, 1, 1, 2, 2), (300, 300, 300))
    made = planned(three, Loss((1,), held={0: whole(3, 4, 5)}), (0, 2))
    mapped, copy = made.before
    assert copy.kind is StepKind.COPY_EXPERTS
    read = replace(copy, kind=StepKind.READ_EXPERTS, source_id=-1)
    wrong = replace(made, before=(mapped, read))
    with pytest.raises(PlanError, match=r"which a device has"):
        check(wrong, SHAPE, (ADAPTER,), PLENTY)
