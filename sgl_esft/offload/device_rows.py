"""Rows on an accelerator: experts go through page-locked host memory, on a stream of their own.

    loader's thread: read -> staging (host) --copy stream--> row, event `landed`
    a layer: its stream waits for `landed` of the rows it reads, runs its kernel, event `used`
    the next copy into a row waits for its `used`

So a row is never read before its expert is there, and never written while a kernel reads it; the
host waits for neither. The order is asked of a simulator in tests (tests/support/streams.py): no
accelerator has run this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from sgl_esft.offload.loader import LoadJob
from sgl_esft.offload.source import ExpertPlace

Read = Callable[[ExpertPlace, torch.Tensor, torch.Tensor], None]
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
class Staging:
    """One expert's place in host memory, page-locked where a device copies from it."""

    w13: torch.Tensor  # [2 * I_local, H]
    w2: torch.Tensor  # [H, I_local]
    emptied: Any = None  # event: the last copy out of it has ended


def make_staging(
    w13: torch.Tensor, w2: torch.Tensor, count: int, *, pin_memory: bool
) -> list[Staging]:
    """`count` places for experts of rows w13 [num_rows, ...] and w2 [num_rows, ...]."""
    return [
        Staging(
            torch.empty(w13.shape[1:], dtype=w13.dtype, pin_memory=pin_memory),
            torch.empty(w2.shape[1:], dtype=w2.dtype, pin_memory=pin_memory),
        )
        for _ in range(count)
    ]


class DeviceRows:
    """Copies into the rows of one device's layers. `load` is for any thread, the rest for one."""

    def __init__(self, streams: Streams, staging: Sequence[Staging], read: Read) -> None:
        """staging: at least as many as threads call `load`, so that none waits for another."""
        self._streams = streams
        self._read = read
        self._copies = streams.Stream()
        self._free: SimpleQueue[Staging] = SimpleQueue()
        for place in staging:
            self._free.put(place)
        self._lock = threading.Lock()
        self._landed: dict[_Row, Any] = {}
        self._used: dict[_Row, Any] = {}

    def load(self, job: LoadJob, w13_row: torch.Tensor, w2_row: torch.Tensor) -> None:
        """Read an expert and start its copy; it is there when the stream has come so far.

        Raises what reading raises; the row is as it was then.
        """
        place = self._free.get()
        try:
            if place.emptied is not None:
                place.emptied.synchronize()
            self._read(job.place, place.w13, place.w2)
            self._copy(job, place, w13_row, w2_row)
        finally:
            self._free.put(place)

    def _copy(
        self, job: LoadJob, place: Staging, w13_row: torch.Tensor, w2_row: torch.Tensor
    ) -> None:
        row = (job.layer, job.row)
        with self._lock, self._streams.stream(self._copies):
            used = self._used.pop(row, None)
            if used is not None:
                self._copies.wait_event(used)
            w13_row.copy_(place.w13, non_blocking=True)
            w2_row.copy_(place.w2, non_blocking=True)
            place.emptied = self._landed[row] = self._copies.record_event()

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
