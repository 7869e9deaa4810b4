"""Memory behind the slots of MoE layers: all of it from the start, or pages as adapters come.

    create_weights --> [ExpertArena] --> one SlotMemory a layer --> moe_layer.py maps and unmaps
                            |
                        sgl_vmm (csrc/): pool of pages, virtual tensors

An arena belongs to one device of one process. Neither torch nor SGLang is needed here:
expert_tensor.py makes torch tensors of it, memory/plan.py plans with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import sgl_vmm

from sgl_esft.config import MAX_PAGE_BYTES, MIN_PAGE_BYTES
from sgl_esft.errors import (
    ExpertMemoryError,
    InvariantError,
    OutOfExpertMemoryError,
    UnsupportedDeviceError,
)

NO_LIMIT = (1 << 64) - 1  # the extension's max_pages of a pool without a budget


@dataclass(frozen=True)
class SlotUsage:
    """Bytes behind one layer's slots, all its tensors together."""

    reserved_bytes: int  # addresses
    mapped_bytes: int  # of them with memory behind
    shared_bytes: int  # of them on pages that several slots share
    used_bytes: int  # what the mapped slots themselves need


class SlotMemory(Protocol):
    """The memory of one layer's slots; every method speaks of all its tensors at once."""

    def choose(self, region: range, count: int) -> range:
        """Which `count` neighbouring slots of `region`, none of them mapped, to map."""

    def map(self, slots: range) -> None:
        """Put memory behind the slots, content undefined. All or nothing.

        Raises OutOfExpertMemoryError, or InvariantError when one of them is mapped.
        """

    def unmap(self, slots: range) -> None:
        """Take the slots' memory back; those that have none are passed over."""

    def max_pages(self, count: int) -> int:
        """The most pages that `count` neighbouring slots take, wherever they lie."""

    def mapped_slots(self) -> set[int]:
        """Slots that may be read."""

    def usage(self) -> SlotUsage:
        """Bytes as of now."""

    def check_integrity(self) -> None:
        """Raises InvariantError when the books do not balance."""


class PaddedMemory:
    """Every slot has memory from the start (the paper's baseline, section 3.1)."""

    def __init__(self, num_slots: int, slot_bytes: Sequence[int]) -> None:
        self._num_slots = num_slots
        self._slot_bytes = sum(slot_bytes)
        self.padded_slot_bytes = 0  # in tensors beside these, counted with them
        self._mapped: set[int] = set()

    def choose(self, region: range, count: int) -> range:
        return region[:count]

    def map(self, slots: range) -> None:
        twice = self._mapped.intersection(slots)
        if twice or not set(slots) <= set(range(self._num_slots)):
            raise InvariantError(f"slots {slots} of {self._num_slots}: {twice} mapped already")
        self._mapped.update(slots)

    def unmap(self, slots: range) -> None:
        self._mapped.difference_update(slots)

    def max_pages(self, count: int) -> int:
        return 0

    def mapped_slots(self) -> set[int]:
        return set(self._mapped)

    def usage(self) -> SlotUsage:
        slot_bytes = self._slot_bytes + self.padded_slot_bytes
        total = self._num_slots * slot_bytes
        return SlotUsage(total, total, 0, len(self._mapped) * slot_bytes)

    def check_integrity(self) -> None:
        """Nothing is counted twice here."""


class VirtualMemory:
    """Pages behind the mapped slots only (ExpertWeave section 4.2)."""

    def __init__(
        self, tensors: Sequence[sgl_vmm.VirtualTensor], page_bytes: int, num_slots: int
    ) -> None:
        self.tensors = tuple(tensors)
        self._page_bytes = page_bytes
        self._num_slots = num_slots
        self.padded_slot_bytes = 0  # in tensors beside these that have memory for every slot

    def choose(self, region: range, count: int) -> range:
        """The run that takes the fewest pages: edge pages shared, or starts on a page's start."""
        starts = range(region.start, region.stop - count + 1)
        first = min(starts, key=lambda start: self.num_missing_pages(range(start, start + count)))
        return range(first, first + count)

    def num_missing_pages(self, slots: range) -> int:
        """Pages that `map` would take from the pool."""
        return sum(t.num_missing_pages(slots.start, len(slots)) for t in self.tensors)

    def map(self, slots: range) -> None:
        with _translated():
            for index, tensor in enumerate(self.tensors):
                try:
                    tensor.map_slots(slots.start, len(slots))
                except sgl_vmm.VmmError:
                    _unmap_all(self.tensors[:index], slots)
                    raise

    def unmap(self, slots: range) -> None:
        failure = _unmap_all(self.tensors, slots)
        if failure is not None:
            raise ExpertMemoryError(
                f"{failure}: slots {slots} are unmapped, but their pages are kept until they are "
                "unmapped again"
            ) from failure

    def max_pages(self, count: int) -> int:
        sizes = (count * tensor.state().slot_bytes for tensor in self.tensors)
        return sum(max_run_pages(size, self._page_bytes) for size in sizes)

    def mapped_slots(self) -> set[int]:
        flags = zip(*(tensor.mapped_slots() for tensor in self.tensors), strict=True)
        return {slot for slot, mapped in enumerate(flags) if all(mapped)}

    def usage(self) -> SlotUsage:
        states = [tensor.state() for tensor in self.tensors]
        padding = self._num_slots * self.padded_slot_bytes
        num_mapped = states[0].num_mapped_slots
        return SlotUsage(
            reserved_bytes=sum(state.reserved_bytes for state in states) + padding,
            mapped_bytes=sum(state.num_pages for state in states) * self._page_bytes + padding,
            shared_bytes=sum(state.num_shared_pages for state in states) * self._page_bytes,
            used_bytes=sum(state.num_mapped_slots * state.slot_bytes for state in states)
            + num_mapped * self.padded_slot_bytes,
        )

    def check_integrity(self) -> None:
        with _translated():
            for tensor in self.tensors:
                tensor.check_integrity()
        flags = [tensor.mapped_slots() for tensor in self.tensors]
        if any(flag != flags[0] for flag in flags):
            raise InvariantError("the tensors of a layer have different slots mapped")


def _unmap_all(tensors: Sequence[sgl_vmm.VirtualTensor], slots: range) -> sgl_vmm.VmmError | None:
    """Unmap in every tensor, whatever fails in one of them. Returns the first failure."""
    failures = []
    for tensor in tensors:
        try:
            tensor.unmap_slots(slots.start, len(slots))
        except sgl_vmm.VmmError as error:
            failures.append(error)
    return failures[0] if failures else None


class ExpertArena:
    """One device's pages and the layers that use them."""

    def __init__(
        self, backend: sgl_vmm.Backend, page_bytes: int, budget_bytes: int | None = None
    ) -> None:
        self.backend = backend
        self.page_bytes = page_bytes
        with _translated():
            self.pool = sgl_vmm.PagePool(backend, page_bytes=page_bytes, budget_bytes=budget_bytes)

    def make_layer(self, num_slots: int, slot_bytes: Sequence[int]) -> VirtualMemory:
        """Reserve addresses for a layer: one tensor of `num_slots` for each of `slot_bytes`."""
        with _translated():
            tensors = [sgl_vmm.VirtualTensor(self.pool, num_slots, size) for size in slot_bytes]
        return VirtualMemory(tensors, self.page_bytes, num_slots)

    @property
    def budget_bytes(self) -> int | None:
        """What all pages together may take; None = whatever the device has."""
        max_pages = self.pool.state().max_pages
        return None if max_pages == NO_LIMIT else max_pages * self.page_bytes

    def reserve_pages(self, num_pages: int) -> None:
        """Make so many free pages now, and let the pool never grow beyond them.

        Raises OutOfExpertMemoryError when the device has fewer.
        """
        with _translated():
            self.pool.preallocate(num_pages)
            self.pool.trim(num_pages)
            self.pool.set_budget((self.pool.state().num_used + num_pages) * self.page_bytes)

    def check_integrity(self) -> None:
        """Raises InvariantError when the pool's books do not balance."""
        with _translated():
            self.pool.check_integrity()


def open_arena(
    backend_name: str, device_id: int, page_bytes: int, budget_bytes: int | None = None
) -> ExpertArena:
    """An arena on a device: backend "host", "cuda" or "acl".

    `page_bytes` is the host's page; a device's own granularity wins where it is larger.
    `budget_bytes` bounds all pages. Raises UnsupportedDeviceError.
    """
    with _translated():
        backend = sgl_vmm.open_backend(backend_name, device_id=device_id, page_bytes=page_bytes)
    return ExpertArena(backend, max(page_bytes, backend.granularity), budget_bytes)


def choose_page_bytes(slot_bytes: Sequence[int]) -> int:
    """The host's page size for slots of these sizes: no larger than a slot, 4 KiB to 2 MiB."""
    page_bytes = MAX_PAGE_BYTES
    while page_bytes > MIN_PAGE_BYTES and page_bytes > min(slot_bytes):
        page_bytes //= 2
    return page_bytes


def max_run_pages(num_bytes: int, page_bytes: int) -> int:
    """The most pages that `num_bytes` bytes in a row can touch, wherever they begin."""
    return 0 if num_bytes == 0 else (num_bytes + page_bytes - 2) // page_bytes + 1


@contextmanager
def _translated() -> Iterator[None]:
    """The extension's errors as this package's: who must do what."""
    try:
        yield
    except sgl_vmm.PoolExhaustedError as error:
        raise OutOfExpertMemoryError(
            f"{error}: unload an adapter, or raise --adapter-memory"
        ) from error
    except (sgl_vmm.UnsupportedDeviceError, sgl_vmm.BadGranularityError) as error:
        raise UnsupportedDeviceError(f"{error}: choose --expert-memory padded") from error
    except (sgl_vmm.SlotMappedError, sgl_vmm.IntegrityError) as error:
        raise InvariantError(str(error)) from error
    except sgl_vmm.VmmError as error:
        raise ExpertMemoryError(str(error)) from error
