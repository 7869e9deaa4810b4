"""KV copied by the rank that will use it: from another device, within its own; workers that hang.

Real memory workers; the rank is a mapping in this process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sgl_elastic.errors import ElasticInternalError, PeerCopyError
from sgl_elastic.memory.connection import HANG_S
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.kv_rows import copy_rows
from sgl_elastic.memory.mapping import RegionMapping
from tests.fast.elastic.memory_workers import (
    attached,
    comes_to,
    count_fds,
    digests,
    expected_digests,
    fill,
    hmm_of,
    settle,
    stopped,
)

KV = ("kv.0", "kv.1")
SLOTS = {name: [(0, 101)] for name in KV}
MOVES = [(50, 10), (51, 11), (7, 99)]
BY_BYTES = pytest.mark.parametrize("by_bytes", [False, True], ids=["pages", "bytes"])
Digests = Mapping[tuple[str, int], str]


@pytest.fixture
def hmm(tmp_path: Path) -> Iterator[Hmm]:
    """Two devices whose KV is full of different patterns."""
    with hmm_of(tmp_path) as found:
        for device_id in (0, 1):
            found.client(device_id).map_slots(SLOTS)
            fill(found, device_id, SLOTS, seed=device_id)
        yield found


@pytest.fixture
def rank(hmm: Hmm) -> Iterator[RegionMapping]:
    """The one on device 1."""
    with attached(hmm, 1, SLOTS) as (mapping, _):
        yield mapping


def after(moves: list[tuple[int, int]], source: Digests) -> Digests:
    """What device 1 holds when these rows have come from `source`."""
    found = dict(expected_digests(SLOTS, 1))
    found.update(((name, target), source[name, row]) for row, target in moves for name in KV)
    return found


@BY_BYTES
def test_rows_of_another_device(hmm: Hmm, rank: RegionMapping, by_bytes: bool) -> None:
    copy_rows(rank, iter(MOVES), str(hmm.socket_path(0, 1)), by_bytes=by_bytes)
    assert digests(hmm, 1, SLOTS) == after(MOVES, expected_digests(SLOTS, 0))
    assert digests(hmm, 0, SLOTS) == expected_digests(SLOTS, 0)


def test_rows_within_the_device(hmm: Hmm, rank: RegionMapping) -> None:
    moves = [(60, 20), (61, 21), (80, 22)]
    copy_rows(rank, moves)
    copy_rows(rank, [])
    copy_rows(rank, [], "/nowhere.sock")  # nothing to copy asks nobody
    assert digests(hmm, 1, SLOTS) == after(moves, expected_digests(SLOTS, 1))


def test_a_copy_leaves_nothing_behind(hmm: Hmm, rank: RegionMapping) -> None:
    source = str(hmm.socket_path(0, 1))
    copy_rows(rank, MOVES, source)
    ours, theirs = settle(count_fds), settle(lambda: count_fds(hmm.client(0).info.pid))
    for _ in range(5):
        copy_rows(rank, MOVES, source)
        copy_rows(rank, MOVES, source, by_bytes=True)
    assert comes_to(count_fds, ours) == ours
    assert comes_to(lambda: count_fds(hmm.client(0).info.pid), theirs) == theirs


@pytest.mark.parametrize("moves", [[(1, 2), (2, 3)], [(1, 5), (2, 5)], [(1, 2), (2, 1)]])
def test_moves_that_depend_on_order_are_refused(
    hmm: Hmm, rank: RegionMapping, moves: list[tuple[int, int]]
) -> None:
    with pytest.raises(ElasticInternalError, match="move in turns"):
        copy_rows(rank, moves)
    assert digests(hmm, 1, SLOTS) == expected_digests(SLOTS, 1)
    source = str(hmm.socket_path(0, 1))
    copy_rows(rank, [(1, 2), (2, 3)], source)  # those are two devices' slots
    with pytest.raises(ElasticInternalError, match="slot twice"):
        copy_rows(rank, [(1, 5), (2, 5)], source)


@pytest.mark.parametrize("moves", [[(1, 60)], [(60, 1)]])
def test_slots_that_are_not_attached_are_refused(hmm: Hmm, moves: list[tuple[int, int]]) -> None:
    refused = pytest.raises(ElasticInternalError, match="60 are not attached")
    with attached(hmm, 1, {name: [(0, 50)] for name in KV}) as (mapping, _), refused:
        copy_rows(mapping, moves)


@BY_BYTES
def test_a_source_without_these_rows(hmm: Hmm, rank: RegionMapping, by_bytes: bool) -> None:
    source = str(hmm.socket_path(0, 1))
    hmm.client(0).unmap_slots({name: [(50, 51)] for name in KV})
    with pytest.raises(PeerCopyError, match="no pages"):
        copy_rows(rank, [(90, 10)], source, by_bytes=by_bytes)
    hmm.remove_device(0)
    with pytest.raises(PeerCopyError, match="nobody answers"):
        copy_rows(rank, MOVES, source, by_bytes=by_bytes)
    assert digests(hmm, 1, SLOTS) == expected_digests(SLOTS, 1)


@BY_BYTES
def test_a_source_that_hangs_writes_nothing_later(
    hmm: Hmm, rank: RegionMapping, by_bytes: bool
) -> None:
    """Once the copy is given up the slots are somebody else's, whatever the worker does then."""
    path, began = str(hmm.socket_path(0, 1)), time.monotonic()
    with stopped(hmm.client(0).info.pid), pytest.raises(PeerCopyError):
        copy_rows(rank, MOVES, path, by_bytes=by_bytes)
    assert time.monotonic() - began < HANG_S + 2
    assert digests(hmm, 0, SLOTS) == expected_digests(SLOTS, 0), "it goes on"
    assert digests(hmm, 1, SLOTS) == expected_digests(SLOTS, 1)


def test_the_own_worker_is_not_needed(hmm: Hmm, rank: RegionMapping) -> None:
    """It may hang or die: what it would have to copy is mapped here."""
    with stopped(hmm.client(1).info.pid):
        copy_rows(rank, MOVES, str(hmm.socket_path(0, 1)))
        copy_rows(rank, [(60, 20)])
    expected = dict(after(MOVES, expected_digests(SLOTS, 0)))
    expected.update(((name, 20), expected_digests(SLOTS, 1)[name, 60]) for name in KV)
    assert digests(hmm, 1, SLOTS) == expected
