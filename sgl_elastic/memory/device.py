"""One device's memory: regions of slots over one pool of pages. Knows no process and no socket.

    worker.py --> [DeviceMemory] --> regions (VirtualTensor each) --> pages of one pool (sgl_vmm)

Pages are made when they are needed first and never destroyed: one that leaves a region waits in the
pool for the next. So a page's id (its handle) means the same page as long as the process lives,
and whoever imported it need not ask again. A page that is used again holds what was in it before.

Not thread-safe: the worker holds one lock around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import sgl_vmm
import xxhash

from sgl_elastic.errors import MemoryWorkerError, PeerCopyError, StepFailedError
from sgl_elastic.memory import runs as stream
from sgl_elastic.memory.messages import ExpertSlots, Usage
from sgl_elastic.memory.runs import (
    Run,
    Runs,
    Slots,
    describe,
    intersect,
    merge,
    num_slots,
    pages_under,
    subtract,
)
from sgl_elastic.memory.window import PageSpans, PageWindow, vmm_errors
from sgl_elastic.types import MemoryShape, Region, RegionKind

_PEEK_BYTES = 4 << 20  # a digest reads so much at a time


class DeviceMemory:
    """All memory of one device.

    `budget_bytes` bounds the pages of all regions together; one more, the scratch page, is there
    from the start. `library` is the vendor's; "" = its usual name. Raises MemoryWorkerError when
    the device cannot be opened.
    """

    def __init__(
        self,
        backend_name: str,
        device_id: int,
        page_bytes: int,
        budget_bytes: int,
        library: str = "",
    ) -> None:
        self._device_id = device_id
        self._page_bytes = page_bytes
        self._regions: dict[str, RegionState] = {}
        self._shape: MemoryShape | None = None
        self._slot_bytes: dict[str, int] = {}
        with self._named("opening it"):
            self.backend = sgl_vmm.open_backend(
                backend_name,
                device_id=device_id,
                page_bytes=page_bytes,
                capacity_bytes=(budget_bytes // page_bytes + 1) * page_bytes,
                library=library,
            )
            self._pool = sgl_vmm.PagePool(
                self.backend, page_bytes=page_bytes, budget_bytes=budget_bytes
            )
            self.scratch = self._make_scratch()  # of no region, for engines that are parked
        self.budget_pages = self._pool.state().max_pages

    def define(self, shape: MemoryShape) -> None:
        """Reserve all regions' addresses. Raises MemoryWorkerError for a second, other shape."""
        if self._shape == shape:
            return
        if self._shape is not None:
            raise MemoryWorkerError(
                f"device {self._device_id} has another memory shape already: stop its worker, and "
                "start one for each model"
            )
        check_shape(shape, self._page_bytes)
        with self._named("reserving addresses"):
            self._regions = {
                region.name: RegionState(
                    self._device_id,
                    region,
                    sgl_vmm.VirtualTensor(self._pool, region.num_slots, region.slot_bytes),
                )
                for region in shape.regions
            }
        self._shape = shape
        self._slot_bytes = {region.name: region.slot_bytes for region in shape.regions}

    def map_slots(self, slots: Slots) -> dict[str, Runs]:
        """Put pages behind slots, all or nothing; content undefined. Returns those that had none.

        Raises MemoryWorkerError beyond the budget.
        """
        missing = [(state, subtract(runs, state.mapped)) for state, runs in self._checked(slots)]
        done: list[tuple[RegionState, Run]] = []
        with self._named(f"mapping {describe_all(missing)}"):
            try:
                for state, run in ((state, run) for state, runs in missing for run in runs):
                    state.tensor.map_slots(*run)
                    done.append((state, run))
            except sgl_vmm.VmmError:
                for state, run in reversed(done):
                    with suppress(sgl_vmm.VmmError):  # the slots are unmapped all the same
                        state.tensor.unmap_slots(*run)
                raise
        for state, runs in missing:
            state.mapped = merge((*state.mapped, *runs))
        return changed(missing)

    def unmap_slots(self, slots: Slots) -> dict[str, Runs]:
        """Take pages back that no other mapped slot needs. Returns the slots that had pages."""
        wanted = self._checked(slots)
        present = [(state, intersect(runs, state.mapped)) for state, runs in wanted]
        for state, runs in wanted:
            state.mapped = subtract(state.mapped, runs)
            state.loaded = subtract(state.loaded, runs)
        with self._named(f"unmapping {describe_all(wanted)}"):
            for state, run in ((state, run) for state, runs in wanted for run in runs):
                state.tensor.unmap_slots(*run)
        return changed(present)

    def pages(self, slots: Slots, *, must_be_loaded: bool = False) -> dict[str, PageSpans]:
        """For each region, the pages under its slots; an edge page that two share comes once.

        Raises MemoryWorkerError for a slot without pages; with `must_be_loaded`, PeerCopyError for
        one without valid content.
        """
        wanted = self._mapped(slots, must_be_loaded=must_be_loaded)
        return {state.region.name: self._spans(state, runs) for state, runs in wanted}

    def mark_loaded(self, slots: Slots, *, is_loaded: bool = True) -> None:
        """The content of mapped slots is valid, or no longer. Raises MemoryWorkerError."""
        wanted = self._mapped(slots)
        for state, runs in wanted:
            if is_loaded:
                state.loaded = merge((*state.loaded, *runs))
            else:
                state.loaded = subtract(state.loaded, runs)

    def not_loaded(self, slots: Slots) -> dict[str, Runs]:
        """Those of the slots without valid content. Raises MemoryWorkerError if one has no page."""
        return changed([(s, subtract(runs, s.loaded)) for s, runs in self._mapped(slots)])

    def copy_in(self, region: str, runs: Sequence[Run], source: PageSpans) -> int:
        """Copy whole slots from a peer's imported pages, mark them loaded, return the bytes.

        `source` covers the pages of these slots, by the position they have in any such region.
        Raises MemoryWorkerError for a slot without pages, PeerCopyError if the copy fails.
        """
        [(state, wanted)] = self._mapped({region: runs})
        slot_bytes = state.region.slot_bytes
        copied = 0
        with (
            self._named(f"copying {region} {describe(wanted)} from a peer", PeerCopyError),
            PageWindow(self.backend, self._page_bytes, source) as window,
        ):
            for first, count in wanted:
                offset, num_bytes = first * slot_bytes, count * slot_bytes
                self.backend.copy(
                    state.tensor.address + offset, window.address_of(offset), num_bytes
                )
                copied += num_bytes
        self.mark_loaded({region: wanted})
        return copied

    def read(self, slots: Slots, position: int, count: int) -> bytes:
        """Bytes of mapped slots' stream (runs.py); `position` and `count` lie within it."""
        with self._named("reading slots"):
            return b"".join(
                self.backend.peek(address, num_bytes)
                for address, num_bytes in self._addresses(slots, position, count)
            )

    def write(self, slots: Slots, position: int, data: bytes) -> None:
        """Put bytes of a peer's stream where they belong in mapped slots. Marks nothing."""
        at = 0
        with self._named("writing what a peer sent", PeerCopyError):
            for address, num_bytes in self._addresses(slots, position, len(data)):
                self.backend.poke(address, data[at : at + num_bytes])
                at += num_bytes
        if at != len(data):
            raise PeerCopyError(f"a peer sent {len(data) - at} bytes more than were asked for")

    def readable(self, slots: Slots, *, must_be_loaded: bool = False) -> int:
        """How long the slots' stream is. Raises as `pages` does."""
        self._mapped(slots, must_be_loaded=must_be_loaded)
        return stream.num_bytes(slots, self._slot_bytes)

    def _addresses(self, slots: Slots, position: int, count: int) -> Iterator[tuple[int, int]]:
        self._mapped(slots)
        for region, offset, num_bytes in stream.pieces(slots, self._slot_bytes, position, count):
            yield self._regions[region].tensor.address + offset, num_bytes

    def digest(self, region: str, slot: int) -> str:
        """xxh3 (64 bits, hexadecimal) of a mapped slot's bytes. Raises MemoryWorkerError."""
        [(state, _)] = self._mapped({region: [(slot, 1)]})
        slot_bytes = state.region.slot_bytes
        begin = state.tensor.address + slot * slot_bytes
        hasher = xxhash.xxh3_64()
        with self._named(f"reading {region} slot {slot}"):
            for offset in range(0, slot_bytes, _PEEK_BYTES):
                num_bytes = min(_PEEK_BYTES, slot_bytes - offset)
                hasher.update(self.backend.peek(begin + offset, num_bytes))
        return hasher.hexdigest()

    def expert_slots(self) -> ExpertSlots:
        """Which slots of EXPERT regions have pages, and valid content."""
        found = {n: s for n, s in self._regions.items() if s.region.kind is RegionKind.EXPERT}
        return ExpertSlots(
            {name: state.mapped for name, state in found.items() if state.mapped},
            {name: state.loaded for name, state in found.items() if state.loaded},
        )

    def usage(self) -> Usage:
        """What takes how much, at this moment."""
        pool, resident = self._pool.state(), self.backend.resident_bytes
        pages, mapped, loaded = ({kind.value: 0 for kind in RegionKind} for _ in range(3))
        for state in self._regions.values():
            kind = state.region.kind.value
            pages[kind] += state.tensor.state().num_pages
            mapped[kind] += num_slots(state.mapped)
            loaded[kind] += num_slots(state.loaded)
        return Usage(
            device_id=self._device_id,
            page_bytes=self._page_bytes,
            budget_pages=pool.max_pages,
            used_pages=pool.num_used,
            free_pages=pool.num_free,
            peak_pages=pool.peak_used,
            pages=pages,
            mapped_slots=mapped,
            loaded_slots=loaded,
            resident_bytes=-1 if resident is None else resident,
        )

    def _make_scratch(self) -> sgl_vmm.Handle:
        handle = self.backend.create(self._page_bytes)
        with PageWindow(self.backend, self._page_bytes, [(0, [handle])]) as window:
            for offset in range(0, self._page_bytes, _PEEK_BYTES):
                zeros = bytes(min(_PEEK_BYTES, self._page_bytes - offset))
                self.backend.poke(window.address_of(offset), zeros)
        return handle

    def _spans(self, state: RegionState, runs: Runs) -> PageSpans:
        with self._named(f"looking up {state.region.name}"):
            handles = state.tensor.page_handles()
        spans = []
        for first, count in pages_under(runs, state.region.slot_bytes, self._page_bytes):
            span = [handle for handle in handles[first : first + count] if handle is not None]
            if len(span) != count:
                raise MemoryWorkerError(f"{state.region.name} has lost a page: stop the worker")
            spans.append((first, span))
        return spans

    def _checked(self, slots: Slots) -> list[tuple[RegionState, Runs]]:
        """Regions by name, with runs in order. Raises MemoryWorkerError for unknown ones."""
        checked = []
        for name, runs in slots.items():
            state = self._regions.get(name)
            if state is None:
                raise MemoryWorkerError(
                    f"device {self._device_id} has no region {name!r}: define the shape first"
                )
            beyond = subtract(runs, [(0, state.region.num_slots)])
            if beyond:
                raise MemoryWorkerError(
                    f"{name} has {state.region.num_slots} slots, {describe(beyond)} are not among "
                    "them"
                )
            checked.append((state, merge(runs)))
        return checked

    def _mapped(
        self, slots: Slots, *, must_be_loaded: bool = False
    ) -> list[tuple[RegionState, Runs]]:
        """As `_checked`; raises also as `RegionState.check` does."""
        wanted = self._checked(slots)
        for state, runs in wanted:
            state.check(runs, must_be_loaded=must_be_loaded)
        return wanted

    def _named(
        self, doing: str, error_class: type[StepFailedError] = MemoryWorkerError
    ) -> AbstractContextManager[None]:
        return vmm_errors(f"device {self._device_id}", doing, error_class)


# What a worker knows of one region, and what it says of several.
#
# device.py --> [RegionState] --> addresses (VirtualTensor), slots with pages, slots with content


@dataclass
class RegionState:
    """A region's addresses, and which of its slots have pages and valid content."""

    device_id: int
    region: Region
    tensor: sgl_vmm.VirtualTensor
    mapped: Runs = ()
    loaded: Runs = ()  # always within `mapped`

    def check(self, runs: Sequence[Run], *, must_be_loaded: bool = False) -> None:
        """Raises MemoryWorkerError for slots without pages, PeerCopyError without valid content."""
        unmapped = subtract(runs, self.mapped)
        if unmapped:
            raise MemoryWorkerError(
                f"device {self.device_id} has no pages behind {self.region.name} "
                f"{describe(unmapped)}: map them first"
            )
        unloaded = subtract(runs, self.loaded)
        if must_be_loaded and unloaded:
            raise PeerCopyError(
                f"device {self.device_id} has no valid content in {self.region.name} "
                f"{describe(unloaded)}: load it, or copy from another device"
            )


def check_shape(shape: MemoryShape, page_bytes: int) -> None:
    """Raises MemoryWorkerError for a shape that these pages cannot hold."""
    names = [region.name for region in shape.regions]
    sizes = [min(region.num_slots, region.slot_bytes) for region in shape.regions]
    if shape.page_bytes != page_bytes or len(set(names)) != len(names) or min(sizes, default=1) < 1:
        raise MemoryWorkerError(
            f"not a shape for pages of {page_bytes} bytes: it has pages of {shape.page_bytes}, "
            "and regions need different names, slots and bytes"
        )


def describe_all(slots: Sequence[tuple[RegionState, Runs]]) -> str:
    """For error messages: the first three regions."""
    parts = [f"{state.region.name} {describe(runs)}" for state, runs in slots if runs]
    more = ", .." if len(parts) > 3 else ""
    return "; ".join(itertools.islice(parts, 3)) + more if parts else "nothing"


def changed(slots: Sequence[tuple[RegionState, Runs]]) -> dict[str, Runs]:
    """By name, those that are any."""
    return {state.region.name: runs for state, runs in slots if runs}
