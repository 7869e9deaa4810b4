"""Slots as one stream of bytes: how they travel where pages cannot. Pure.

    region, runs of slots, bytes of a slot --> [pieces] --> (region, offset, bytes) of a part

The stream of some slots is their bytes, region after region and run after run, in the order in
which they are named. A part is any stretch of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sgl_elastic.memory.runs import Slots, num_slots

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
