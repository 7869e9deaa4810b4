"""Runs of slots, and the pages under them. Pure.

    slots 0 1 2 . . 5 6  -->  ((0, 3), (5, 2))  --> [pages_of] --> run of page positions

A run is (first, count), count at least 1. Runs that functions return are ascending, disjoint and
do not touch. Slots [f, f + c) of S bytes lie on the pages [f*S // P, ceil((f + c)*S / P)).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

Run = tuple[int, int]
Runs = tuple[Run, ...]
Slots = Mapping[str, Sequence[Run]]  # region name -> runs of its slots
Move = tuple[int, int, int]  # source slot, destination slot, slots


def merge(runs: Iterable[Run]) -> Runs:
    """The same slots, ascending and joined."""
    merged: list[Run] = []
    for first, count in sorted(runs):
        if merged and first <= sum(merged[-1]):
            start = merged[-1][0]
            merged[-1] = (start, max(sum(merged[-1]), first + count) - start)
        else:
            merged.append((first, count))
    return tuple(merged)


def subtract(runs: Iterable[Run], taken: Iterable[Run]) -> Runs:
    """The slots of `runs` that are not in `taken`."""
    left: list[Run] = []
    holes = merge(taken)
    for first, count in merge(runs):
        at, end = first, first + count
        for hole_first, hole_count in holes:
            if hole_first + hole_count <= at or hole_first >= end:
                continue
            if hole_first > at:
                left.append((at, hole_first - at))
            at = hole_first + hole_count
        if at < end:
            left.append((at, end - at))
    return tuple(left)


def intersect(runs: Iterable[Run], others: Iterable[Run]) -> Runs:
    """The slots that are in both."""
    wanted = merge(runs)
    return subtract(wanted, subtract(wanted, others))


def difference(slots: Slots, taken: Slots) -> dict[str, Runs]:
    """The slots, by region, that are not in `taken`; regions without any are left out."""
    left = {name: subtract(runs, taken.get(name, ())) for name, runs in slots.items()}
    return {name: runs for name, runs in left.items() if runs}


def union(slots: Slots, more: Slots) -> dict[str, Runs]:
    """The slots, by region, that are in either."""
    return {name: merge((*slots.get(name, ()), *more.get(name, ()))) for name in {**slots, **more}}


def num_slots(runs: Iterable[Run]) -> int:
    """How many slots disjoint runs have."""
    return sum(count for _, count in runs)


def of_slots(slots: Iterable[int]) -> Runs:
    """Single slots as runs."""
    return merge((slot, 1) for slot in slots)


def pages_of(run: Run, slot_bytes: int, page_bytes: int) -> Run:
    """The run of page positions under a run of slots, edge pages whole."""
    first, count = run
    begin = first * slot_bytes // page_bytes
    end = -(-(first + count) * slot_bytes // page_bytes)
    return begin, end - begin


def pages_under(runs: Iterable[Run], slot_bytes: int, page_bytes: int) -> Runs:
    """The page positions under runs of slots; an edge page that two of them share comes once."""
    return merge(pages_of(run, slot_bytes, page_bytes) for run in runs)


def move_runs(pairs: Iterable[tuple[int, int]]) -> tuple[Move, ...]:
    """(source slot, destination slot) pairs as (source, destination, count), order kept."""
    moves: list[Move] = []
    for source, destination in pairs:
        if moves:
            start, target, count = moves[-1]
            if source == start + count and destination == target + count:
                moves[-1] = (start, target, count + 1)
                continue
        moves.append((source, destination, 1))
    return tuple(moves)


def describe(runs: Iterable[Run]) -> str:
    """For error messages: `0-2, 5-6`; long lists are cut."""
    parts = [f"{first}-{first + count - 1}" if count > 1 else f"{first}" for first, count in runs]
    return ", ".join(parts[:8]) + (", .." if len(parts) > 8 else "")


# Slots as one stream of bytes: how they travel where pages cannot. Pure.
#
#     region, runs of slots, bytes of a slot --> [pieces] --> (region, offset, bytes) of a part
#
# The stream of some slots is their bytes, region after region and run after run, in the order in
# which they are named. A part is any stretch of it.

PART_BYTES = 4 << 20  # of one message; far below what the wire lets through


def num_bytes(slots: Slots, slot_bytes: Mapping[str, int]) -> int:
    """How long the stream is."""
    return sum(num_slots(runs) * slot_bytes[region] for region, runs in slots.items())


def pieces(
    slots: Slots, slot_bytes: Mapping[str, int], position: int, count: int
) -> Iterator[tuple[str, int, int]]:
    """(region, offset into it, bytes) of the `count` bytes that begin at `position`."""
    at = 0  # in the stream, where the run begins
    for region, runs in slots.items():
        for first, number in runs:
            size = number * slot_bytes[region]
            begin, end = max(position, at), min(position + count, at + size)
            if begin < end:
                yield region, first * slot_bytes[region] + begin - at, end - begin
            at += size
