"""An engine rank's addresses: stable for ever, with the worker's pages behind them while it serves.

    parked:    every page of every region --> one scratch page, the worker's or our own
    attached:  the slots of the placement --> the worker's pages; elsewhere nothing (a fault)

    engine --> [RegionMapping] --> DeviceClient --> worker
                     |
                     +--> AddressRange, one a region (tensors over it stay valid throughout)

Pages at the edge of a slot are mapped whole, so a neighbour's bytes on them can be reached. Not
thread-safe, and nothing may use the memory during a call other than `extend` and `shrink`, which
leave all slots but theirs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import sgl_vmm

from sgl_elastic.errors import ElasticError, MemoryWorkerError
from sgl_elastic.memory.client import DeviceClient, ImportedSpans
from sgl_elastic.memory.runs import Run, Runs, Slots, merge, pages_under, subtract
from sgl_elastic.memory.window import vmm_errors
from sgl_elastic.types import MemoryShape, Region, RegionKind


class RegionMapping:
    """One address range a region, with a backend of its own, of the workers' kind.

    `device_id` is the device as this process numbers it; `library` is the vendor's, "" = its usual
    name. At first nothing is mapped: `park` or `attach`. Raises MemoryWorkerError when the device
    or so many addresses cannot be had.
    """

    def __init__(
        self, shape: MemoryShape, backend_name: str, *, device_id: int = 0, library: str = ""
    ) -> None:
        self.page_bytes = shape.page_bytes
        self._regions: dict[str, Region] = {region.name: region for region in shape.regions}
        self._slots: dict[str, Runs] = dict.fromkeys(self._regions, ())  # attached ones
        self._pages: dict[str, Runs] = dict.fromkeys(self._regions, ())  # positions under them
        self._scratch: sgl_vmm.Handle | None = None
        with _named("reserving addresses"):
            self.backend = sgl_vmm.open_backend(
                backend_name,
                device_id=device_id,
                page_bytes=shape.page_bytes,
                capacity_bytes=shape.page_bytes,  # of its own it makes one page, for `park`
                library=library,
            )
            self._ranges = {
                region.name: sgl_vmm.AddressRange(
                    self.backend,
                    region.num_slots * region.slot_bytes,
                    page_bytes=shape.page_bytes,
                )
                for region in shape.regions
            }

    def kv_regions(self) -> tuple[Region, ...]:
        """The KV regions, in the shape's order."""
        return tuple(r for r in self._regions.values() if r.kind is RegionKind.KV)

    def range_of(self, region: str) -> sgl_vmm.AddressRange:
        """The region's addresses, for tensors over them. Raises MemoryWorkerError."""
        self._known({region: ()})
        return self._ranges[region]

    def attached(self) -> dict[str, Runs]:
        """The slots that are attached, by region; empty while parked."""
        return {name: runs for name, runs in self._slots.items() if runs}

    def park(self, client: DeviceClient | None = None) -> None:
        """Put one scratch page behind every address, in place of what is mapped.

        The worker's, or without a client one of this process's own: an engine may be parked for
        a device that has no worker yet. AscendCL maps own and imported pages in one reservation
        only apart, so there a client is needed.
        """
        if client is not None:
            scratch = client.import_scratch(self.backend)
        else:
            with _named("making a scratch page"):
                scratch = self._scratch or self.backend.create(self.page_bytes)
            self._scratch = scratch
        self.detach()
        with _named("parking"):
            for found in self._ranges.values():
                found.map(0, [scratch] * (found.num_bytes // self.page_bytes))

    def attach(self, client: DeviceClient, slots: Slots) -> None:
        """Map these slots' pages, and nothing else, in place of what is mapped.

        Raises MemoryWorkerError: before anything has changed when the worker does not have them
        all, otherwise with everything parked again.
        """
        self._known(slots)
        spans = client.import_pages(self.backend, slots)
        self.detach()
        try:
            self._map_spans(spans)
        except ElasticError:
            self.park(client)
            raise
        self._slots.update({name: merge(runs) for name, runs in slots.items()})

    def extend(self, client: DeviceClient, slots: Slots) -> None:
        """Map more slots, for which the worker has pages; all or nothing. Not while parked."""
        wanted = {name: subtract(runs, self._slots[name]) for name, runs in self._known(slots)}
        self._map_spans(client.import_pages(self.backend, wanted))
        for name, runs in wanted.items():
            self._slots[name] = merge((*self._slots[name], *runs))

    def shrink(self, slots: Slots) -> None:
        """Leave slots, before the worker unmaps them. What is not attached is passed over."""
        for name, runs in self._known(slots):
            left = subtract(self._slots[name], runs)
            needed = pages_under(left, self._regions[name].slot_bytes, self.page_bytes)
            with _named(f"unmapping {name}"):
                for run in subtract(self._pages[name], needed):
                    self._ranges[name].unmap(*run)
            self._slots[name] = left
            self._pages[name] = needed

    def detach(self) -> None:
        """Unmap everything; a stray read is a fault. `park` follows where one may come."""
        with _named("unmapping"):
            for name, found in self._ranges.items():
                found.unmap(0, found.num_bytes // self.page_bytes)
                self._slots[name] = self._pages[name] = ()

    def _known(self, slots: Slots) -> list[tuple[str, Sequence[Run]]]:
        """Raises MemoryWorkerError for a region that the shape does not have."""
        for name in slots:
            if name not in self._regions:
                raise MemoryWorkerError(f"the memory shape has no region {name!r}")
        return list(slots.items())

    def _map_spans(self, spans: Mapping[str, ImportedSpans]) -> None:
        """Map the positions that are not mapped yet. All or nothing."""
        done: list[tuple[str, Run]] = []
        try:
            for name, found in spans.items():
                with _named(f"mapping {name}"):
                    for first, handles in found:
                        for start, count in subtract([(first, len(handles))], self._pages[name]):
                            at = start - first
                            self._ranges[name].map(start, handles[at : at + count])
                            done.append((name, (start, count)))
        except MemoryWorkerError:
            for name, run in done:
                self._ranges[name].unmap(*run)
            raise
        for name, run in done:
            self._pages[name] = merge((*self._pages[name], run))


def _named(doing: str) -> AbstractContextManager[None]:
    return vmm_errors("an engine", doing, MemoryWorkerError)
