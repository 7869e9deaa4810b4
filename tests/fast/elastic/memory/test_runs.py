"""Runs of slots against sets of slots, and the slots of placements."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.memory import runs
from sgl_elastic.memory.slots import adapter_slots, expert_slots, kv_slots, trunk_slots
from sgl_elastic.types import Placement
from tests.fast.elastic.memory_workers import ADAPTERS, SHAPE

RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=8)


def as_set(found):
    return {slot for first, count in found for slot in range(first, first + count)}


def is_canonical(found):
    return all(a + n < b for (a, n), (b, _) in itertools.pairwise(found))


@given(RUNS, RUNS)
def test_runs_do_what_sets_do(left, right):
    for found, expected in (
        (runs.merge(left), as_set(left)),
        (runs.subtract(left, right), as_set(left) - as_set(right)),
        (runs.intersect(left, right), as_set(left) & as_set(right)),
        (runs.of_slots(as_set(left)), as_set(left)),
    ):
        assert as_set(found) == expected
        assert is_canonical(found)
        assert runs.num_slots(found) == len(expected)


@given(RUNS, st.integers(1, 50), st.integers(1, 50))
def test_pages_under_slots_are_the_pages_of_their_bytes(slots, slot_bytes, page_bytes):
    expected = {
        offset // page_bytes
        for slot in as_set(slots)
        for offset in range(slot * slot_bytes, (slot + 1) * slot_bytes)
    }
    assert as_set(runs.pages_under(slots, slot_bytes, page_bytes)) == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_moves_are_the_same_pairs_in_order(pairs):
    moves = runs.move_runs(pairs)
    assert [(s + i, d + i) for s, d, count in moves for i in range(count)] == pairs
    joined = itertools.pairwise(moves)
    assert not any((s + n, d + n) == then[:2] for (s, d, n), then in joined)


def test_adapters_experts_lie_with_the_base_expert_they_replace():
    found = expert_slots(SHAPE, ADAPTERS, (0, 1, 4))
    # Adapter a, layer 0, experts 1, 4, 6 -> slots 8, 9, 10; b, layer 1, 0, 1, 7 -> 11, 12, 13.
    assert as_set(found["experts.0.w13"]) == {0, 1, 4, 8, 9}
    assert as_set(found["experts.1.w2"]) == {0, 1, 4, 11, 12}
    assert adapter_slots(SHAPE, ADAPTERS[0], (5,)) == {
        "experts.1.w13": ((8, 1),),
        "experts.1.w2": ((8, 1),),
    }


def test_every_expert_slot_of_a_placement_is_on_one_device():
    placement = Placement((3, 5), (3, 3, 5, 5, 5, 3, 5, 3), (10, 0))
    by_device = [expert_slots(SHAPE, ADAPTERS, placement.experts_of(d)) for d in (3, 5)]
    for region, num_woven in (("experts.0.w13", 3), ("experts.1.w2", 4)):
        slots = [as_set(found[region]) for found in by_device]
        assert not slots[0] & slots[1]
        assert len(slots[0] | slots[1]) == 8 + num_woven
    assert as_set(kv_slots(SHAPE, 10)["kv.1"]) == set(range(11))
    assert kv_slots(SHAPE, 0) == {}
    assert trunk_slots(SHAPE)["trunk"] == ((0, 1),)
