"""A rank was lost in the middle of an adapter's change: whole adapters stay, of others no page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.partial_adapters import surplus, whole
from sgl_elastic.memory.slots import adapter_slots, expert_slots
from sgl_elastic.types import Placement
from tests.fast.elastic.memory.test_control import kill
from tests.fast.elastic.memory_workers import ADAPTERS, SHAPE, all_slots, fill, hmm_of

A, B = ADAPTERS  # A: experts 1, 4, 6 of layer 0 and 5 of layer 1; B: 0, 1, 7 of layer 1
TWO = Placement((0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (20, 20))
W2 = "experts.1.w2"


@pytest.fixture
def hmm(tmp_path: Path) -> Iterator[Hmm]:
    """Two devices with half of the experts each, and what of both adapters goes with those."""
    with hmm_of(tmp_path, add=False) as found:
        found.set_adapters(ADAPTERS)
        found.map_placement(TWO)
        for device in TWO.device_ids:
            fill(found, device, expert_slots(SHAPE, ADAPTERS, TWO.experts_of(device)))
        yield found


def of(hmm: Hmm, device: int) -> tuple[object, object]:
    held = hmm.client(device).expert_slots()
    return held.mapped, held.loaded


def expected(adapters: tuple[object, ...], device: int) -> dict[str, object]:
    return expert_slots(SHAPE, adapters, TWO.experts_of(device))  # type: ignore[arg-type]


def test_what_is_whole_stays_as_it_is(hmm: Hmm) -> None:
    before = [of(hmm, device) for device in TWO.device_ids]
    hmm.drop_partial_adapters(TWO)
    assert hmm.adapters() == ADAPTERS
    assert [of(hmm, device) for device in TWO.device_ids] == before
    assert before[0] == (expected(ADAPTERS, 0),) * 2


@pytest.mark.parametrize("device", TWO.device_ids)
def test_an_unload_that_one_rank_had_begun_is_finished(hmm: Hmm, device: int) -> None:
    """The table still names it: a replacement would be told to map pages that are gone."""
    hmm.client(device).unmap_slots(adapter_slots(SHAPE, B, TWO.experts_of(device)))
    hmm.drop_partial_adapters(TWO)
    assert hmm.adapters() == (A,)
    assert [of(hmm, each) for each in (0, 1)] == [(expected((A,), each),) * 2 for each in (0, 1)]


def test_a_load_of_which_the_table_knows_nothing_is_taken_back(hmm: Hmm) -> None:
    hmm.set_adapters((B,))
    hmm.client(1).mark_loaded(adapter_slots(SHAPE, A, TWO.experts_of(1)), is_loaded=False)
    hmm.drop_partial_adapters(TWO)
    assert hmm.adapters() == (B,)
    assert [of(hmm, each)[0] for each in (0, 1)] == [expected((B,), each) for each in (0, 1)]


def test_pages_without_content_are_not_served(hmm: Hmm) -> None:
    """All its slots have pages, one device's were not filled yet."""
    hmm.client(0).mark_loaded({W2: adapter_slots(SHAPE, B, (0, 1))[W2]}, is_loaded=False)
    hmm.drop_partial_adapters(TWO)
    assert hmm.adapters() == (A,)


def test_a_dead_worker_is_named(hmm: Hmm) -> None:
    kill(hmm, 1)
    with pytest.raises(MemoryWorkerError, match="device 1"):
        hmm.drop_partial_adapters(TWO)
    assert hmm.adapters() == ADAPTERS


def test_base_experts_are_no_surplus() -> None:
    """A device keeps those that a scale has not taken away yet."""
    everything = all_slots(W2)
    left = surplus(SHAPE, TWO.experts_of(0), ADAPTERS, everything)
    # B has slots 11, 12, 13 of layer 1; 13 is of expert 7, which is device 1's, and so is A's 8.
    assert left == {W2: ((8, 3), (13, 1))}
    assert surplus(SHAPE, TWO.experts_of(0), (), {W2: ((0, 8),)}) == {}


def test_an_adapter_without_experts_on_a_device_is_whole_there() -> None:
    loaded = {0: {}, 1: {}}
    assert whole(SHAPE, Placement((0,), (0,) * 8, (20,)), ADAPTERS, {}) == ADAPTERS
    assert whole(SHAPE, TWO, ADAPTERS, loaded) == ()
