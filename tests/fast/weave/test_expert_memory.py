"""Slots and their memory: where a run goes, what fails clean, what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import InvariantError, OutOfExpertMemoryError, UnsupportedDeviceError
from sgl_esft.weave.expert_memory import (
    ExpertArena,
    PaddedMemory,
    SlotMemory,
    VirtualMemory,
    choose_page_bytes,
    max_run_pages,
    open_arena,
)

PAGE = 4096
# Of 4 KiB pages: 5.5 and 2.75, as DeepSeek-V2-Lite's experts are of 2 MiB.
SLOT_BYTES = (PAGE * 11 // 2, PAGE * 11 // 4)


def arena(num_pages: int | None = None) -> ExpertArena:
    return open_arena("host", 0, PAGE, None if num_pages is None else num_pages * PAGE)


def layer(num_pages: int | None = None, num_slots: int = 20) -> VirtualMemory:
    return arena(num_pages).make_layer(num_slots, SLOT_BYTES)


def num_pages(memory: VirtualMemory) -> int:
    return memory.usage().mapped_bytes // PAGE


def test_a_slot_that_ends_within_a_page_shares_it() -> None:
    memory = layer()
    memory.map(range(1))
    assert num_pages(memory) == 6 + 3
    assert memory.num_missing_pages(range(1, 2)) == 5 + 3
    memory.map(range(1, 2))
    usage = memory.usage()
    assert usage.mapped_bytes == (11 + 6) * PAGE
    assert usage.shared_bytes == (1 + 1) * PAGE
    assert usage.used_bytes == 2 * sum(SLOT_BYTES)
    memory.unmap(range(1))
    assert memory.mapped_slots() == {1}
    # w13 of slot 1 lies on 6 pages; its w2 on pages 2 to 5.
    assert num_pages(memory) == 6 + 4
    memory.check_integrity()


def test_a_run_goes_where_it_takes_the_fewest_pages() -> None:
    """Beside a neighbour whose half pages it can use, else on a page's start."""
    memory = layer()
    assert memory.choose(range(1, 5), 2) == range(2, 4), "5.5 and 2.75 pages begin whole at 2 and 4"
    memory.map(range(1))
    assert memory.choose(range(1, 5), 1) == range(1, 2)
    assert memory.choose(range(4, 8), 4) == range(4, 8)
    assert memory.choose(range(4, 8), 0) == range(4, 4)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_pool_that_runs_dry_changes_nothing(missing: int) -> None:
    """w13 fits or does not; either way neither tensor keeps a page."""
    pages_needed = 17 + 9  # of three slots
    memory = layer(pages_needed - missing)
    before = memory.usage()
    with pytest.raises(OutOfExpertMemoryError, match=r"--adapter-memory$"):
        memory.map(range(3))
    assert memory.usage() == before
    assert memory.mapped_slots() == set()
    memory.check_integrity()
    memory.map(range(2))


@pytest.mark.parametrize(
    "memory", [layer(), PaddedMemory(20, SLOT_BYTES)], ids=["virtual", "padded"]
)
def test_both_kinds_keep_the_same_books(memory: SlotMemory) -> None:
    memory.map(range(2, 5))
    for again in (range(4, 6), range(1, 6)):
        with pytest.raises(InvariantError, match="mapped already"):
            memory.map(again)
    assert memory.mapped_slots() == {2, 3, 4}
    memory.unmap(range(3))
    memory.unmap(range(3))
    assert memory.mapped_slots() == {3, 4}
    assert memory.usage().used_bytes == 2 * sum(SLOT_BYTES)
    memory.check_integrity()


def test_padding_maps_every_slot_and_knows_its_end() -> None:
    memory = PaddedMemory(20, SLOT_BYTES)
    usage = memory.usage()
    assert usage.mapped_bytes == usage.reserved_bytes == 20 * sum(SLOT_BYTES)
    with pytest.raises(InvariantError, match="of 20"):
        memory.map(range(19, 21))


def test_reserved_pages_are_a_bound() -> None:
    one = arena()
    memory = one.make_layer(20, SLOT_BYTES)
    memory.map(range(4))
    one.reserve_pages(20)
    assert one.pool.state().num_free == 20
    assert one.budget_bytes == (22 + 11 + 20) * PAGE
    memory.map(range(4, 6))
    with pytest.raises(OutOfExpertMemoryError):
        memory.map(range(6, 8))
    memory.unmap(range(4, 6))
    memory.map(range(6, 8))
    one.check_integrity()


def test_more_than_the_device_has_is_not_reserved() -> None:
    one = arena(8)
    before = one.pool.state().num_pages
    with pytest.raises(OutOfExpertMemoryError):
        one.reserve_pages(9)
    assert one.pool.state().num_pages == before == 0
    assert one.budget_bytes == 8 * PAGE


def test_pages_that_are_resident_are_pages_counted() -> None:
    one = arena()
    memory = one.make_layer(20, SLOT_BYTES)
    memory.map(range(5, 9))
    state = one.pool.state()
    assert one.budget_bytes is None
    assert one.backend.resident_bytes == state.num_pages * PAGE == memory.usage().mapped_bytes


@given(num_bytes=st.integers(0, 40 * PAGE), begin=st.integers(0, 3 * PAGE), page=st.just(PAGE))
def test_a_run_never_touches_more_pages_than_its_bound(
    num_bytes: int, begin: int, page: int
) -> None:
    touched = len(range(begin // page, -(-(begin + num_bytes) // page))) if num_bytes else 0
    assert touched <= max_run_pages(num_bytes, page) <= touched + 1


@given(first=st.integers(0, 19), count=st.integers(0, 19))
def test_the_bound_of_a_layer_holds_for_every_run(first: int, count: int) -> None:
    memory = layer()
    run = range(first, min(first + count, 20))
    assert memory.num_missing_pages(run) <= memory.max_pages(len(run))


@pytest.mark.parametrize(
    ("slot_bytes", "page_bytes"),
    [((11 << 20, 6 << 20), 2 << 20), ((98304, 49152), 32768), ((5000, 4100), 4096), ((8, 8), 4096)],
)
def test_the_hosts_page_is_no_larger_than_an_expert(
    slot_bytes: tuple[int, ...], page_bytes: int
) -> None:
    assert choose_page_bytes(slot_bytes) == page_bytes


def test_a_machine_without_the_device_says_what_to_do() -> None:
    for backend in ("cuda", "acl"):
        with pytest.raises(UnsupportedDeviceError, match="choose --expert-memory padded"):
            open_arena(backend, 0, PAGE)
