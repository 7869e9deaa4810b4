"""A contract simulator of streams and events: what runs before what, asked of every access.

    Streams() in place of torch.cuda: Stream, current_stream, stream, events
    with streams.watched(): copies with non_blocking are reads and writes of the stream they are in
    streams.reads(tensors): a kernel on the current stream; streams.writes(tensors): the host

Work on different streams runs in any order unless an event says otherwise (CUDA C++ Programming
Guide, asynchronous execution). Each stream has a vector clock; an access that is not ordered after
an earlier one that it conflicts with is a race, whether or not it would have shown. Copies are
carried out at once. Threads of the host are taken to be ordered by their locks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

Clock = dict[int, int]  # stream -> how far
HOST = 0


class StreamRaceError(AssertionError):
    """Two accesses of which nothing says which comes first."""


@dataclass
class _Accesses:
    """The last of each stream to one tensor."""

    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


class Event:
    """As torch.cuda.Event, recorded."""

    def __init__(self, streams: Streams, clock: Clock) -> None:
        self._streams = streams
        self.clock = clock

    def synchronize(self) -> None:
        self._streams._merge(HOST, self.clock)


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams = streams
        self.number = number

    def wait_event(self, event: Event) -> None:
        self._streams._merge(self.number, event.clock)

    def record_event(self) -> Event:
        return Event(self._streams, self._streams._tick(self.number))


class Streams:
    """One device. Stream 0 is the host itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._accesses: dict[int, _Accesses] = {}
        self._here = threading.local()
        self._default = self.Stream()
        self.num_copies = 0

    def Stream(self) -> Stream:
        with self._lock:
            number = len(self._clocks)
            self._clocks[number] = {}
            return Stream(self, number)

    def current_stream(self) -> Stream:
        found: Stream = getattr(self._here, "stream", self._default)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """A kernel on the current stream reads these."""
        self._access(self.current_stream().number, list(tensors), [])

    def writes(self, tensors: Iterable[torch.Tensor]) -> None:
        """The host writes these, now."""
        self._access(HOST, [], list(tensors))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Copies of all threads are seen."""
        plain = torch.Tensor.copy_

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
            if non_blocking:
                self.num_copies += 1
                self._access(self.current_stream().number, [source], [target])
            return plain(target, source, non_blocking=non_blocking)

        with mock.patch.object(torch.Tensor, "copy_", copy):
            yield

    def _merge(self, number: int, clock: Clock) -> None:
        with self._lock:
            own = self._clocks[number]
            for stream, at in clock.items():
                own[stream] = max(own.get(stream, 0), at)

    def _tick(self, number: int) -> Clock:
        """The clock of what the stream does next: after all that the host knows to be over."""
        with self._lock:
            self._merge(number, self._clocks[HOST])
            own = self._clocks[number]
            own[number] = own.get(number, 0) + 1
            return dict(own)

    def _access(self, number: int, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        with self._lock:
            clock = self._tick(number)
            for tensor in read:
                of = self._of(tensor)
                _check(clock, of.writes, "read of what another stream writes")
                of.reads[number] = clock[number]
            for tensor in written:
                of = self._of(tensor)
                _check(clock, of.writes, "write over what another stream writes")
                _check(clock, of.reads, "write over what another stream reads")
                of.writes[number] = clock[number]

    def _of(self, tensor: torch.Tensor) -> _Accesses:
        return self._accesses.setdefault(tensor.data_ptr(), _Accesses())


def _check(clock: Clock, before: Clock, what: str) -> None:
    late = {stream: at for stream, at in before.items() if at > clock.get(stream, 0)}
    if late:
        raise StreamRaceError(f"{what}: {late} is not before {clock}")
