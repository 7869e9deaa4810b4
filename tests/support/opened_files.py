"""Which files of some folders are opened, by any process: the kernel says so (inotify).

A mapped file is read without a call that anybody counts, and from the page cache without a disk;
but nothing of it is read before it is opened.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_IN_OPEN = 0x20
_IN_NONBLOCK = os.O_NONBLOCK
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name that follows


class OpenedFiles:
    """Counts from when it is entered."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(folders)

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = _done(libc.inotify_init1(_IN_NONBLOCK))
        for folder in self._folders:
            _done(libc.inotify_add_watch(self._fd, os.fsencode(folder), _IN_OPEN))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """Of each opening since the last call, in order."""
        return list(self._names())

    def _names(self) -> Iterator[str]:
        try:
            while True:
                yield from _parsed(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return


def _parsed(events: bytes) -> Iterator[str]:
    while events:
        *_, num_bytes = _EVENT.unpack_from(events)
        end = _EVENT.size + num_bytes
        yield os.fsdecode(events[_EVENT.size : end].rstrip(b"\0"))
        events = events[end:]


def _done(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
