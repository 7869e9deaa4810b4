"""One expert from its file into its row of the layer's tensors, past the page cache.

    loader.py's threads --ExpertPlace, rows--> [ExpertReader] --preadv--> w13[row], w2[row], scales

With O_DIRECT the kernel wants offset, length and address to be multiples of ALIGNMENT. Where the
expert's are (a packed file, and most shapes), the bytes go straight into the row; else each thread
reads the aligned bytes around them into staging memory of its own, a piece at a time, and copies.
The page cache would hold the same weights a second time, outside of every budget.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_esft.errors import ExpertReadError, InvariantError
from sgl_esft.formats.finite import FiniteCheck, not_finite
from sgl_esft.formats.model_spec import PROJS, Proj
from sgl_esft.offload.pack import ALIGNMENT, align_up
from sgl_esft.offload.source import ByteRange, ExpertPlace, OpenFile

Bytes = NDArray[np.uint8]

PIECE_BYTES: Final = 1 << 20
"""Read and, of an adapter, checked at once: what a core's cache still holds when it is copied."""
_STRAIGHT_PIECES: Final = 8  # at once, where nobody touches the bytes after the device wrote them
_SCALE_DTYPE: Final = torch.float32

Preadv = Callable[[int, list[memoryview], int], int]
"""`os.preadv`, or a test's."""


@dataclass
class ReadCounts:
    """What was read since the start, by all threads together."""

    num_experts: int = 0  # whole ones
    num_reads: int = 0  # system calls
    num_bytes: int = 0  # from storage, the aligned edges included
    seconds: float = 0.0  # threads' time in those calls, and in waiting for the throttle


class Throttle:
    """Lets bytes pass at a rate, for all threads together: a device of that bandwidth.

    A read takes its turn on the device when it begins, and ends when its last byte would have come.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise InvariantError(f"a throttle of {bytes_per_s} bytes a second")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def begin(self, num_bytes: int) -> float:
        """Call before a read; when it may end."""
        with self._lock:
            self._free_at = max(self._free_at, self._clock()) + num_bytes / self._bytes_per_s
            return self._free_at

    def end(self, may_end_at: float) -> None:
        """Call after it with what `begin` said; sleeps until then."""
        left = may_end_at - self._clock()
        if left > 0:
            self._sleep(left)


class ExpertReader:
    """Reads experts into rows, cut to this rank's shard. For any number of threads at a time."""

    def __init__(
        self,
        shard_width: range,
        is_up_first: bool,
        dtype: torch.dtype,
        *,
        max_bytes_per_s: int | None = None,
        os_preadv: Preadv = os.preadv,
    ) -> None:
        """shard_width: rows of an expert's width I that are this rank's (tensor parallelism).

        is_up_first: w13's rows are up, then gate. dtype: the rows', and the checkpoint's; of
        numbers, int8, whose scales are float32.
        """
        self._width = shard_width
        self._is_up_first = is_up_first
        self._dtype = dtype
        self._preadv = os_preadv
        self._throttle = None if max_bytes_per_s is None else Throttle(max_bytes_per_s)
        self.max_bytes_per_s = max_bytes_per_s  # None = what the storage gives
        checked = dtype if dtype.is_floating_point else _SCALE_DTYPE
        self._threads = _PerThread(str(checked).removeprefix("torch."))
        self._lock = threading.Lock()
        self._counts = ReadCounts()
        # Called before each piece, by the thread that reads it: loader.py's `give_way`.
        self.before_piece: Callable[[], None] = _go_on

    @property
    def counts(self) -> ReadCounts:
        """A copy."""
        with self._lock:
            return replace(self._counts)

    def read(
        self,
        place: ExpertPlace,
        w13_row: torch.Tensor,
        w2_row: torch.Tensor,
        *scale_rows: torch.Tensor,
    ) -> None:
        """Fill one expert's rows: w13_row [2 * I_local, H], w2_row [H, I_local], in host memory.

        scale_rows: of a quantised one, w13's [2 * I_local, 1] and w2's [H, 1]. Raises
        ExpertReadError, which names the file, for one that changed since it was opened, was cut
        short or cannot be read, and for a scale of the base that is a NaN or an infinity;
        AdapterNotFiniteError for an adapter's expert with one. The rows hold no expert then.
        """
        self._check_rows(place, (w13_row, w2_row, *scale_rows))
        for file in place.files:
            file.check_unchanged()
        for row in scale_rows:  # the last tenant's must not pass for this one's
            row.fill_(torch.nan)
        self._read_weights(place, w13_row, w2_row)
        if place.scales is not None:
            self._read_scales(place, place.scales, *scale_rows)
        # What changed while it was read may be half of the one and half of the other.
        for file in place.files:
            file.check_unchanged()
        with self._lock:
            self._counts.num_experts += 1

    def _check_rows(self, place: ExpertPlace, rows: Sequence[torch.Tensor]) -> None:
        width, (intermediate, hidden) = self._width, place.gate.shape
        wanted = [((2 * len(width), hidden), self._dtype), ((hidden, len(width)), self._dtype)]
        if place.scales is not None:
            wanted += [((2 * len(width), 1), _SCALE_DTYPE), ((hidden, 1), _SCALE_DTYPE)]
        if (
            [(tuple(row.shape), row.dtype) for row in rows] != wanted
            or not all(row.is_contiguous() and row.device.type == "cpu" for row in rows)
            or str(self._dtype) != f"torch.{place.dtype}"
            or not 0 <= width.start < width.stop <= intermediate
        ):
            raise InvariantError(
                f"rows {[(tuple(r.shape), r.dtype, r.device.type) for r in rows]} for columns "
                f"{width} of an expert of {place.dtype} {list(place.gate.shape)}"
            )

    def _halves(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate's and up's part of w13's row, or of its scales'."""
        first, second = row.chunk(2)
        return (second, first) if self._is_up_first else (first, second)

    def _read_weights(
        self, place: ExpertPlace, w13_row: torch.Tensor, w2_row: torch.Tensor
    ) -> None:
        gate, up = self._halves(w13_row)
        if self._is_short_run(place):
            self._read_run(place, gate, up, w2_row)
            return
        self._read_rows(place, "gate", place.gate, self._width, gate)
        self._read_rows(place, "up", place.up, self._width, up)
        if len(self._width) == place.down.shape[1]:
            self._read_rows(place, "down", place.down, range(place.down.shape[0]), w2_row)
        else:
            self._read_columns(place, w2_row)

    def _is_short_run(self, place: ExpertPlace) -> bool:
        """Whether a whole expert lies in one run that staging memory has room for.

        Of a small expert a read costs more than its bytes do, so it is read at once.
        """
        parts = (place.gate, place.up, place.down)
        run_bytes = max(part.stop for part in parts) - min(part.start for part in parts)
        return (
            len(self._width) == place.gate.shape[0]
            and place.gate.file is place.up.file is place.down.file
            and run_bytes == sum(part.stop - part.start for part in parts)
            and run_bytes <= PIECE_BYTES
        )

    def _read_run(self, place: ExpertPlace, *outs: torch.Tensor) -> None:
        """`outs`: what becomes gate, up and down."""
        sources = (place.gate, place.up, place.down)
        parts = sorted(zip(sources, PROJS, map(_bytes_of, outs), strict=True), key=_start)
        first, file = parts[0][0].start, place.gate.file
        targets = [target for _, _, target in parts]
        if not file.is_direct or _are_aligned(first, *_lengths_and_addresses(targets)):
            self._fill(file, targets, first)
        else:
            whole = self._staged(file, first, parts[-1][0].stop)
            for source, _, target in parts:
                target[:] = whole[source.start - first : source.stop - first]
        if place.owner is not None and outs[0].is_floating_point():
            for _, proj, target in parts:
                self._check_finite(place, proj, file, target)

    def _read_scales(
        self,
        place: ExpertPlace,
        scales: tuple[ByteRange, ByteRange, ByteRange],
        w13_row: torch.Tensor,
        w2_row: torch.Tensor,
    ) -> None:
        """As weave/quantised_experts.py lays them out: of down's rows, every rank has all."""
        gate, up = self._halves(w13_row)
        self._read_rows(place, "gate", scales[0], self._width, gate)
        self._read_rows(place, "up", scales[1], self._width, up)
        self._read_rows(place, "down", scales[2], range(scales[2].shape[0]), w2_row)

    def _read_rows(
        self, place: ExpertPlace, proj: Proj, source: ByteRange, rows: range, out: torch.Tensor
    ) -> None:
        """`out` becomes these rows of the projection, or of its scales, which lie in one run."""
        target = _bytes_of(out)
        start = source.start + rows.start * source.row_bytes
        is_straight = not source.file.is_direct or _are_aligned(
            start, len(target), target.ctypes.data
        )
        # Of the base scales alone: nobody has looked at them, and they are few.
        is_checked = out.is_floating_point() and (
            place.owner is not None or out.dtype is not self._dtype
        )
        piece_bytes = PIECE_BYTES * (1 if is_checked or not is_straight else _STRAIGHT_PIECES)
        num_checked = 0
        for begin, end in _pieces(start, start + len(target), piece_bytes):
            part = target[begin - start : end - start]
            if is_straight:
                self._fill(source.file, (part,), begin)
            else:
                part[:] = self._staged(source.file, begin, end)
            if is_checked:
                # A file may cut a value in two: its second half is in the next piece.
                num_whole = (end - start) // out.itemsize * out.itemsize
                self._check_finite(place, proj, source.file, target[num_checked:num_whole])
                num_checked = num_whole

    def _read_columns(self, place: ExpertPlace, out: torch.Tensor) -> None:
        """`out` [H, I_local] becomes this shard's columns of down; whole rows are read."""
        down, target = place.down, _bytes_of(out).reshape(out.shape[0], -1)
        column = self._width.start * out.itemsize
        num_rows = max(1, PIECE_BYTES // down.row_bytes)
        for row in range(0, len(target), num_rows):
            part = target[row : row + num_rows]
            start = down.start + row * down.row_bytes
            whole = self._staged(down.file, start, start + len(part) * down.row_bytes)
            if place.owner is not None and out.is_floating_point():
                self._check_finite(place, "down", down.file, whole)
            part[:] = whole.reshape(len(part), -1)[:, column : column + part.shape[1]]

    def _staged(self, file: OpenFile, begin: int, end: int) -> Bytes:
        """Bytes [begin, end) of the file, in this thread's staging memory until its next call."""
        first = begin - begin % ALIGNMENT
        staging = self._threads.staging(align_up(end) - first)
        self._fill(file, (staging,), first)
        return staging[begin - first : end - first]

    def _fill(self, file: OpenFile, targets: Sequence[Bytes], offset: int) -> None:
        """Read the bytes from `offset` on, one target after the other, in one call.

        Those beyond the file's end stay as they were.
        """
        num_bytes = sum(map(len, targets))
        num_wanted = min(num_bytes, file.id.num_bytes - offset)
        self.before_piece()
        began = time.perf_counter()
        may_end_at = self._throttle.begin(num_bytes) if self._throttle else 0.0
        try:
            num_read = self._preadv(file.fd, [target.data for target in targets], offset)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExpertReadError(
                f"{file.name} cannot be read at byte {offset}: {reason}."
            ) from error
        if self._throttle:
            self._throttle.end(may_end_at)
        self._count(num_read, time.perf_counter() - began)
        if num_read < num_wanted:
            raise ExpertReadError(
                f"{file.name} gave {num_read} of {num_wanted} bytes at byte {offset}: it was cut "
                "short, or its storage fails."
            )
        if not file.is_direct:
            _drop_cached(file, offset, offset + num_bytes)

    def _count(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._counts.num_reads += 1
            self._counts.num_bytes += num_bytes
            self._counts.seconds += seconds

    def _check_finite(self, place: ExpertPlace, proj: Proj, file: OpenFile, values: Bytes) -> None:
        if self._threads.check.holds(values.data):
            return
        if place.owner is not None:
            raise not_finite(place.owner, (place.layer_id, place.expert_id, proj))
        raise ExpertReadError(
            f"{file.name} has a NaN or an infinity among the scales of layer {place.layer_id}, "
            f"expert {place.expert_id}, {proj} projection: quantise the base anew."
        )


def _go_on() -> None:
    pass


class _PerThread(threading.local):
    """What no two threads may use at a time; freed when its thread ends."""

    def __init__(self, dtype: str) -> None:
        self.check = FiniteCheck(dtype)
        self._staging = _page_aligned(PIECE_BYTES + 2 * ALIGNMENT)

    def staging(self, num_bytes: int) -> Bytes:
        """[num_bytes] uint8 at an aligned address; the same memory at each call."""
        if num_bytes > len(self._staging):  # of a single row that is longer than a piece
            self._staging = _page_aligned(num_bytes)
        return self._staging[:num_bytes]


def _page_aligned(num_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, align_up(num_bytes)), dtype=np.uint8)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The tensor's own memory, flat."""
    flat: NDArray[Any] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def _start(part: tuple[ByteRange, Proj, Bytes]) -> int:
    return part[0].start


def _lengths_and_addresses(targets: Sequence[Bytes]) -> Iterator[int]:
    for target in targets:
        yield len(target)
        yield target.ctypes.data


def _are_aligned(*numbers: int) -> bool:
    return not any(number % ALIGNMENT for number in numbers)


def _pieces(start: int, stop: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut where the file is aligned, so that no block is read twice."""
    begin = start
    while begin < stop:
        end = min(begin - begin % ALIGNMENT + piece_bytes, stop)
        yield begin, end
        begin = end


def _drop_cached(file: OpenFile, start: int, stop: int) -> None:
    """Whole pages only: the kernel keeps one that is named in part."""
    first = start - start % ALIGNMENT
    os.posix_fadvise(file.fd, first, align_up(stop) - first, os.POSIX_FADV_DONTNEED)
