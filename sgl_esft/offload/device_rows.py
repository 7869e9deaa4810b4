"""Rows on an accelerator: experts go through page-locked host memory, on a stream of their own.

    loader's thread: read -> a seat (host) --copy stream--> row, event `landed`
    a layer: its stream waits for `landed` of the rows it reads, runs its kernel, event `used`
    the next copy into a row waits for its `used`, the next read into a seat for its copies

So a row is never read before its expert is there, and never written while a kernel reads it; the
host waits for neither. Seats that are more than the threads need keep what was read
(host_tier.py): a load whose expert is in one is a copy alone. The order is asked of a simulator in
tests (tests/support/streams.py): no accelerator has run this.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.host_tier import HostCounts, HostTier
from sgl_esft.offload.loader import LoadJob
from sgl_esft.offload.pack import align_up
from sgl_esft.offload.source import ExpertPlace

Read = Callable[..., None]  # (ExpertPlace, *a seat's parts)
Lock = Callable[[int, int], None]  # (address, bytes): these pages stay where they are
_Row = tuple[int, int]  # layer, row


class Streams(Protocol):
    """What is asked of `torch.cuda`, or of `torch.npu`."""

    def Stream(self) -> Any:  # noqa: N802 (the vendor's name)
        """A new stream of the current device."""

    def current_stream(self) -> Any:
        """That of this thread."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """What this thread starts within it goes to `stream`."""


@dataclass
class Seat:
    """One expert's place in host memory, page-locked where a device copies from it."""

    parts: tuple[torch.Tensor, ...]  # as `TierLayer.at` a row
    emptied: Any = None  # event: the last copy out of it has ended

    @property
    def num_bytes(self) -> int:
        """What is copied."""
        return sum(part.nbytes for part in self.parts)


def seat_bytes(rows: Sequence[torch.Tensor]) -> int:
    """Host memory of an expert of these rows, each [num_rows, ...]: whole pages."""
    return sum(align_up(tensor[0].nbytes) for tensor in rows)


def make_seats(rows: Sequence[torch.Tensor], count: int, lock: Lock | None = None) -> list[Seat]:
    """`count` seats for experts of these rows, in one piece of memory that `lock` page-locks.

    Not torch's own pinned memory, which is rounded up to a power of two.
    """
    each = seat_bytes(rows)
    memory = np.frombuffer(mmap.mmap(-1, count * each), dtype=np.uint8)
    if lock is not None:
        lock(memory.ctypes.data, len(memory))
    return [Seat(tuple(_cut(memory, rows, n * each))) for n in range(count)]


def _cut(
    memory: NDArray[np.uint8], rows: Sequence[torch.Tensor], start: int
) -> Iterator[torch.Tensor]:
    """A place as large as a row of each, one after the other, from byte `start` on."""
    for tensor in rows:
        row = tensor[0]
        part = torch.from_numpy(memory[start : start + row.nbytes])
        yield part.view(row.dtype).view(row.shape)
        start += align_up(row.nbytes)


def page_lock(cudart: Any) -> Lock:
    """By CUDA's runtime, as `torch.cuda.cudart()` gives it."""

    def lock(address: int, num_bytes: int) -> None:
        code = int(cudart.cudaHostRegister(address, num_bytes, 0))
        if code:
            raise ConfigError(
                f"the device cannot page-lock {num_bytes} bytes of host memory (cudaHostRegister "
                f"gave {code}): give a smaller --expert-host-memory"
            )

    return lock


def key_of(place: ExpertPlace) -> Hashable:
    """The same for the same bytes of the same files; it keeps none of them open."""
    parts = (place.gate, place.up, place.down, *(place.scales or ()))
    return (place.owner, place.layer_id, place.expert_id, *((p.file.id, p.start) for p in parts))


class DeviceRows:
    """Copies into the rows of one device's layers. `load` is for any thread, the rest for one."""

    def __init__(
        self,
        streams: Streams,
        seats: Sequence[Seat],
        read: Read,
        tier: HostTier | None = None,
        key: Callable[[ExpertPlace], Hashable] = key_of,
    ) -> None:
        """seats: at least as many as threads call `load`. tier: of as many; None = keeps nothing.

        key: which places hold the same expert.
        """
        self._streams = streams
        self._seats = seats
        self._read = read
        self._copies = streams.Stream()
        self._tier = HostTier(len(seats), keeps=False) if tier is None else tier
        if self._tier.num_seats != len(seats):
            raise InvariantError(f"{len(seats)} seats, a tier of {self._tier.num_seats}")
        self._key = key
        self._lock = threading.Lock()
        self._landed: dict[_Row, Any] = {}
        self._used: dict[_Row, Any] = {}
        self._in_row: dict[_Row, Hashable] = {}

    @property
    def host_counts(self) -> HostCounts:
        """Since the start."""
        num_found = self._tier.num_found
        return HostCounts(num_found, num_found * self._seats[0].num_bytes)

    def load(self, job: LoadJob, *row: torch.Tensor) -> None:
        """Bring an expert into a seat, and start its copy; the stream knows when it has landed.

        row: as `TierLayer.at`. Raises what reading raises; the row is as it was then.
        """
        key = self._key(job.place) if self._tier.keeps else None
        with self._lock:
            taken = self._tier.take(key)
        seat = self._seats[taken.seat]
        try:
            if not taken.holds:
                self._fill(job, taken.seat)
            self._copy(job, key, seat, row)
        finally:
            with self._lock:
                self._tier.give_back(taken.seat)

    def _fill(self, job: LoadJob, number: int) -> None:
        seat = self._seats[number]
        if seat.emptied is not None:
            seat.emptied.synchronize()
        self._read(job.place, *seat.parts)
        with self._lock:
            self._tier.filled(number)

    def _copy(self, job: LoadJob, key: Hashable, seat: Seat, row: Sequence[torch.Tensor]) -> None:
        at = (job.layer, job.row)
        with self._lock, self._streams.stream(self._copies):
            used = self._used.pop(at, None)
            if used is not None:
                self._copies.wait_event(used)
            for part, held in zip(row, seat.parts, strict=True):
                part.copy_(held, non_blocking=True)
            seat.emptied = self._landed[at] = self._copies.record_event()
            self._tier.touch(self._in_row.get(at))  # who leaves the row was of use until now
            if key is not None:
                self._in_row[at] = key

    def before(self, layer: int, rows: Iterable[int]) -> None:
        """Kernels that this thread starts from now on find these rows' experts."""
        stream = self._streams.current_stream()
        with self._lock:
            events = [self._landed.pop((layer, row), None) for row in rows]
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def after(self, layer: int, rows: Iterable[int]) -> None:
        """The kernels that this thread has started read these rows; copies into them wait."""
        event = self._streams.current_stream().record_event()
        with self._lock:
            self._used.update(((layer, row), event) for row in rows)
