"""Placements: even to one group, least moves (against brute force), KV fills what is left."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import BadScaleError, DoesNotFitError
from sgl_elastic.plan.pages import device_pages, group_size, max_kv_tokens, most_kv_tokens
from sgl_elastic.plan.placement import fewest_devices, place
from sgl_elastic.types import Placement
from tests.fast.elastic.plan_samples import (
    GIB,
    PAGE,
    adapters_of,
    counts,
    make_adapter,
    make_shape,
    num_moved,
    shapes,
    v2_lite,
)

PLENTY = dict.fromkeys(range(16), 10_000)
SINGLES = make_shape(expert_bytes=(64, 128))  # whole pages: a group is one expert


def at(*homes: int) -> Placement:
    devices = tuple(sorted(set(homes)))
    return Placement(devices, homes, (500,) * len(devices))


def least_moves(previous: tuple[int, ...], device_ids: tuple[int, ...]) -> int:
    """Over every assignment that is even to one expert."""
    floor = len(previous) // len(device_ids)
    most = floor + (len(previous) % len(device_ids) > 0)
    return min(
        sum(was != now for was, now in zip(previous, homes, strict=True))
        for homes in product(device_ids, repeat=len(previous))
        if all(floor <= homes.count(device) <= most for device in device_ids)
    )


def test_first_placement_is_in_contiguous_runs() -> None:
    placement = place(SINGLES, (4, 0, 2), None, PLENTY, (), None)
    assert placement.homes == (4, 4, 4, 0, 0, 0, 2, 2)
    assert placement.device_ids == (4, 0, 2)


@pytest.mark.parametrize("wanted", [(0,), (0, 1), (1, 2), (0, 1, 2), (2, 3), (3, 0, 2)])
@pytest.mark.parametrize("num_experts", [1, 4, 5])
def test_moves_are_as_few_as_brute_force_finds(wanted: tuple[int, ...], num_experts: int) -> None:
    shape = make_shape(expert_bytes=(64,), num_experts=num_experts)
    for homes in product((0, 1, 2), repeat=num_experts):
        placement = place(shape, wanted, at(*homes), PLENTY, (), None)
        assert num_moved(at(*homes), placement) == least_moves(homes, wanted)
        assert max(counts(placement)) - min(counts(placement)) <= 1


@given(st.data())
def test_quotas_and_moves_of_random_scalings(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_experts=24))
    previous = None
    for _ in range(data.draw(st.integers(1, 4))):
        devices = tuple(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True)))
        placement = place(shape, devices, previous, PLENTY, (), None)
        assert placement == place(shape, devices, previous, PLENTY, (), None)
        sizes = counts(placement)
        assert sum(sizes) == shape.num_experts
        assert max(sizes) - min(sizes) <= group_size(shape, len(devices))
        if previous is not None:
            kept = sum(
                min(len(previous.experts_of(device)), size)
                for device, size in zip(devices, sizes, strict=True)
            )
            assert num_moved(previous, placement) == shape.num_experts - kept
        previous = placement


def test_who_takes_the_odd_expert() -> None:
    placement = place(SINGLES, (0, 1, 2), None, PLENTY | {2: 20_000, 1: 15_000}, (), None)
    assert counts(placement) == [2, 3, 3], "the largest budget"
    shape = make_shape(expert_bytes=(64,), num_experts=7)
    for homes, expected in [((0,) * 4 + (1,) * 3, [2, 3, 2]), ((0,) * 3 + (1,) * 4, [3, 2, 2])]:
        placement = place(shape, (0, 1, 2), at(*homes), PLENTY, (), None)
        assert counts(placement) == expected, "the heaviest loses first"


def test_torn_groups_are_no_reason_to_move_more() -> None:
    """After a placement by single experts the next one keeps them single."""
    shape = make_shape(expert_bytes=(96, 48))
    three = place(shape, (0, 1, 2), None, PLENTY, (), None)
    assert three.homes == (0, 0, 0, 1, 1, 1, 2, 2)
    two = place(shape, (0, 1), three, PLENTY, (), None)
    assert num_moved(three, two) == 2


@given(st.data())
def test_kv_fills_what_is_left(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    adapters = data.draw(adapters_of(shape))
    limit = data.draw(st.none() | st.integers(1, 80))
    budget = {0: data.draw(st.integers(200, 900)), 1: 5000}
    try:
        placement = place(shape, (0, 1), None, budget, adapters, limit, min_kv_tokens=5)
    except DoesNotFitError:
        return
    for device in (0, 1):
        fitting = max_kv_tokens(shape, budget[device], placement.experts_of(device), adapters)
        assert placement.kv_tokens_of(device) == (fitting if limit is None else min(fitting, limit))


@pytest.mark.parametrize(
    ("devices", "message"),
    [((), "at least one"), ((0, 0), "none of them twice"), ((0, 77), r"\[77\]")],
)
def test_nonsense_devices_are_refused(devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadScaleError, match=message):
        place(SINGLES, devices, None, PLENTY, (), None)


def test_what_does_not_fit_says_how_much_and_where_it_would() -> None:
    needed = device_pages(SINGLES, range(4), (), 256)
    place(SINGLES, (0, 1), None, {0: needed, 1: needed}, (), None)
    with pytest.raises(DoesNotFitError) as caught:
        place(SINGLES, (0, 1), None, {0: needed, 1: needed - 1}, (), None)
    message = str(caught.value)
    assert f"device 1 would need {needed * 64:,} bytes" in message
    assert f"has {(needed - 1) * 64:,} bytes" in message
    assert "fits on 3 or more devices" in message


def test_kv_limit_below_the_least_kv_is_obeyed() -> None:
    needed = device_pages(SINGLES, range(8), (), 10)
    assert place(SINGLES, (0,), None, {0: needed}, (), 10).kv_tokens == (10,)
    with pytest.raises(DoesNotFitError):
        place(SINGLES, (0,), None, {0: needed - 1}, (), 10)


@given(st.data())
def test_fewest_devices_is_the_first_count_that_places(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    adapters = data.draw(adapters_of(shape))
    budget = data.draw(st.integers(1, 200))
    floor = min(256, most_kv_tokens(shape))

    def fits(count: int) -> bool:
        devices = range(count)
        placement = place(shape, devices, None, dict.fromkeys(devices, 10**9), adapters, None)
        return all(
            device_pages(shape, placement.experts_of(d), adapters, floor) <= budget for d in devices
        )

    fitting = [count for count in range(1, shape.num_experts + 1) if fits(count)]
    if fitting:
        assert fewest_devices(shape, budget, adapters) == fitting[0]
        return
    with pytest.raises(DoesNotFitError, match="No number of devices"):
        fewest_devices(shape, budget, adapters)


def test_v2_lite_needs_two_devices_of_32_gib() -> None:
    assert fewest_devices(v2_lite(), 32 * GIB // PAGE, ()) == 1
    assert fewest_devices(v2_lite(), 24 * GIB // PAGE, ()) == 2
    assert fewest_devices(v2_lite(), 3 * GIB // PAGE, ()) == 64
    with pytest.raises(DoesNotFitError):
        fewest_devices(v2_lite(), 2 * GIB // PAGE, ())
    with pytest.raises(DoesNotFitError, match="No number of devices"):
        place(SINGLES, (0,), None, {0: 3}, (), None)


def test_adapters_count_where_their_experts_live() -> None:
    shape = make_shape(expert_bytes=(64,), layers=(1,), adapters=(1, 4))
    plain, woven = (
        place(shape, (0, 1), None, dict.fromkeys((0, 1), 60), adapters, None, min_kv_tokens=0)
        for adapters in ([], [make_adapter(0, {1: (0, 1, 2, 3)})])
    )
    assert woven.kv_tokens[0] < plain.kv_tokens[0]
    assert woven.kv_tokens[1] == plain.kv_tokens[1]
