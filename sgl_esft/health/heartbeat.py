"""The heartbeat table, in which loops write that they turn: a page of memory that processes share.

    front --[create]--> memory without a name; its path goes to the children by ESFT_HEARTBEAT_TABLE
    rank  --[open_slot, beat]--> its slot: when its loop last turned, and its process id
    front --[read]--> Beat

A slot has one writer, and a word is written at once, so there are no locks. All clocks are
CLOCK_MONOTONIC, which processes share.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_esft import env
from sgl_esft.errors import InvariantError

DETOKENIZER = 0  # the slot of the process that makes text of tokens; ranks follow
MAX_RANKS = 1023
_WORDS = 2  # of 8 bytes: nanoseconds of the last turn (0: none yet), process id
_NUM_BYTES = (MAX_RANKS + 1) * _WORDS * 8


@dataclass(frozen=True)
class Beat:
    """What a slot says."""

    at_ns: int
    pid: int

    def age_s(self, now_ns: int) -> float:
        """Seconds since the loop last turned."""
        return max(now_ns - self.at_ns, 0) / 1e9


class Slot:
    """The slot of one loop, in the process that runs the loop."""

    def __init__(self, words: memoryview, index: int, clock_ns: Callable[[], int]) -> None:
        self._words = words
        self._at = index * _WORDS
        self._clock_ns = clock_ns
        words[self._at + 1] = os.getpid()

    def beat(self) -> None:
        """The loop has turned."""
        self._words[self._at] = self._clock_ns()


class HeartbeatTable:
    """All slots. `path` opens the same memory in another process of the same user."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        if os.fstat(fd).st_size < _NUM_BYTES:
            os.ftruncate(fd, _NUM_BYTES)
        self._fd = fd
        self._words = memoryview(mmap.mmap(fd, _NUM_BYTES)).cast("q")

    @classmethod
    def create(cls) -> HeartbeatTable:
        """A new table that is gone when its last user is."""
        fd = os.memfd_create("sgl_esft-health", os.MFD_CLOEXEC)
        return cls(fd, Path(f"/proc/{os.getpid()}/fd/{fd}"))

    @classmethod
    def open(cls, path: Path) -> HeartbeatTable:
        """The table at `path`, which is made where there is none. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return cls(fd, path)

    def slot(self, index: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> Slot:
        """The slot to write: DETOKENIZER, or `rank_slot(rank)`."""
        return Slot(self._words, index, clock_ns)

    def put(self, index: int, beat: Beat) -> None:
        """Write for a loop that runs on another machine; nobody else may write its slot."""
        self._words[index * _WORDS + 1] = beat.pid
        self._words[index * _WORDS] = beat.at_ns

    def read(self, index: int) -> Beat | None:
        """What the slot says; None before its loop has turned."""
        at_ns, pid = self._words[index * _WORDS], self._words[index * _WORDS + 1]
        return Beat(at_ns, pid) if at_ns else None

    def close(self) -> None:
        """This process is done with it."""
        self._words.release()
        os.close(self._fd)


def rank_slot(rank: int) -> int:
    """The slot of a rank."""
    return rank + 1


# Where loops beat. The hook is called on each turn of a scheduler's loop, idle or busy.
#
#     Scheduler.ingest_requests --> [beat_rank] --> heartbeats
#     detokenizer's receive --> [BeatingSocket] --> heartbeats
#
# An idle scheduler sleeps for a second at most, an idle detokenizer here for half a one.

_WAIT_MS = 500

_own: Slot | None = None


def beat_rank(scheduler: Any, stop_at_pause: bool = False) -> None:
    """The loop of this process's rank has turned, whatever it then takes in."""
    global _own
    if _own is None:
        from sgl_esft import sglang_api

        _own = slot_of(rank_slot(sglang_api.rank_in_server()))
    _own.beat()


def slot_of(index: int) -> Slot:
    """This process's slot in the table that the front made. Raises InvariantError."""
    path = env.heartbeat_table()
    if path is None:
        raise InvariantError(f"{env.HEARTBEAT_TABLE} is not set, and there is a hook that needs it")
    return HeartbeatTable.open(path).slot(index)


class BeatingSocket:
    """A zmq socket whose `recv` beats while it waits. Everything else is the socket's."""

    def __init__(self, socket: Any, slot: Slot | None = None) -> None:
        self._socket = socket
        self._slot = slot or slot_of(DETOKENIZER)
        self._slot.beat()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, flags: int = 0) -> Any:
        self._wait(flags)
        return self._socket.recv(flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Where SGLang is told to use pickle between its processes."""
        self._wait(flags)
        return self._socket.recv_pyobj(flags)

    def _wait(self, flags: int) -> None:
        self._slot.beat()
        while not flags and not self._socket.poll(_WAIT_MS):
            self._slot.beat()
