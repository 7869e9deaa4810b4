"""Rows of KV, copied by the rank that is going to use them.

    (source, destination) slots --> [copy_rows] --> within this rank's own addresses
                                         '--> peer worker: its pages mapped here, or its bytes

Not by the device's worker, which copies experts (copying.py): only a rank's books say which slots
of KV are free, and they go on at once when a copy is given up. A rank that has not answered by then
is ended. A worker that hangs in a copy cannot be, for the memory is its own, and would write the
rest of it whenever it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_elastic.errors import ElasticInternalError, PeerCopyError
from sgl_elastic.memory import runs as stream
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.copying import peer_at
from sgl_elastic.memory.mapping import RegionMapping
from sgl_elastic.memory.runs import (
    Move,
    Run,
    describe,
    intersect,
    merge,
    move_runs,
    num_slots,
    subtract,
)
from sgl_elastic.memory.window import PageWindow, vmm_errors
from sgl_elastic.types import Region


def copy_rows(
    mapping: RegionMapping,
    pairs: Iterable[tuple[int, int]],
    source: str = "",
    *,
    by_bytes: bool = False,
) -> None:
    """Copy token slots, (source, destination) pairs, in every KV region.

    `source` is another worker's socket; "" = within this rank's memory, and then no slot may be
    both source and destination. `by_bytes`: that worker is on another node, from where bytes come
    but no pages. Raises PeerCopyError when rows did not arrive, some of them perhaps, and
    ElasticInternalError, with nothing copied, for slots that are not attached or meant twice.
    """
    moves = move_runs(pairs)
    if not moves:
        return
    _check(mapping, moves, is_within=not source)
    if not source:
        for region in mapping.kv_regions():
            _copy(mapping, region, moves, mapping.range_of(region.name).address)
        return
    with peer_at(source) as peer:
        if by_bytes:
            _receive(mapping, peer, moves)
        else:
            _copy_from_pages(mapping, peer, moves)


def _copy_from_pages(mapping: RegionMapping, peer: DeviceClient, moves: Sequence[Move]) -> None:
    regions = mapping.kv_regions()
    spans = peer.import_pages(mapping.backend, {r.name: _sources(moves) for r in regions})
    for region in regions:
        with (
            vmm_errors("a rank", f"mapping a peer's {region.name}", PeerCopyError),
            PageWindow(mapping.backend, mapping.page_bytes, spans[region.name]) as window,
        ):
            _copy(mapping, region, moves, window.address_of(0))


def _copy(mapping: RegionMapping, region: Region, moves: Sequence[Move], base: int) -> None:
    """Rows of one region; slot 0 of their source lies, or would lie, at the address `base`."""
    address, row = mapping.range_of(region.name).address, region.slot_bytes
    with vmm_errors("a rank", f"copying {region.name}", PeerCopyError):
        for source, target, count in moves:
            mapping.backend.copy(address + target * row, base + source * row, count * row)


def _receive(mapping: RegionMapping, peer: DeviceClient, moves: Sequence[Move]) -> None:
    regions = mapping.kv_regions()
    row_bytes = {region.name: region.slot_bytes for region in regions}
    targets = {region.name: _targets(moves) for region in regions}
    wanted, num_bytes = stream.num_bytes(targets, row_bytes), 0
    for part in peer.read({region.name: _sources(moves) for region in regions}):
        at = 0
        for name, offset, size in stream.pieces(targets, row_bytes, part.position, len(part.data)):
            with vmm_errors("a rank", f"writing {name}", PeerCopyError):
                address = mapping.range_of(name).address + offset
                mapping.backend.poke(address, part.data[at : at + size])
            at += size
        num_bytes += len(part.data)
    if num_bytes != wanted:
        raise PeerCopyError(f"a peer sent {num_bytes} bytes of {wanted}: versions differ")


def _check(mapping: RegionMapping, moves: Sequence[Move], *, is_within: bool) -> None:
    sources, targets = _sources(moves) if is_within else [], _targets(moves)
    if num_slots(merge(targets)) != num_slots(targets) or intersect(targets, sources):
        raise ElasticInternalError(
            "KV cannot move to a slot twice, or to one that is also copied from: move in turns"
        )
    attached = mapping.attached()
    names = {attached.get(region.name, ()): region.name for region in mapping.kv_regions()}
    for runs, name in names.items():  # mostly all have the same
        missing = subtract([*sources, *targets], runs)
        if missing:
            raise ElasticInternalError(f"{name} {describe(missing)} are not attached")


def _sources(moves: Sequence[Move]) -> list[Run]:
    return [(source, count) for source, _, count in moves]


def _targets(moves: Sequence[Move]) -> list[Run]:
    return [(target, count) for _, target, count in moves]
