"""Standbys: what is kept within a capacity, and what is likely to be wanted next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.instance.standbys import Standbys, likely_next, without_one

device_ids = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(tuple)
configurations = st.lists(device_ids, max_size=6, unique=True)


def test_least_recently_parked_goes_first() -> None:
    table = Standbys(capacity_ranks=4)
    for device_ids, name, expected in [
        ((0,), "a", ()),
        ((0, 1), "b", ()),
        ((0, 1, 2), "c", ("a", "b")),
    ]:
        table, gone = table.park(device_ids, name)
        assert gone == expected
    assert table.parked == (((0, 1, 2), "c"),)
    assert table.num_ranks == 3


def test_a_second_instance_for_the_same_devices_takes_the_place() -> None:
    """The same devices in the same order."""
    table, _ = Standbys(capacity_ranks=4).park((0, 1), "a")
    assert table.take((1, 0)) == (table, None)
    table, gone = table.park((0, 1), "b")
    assert gone == ("a",)
    assert table.find((0, 1)) == "b"
    assert table.park((0, 1), "b") == (table, ())
    assert table.take((0, 1)) == (Standbys(4), "b")


def test_what_is_larger_than_the_capacity_is_not_kept() -> None:
    table, _ = Standbys(capacity_ranks=2).park((0,), "a")
    assert table.park((0, 1, 2), "b") == (table, ("b",))
    assert Standbys(capacity_ranks=0).park((0,), "a") == (Standbys(0), ("a",))
    with pytest.raises(ElasticConfigError, match="-1"):
        Standbys(capacity_ranks=-1)


@given(st.integers(0, 10), st.lists(device_ids, max_size=12))
def test_capacity_holds_and_no_instance_is_lost(
    capacity: int, parked: list[tuple[int, ...]]
) -> None:
    table, stopped = Standbys(capacity), set[str]()
    for number, each in enumerate(parked):
        table, gone = table.park(each, str(number))
        stopped |= set(gone)
        assert table.num_ranks <= capacity
    kept = {name for _, name in table.parked}
    assert kept | stopped == {str(number) for number in range(len(parked))}
    assert kept & stopped == set()


@pytest.mark.parametrize(
    ("now", "max_devices", "expected"),
    [
        ((0, 1, 2), 8, [(0, 1, 2, 3), (0, 1), (0, 1, 2, 3, 4, 5), (0,)]),
        ((0,), 8, [(0, 1)]),
        ((0, 1), 2, [(0,)]),
        ((0, 1), 3, [(0, 1, 2), (0,)]),
        ((2, 5), 8, [(0, 2, 5), (2,), (0, 1, 2, 5)]),
        ((0,), 1, []),
    ],
)
def test_likely_next(
    now: tuple[int, ...], max_devices: int, expected: list[tuple[int, ...]]
) -> None:
    found = list(likely_next(now, max_devices))
    assert found[: len(expected)] == expected
    assert sorted(map(len, found)) == [n for n in range(1, max_devices + 1) if n != len(now)]


def test_likely_next_agrees_with_the_planner() -> None:
    from sgl_elastic.plan.request import resolve
    from sgl_elastic.types import Placement, ScaleRequest

    for now in [(0, 1, 2), (1, 4), (3,)]:
        placement = Placement(now, (now[0],), tuple(1 for _ in now))
        for wanted in likely_next(now, 8):
            assert resolve(ScaleRequest(dp_size=len(wanted)), placement, 8) == wanted


def test_what_is_left_without_any_one_device() -> None:
    assert without_one((0, 2, 3)) == ((2, 3), (0, 3), (0, 2))
    assert without_one((1,)) == ()
