"""The routing table: swapped whole, held and released, harmless to repeat."""

from __future__ import annotations

import threading

import pytest

from sgl_elastic.errors import IllegalTransitionError
from sgl_elastic.front.routing import Held, Routing, RoutingTable
from sgl_elastic.types import Placement

ONE = Placement(device_ids=(0,), homes=(0,), kv_tokens=(5,))
TWO = Placement(device_ids=(0, 1), homes=(0,), kv_tokens=(5, 5))


def test_nothing_is_routed_before_the_first_instance() -> None:
    routing = Routing()
    with pytest.raises(IllegalTransitionError, match="first instance"):
        _ = routing.table
    with pytest.raises(IllegalTransitionError):
        routing.hold(1.0)


def test_each_swap_is_a_new_table() -> None:
    routing = Routing()
    first = routing.swap("a", ONE, 1.0)
    second = routing.swap("b", TWO, 2.0)
    assert first == RoutingTable(1, "a", ONE, 1.0)
    assert second == routing.table == RoutingTable(2, "b", TWO, 2.0)


def test_a_repeated_swap_changes_nothing() -> None:
    routing = Routing()
    first = routing.swap("a", ONE, 1.0)
    assert routing.swap("a", ONE, 9.0) is first
    assert routing.swap("a", TWO, 9.0).version == 2


def test_hold_and_release() -> None:
    routing = Routing()
    routing.swap("a", ONE, 0.0)
    assert routing.held is None
    assert routing.hold(2.0) == Held(1, 2.0)
    assert routing.hold(3.0) == Held(1, 2.0)
    routing.swap("b", TWO, 3.5)
    assert routing.held == Held(1, 2.0)
    assert routing.release(4.0) == 2.0
    assert routing.held is None
    assert routing.release(9.0) == 0.0


def test_a_reader_never_sees_half_a_table() -> None:
    routing = Routing()
    placements = {"a": ONE, "b": TWO}
    routing.swap("a", ONE, 0.0)
    stop = threading.Event()

    def write() -> None:
        for number in range(4000):
            name = "ab"[number % 2]
            routing.swap(name, placements[name], float(number))
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    versions = []
    while not stop.is_set():
        table = routing.table
        assert table.placement is placements[table.instance_id]
        versions.append(table.version)
    writer.join()
    assert versions == sorted(versions)
