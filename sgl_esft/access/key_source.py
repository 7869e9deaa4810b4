"""The keys that hold now: those of the keys file are read again when it changes.

    keys file --changed? at most once a second--> [WatchedKeys.current] --> KeyRing, for the gate
                     └-- broken: the old keys stay, an error is logged once

A key that is taken out of the file opens nothing from then on; requests that it has begun go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from sgl_esft.access.keys import KeyRing
from sgl_esft.errors import ConfigError

CHECK_EVERY_S: Final = 1.0
_LOG: Final = logging.getLogger(__name__)

# What differs when a file was changed or replaced; None before the first look.
_Stamp: TypeAlias = tuple[int, int, int, int] | None


class WatchedKeys:
    """A key ring that follows its file. `read` makes the ring anew and raises ConfigError."""

    def __init__(
        self, path: Path, ring: KeyRing, read: Callable[[], KeyRing], clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._ring = ring
        self._read = read
        self._clock = clock
        # The ring is of some moment before this, so what it was made of is not known: the first
        # look reads the file again.
        self._stamp: _Stamp = None
        self._looked_at = -CHECK_EVERY_S

    def current(self) -> KeyRing:
        """The keys of now, at most `CHECK_EVERY_S` late."""
        now = self._clock()
        if now - self._looked_at >= CHECK_EVERY_S:
            self._looked_at = now
            self._follow()
        return self._ring

    def _follow(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp == self._stamp:
            return
        is_first = self._stamp is None
        self._stamp = stamp
        try:
            self._ring = self._read()
        except ConfigError as error:
            _LOG.error("ConfigError: %s; the keys stay as they were", error)
        else:
            if not is_first:
                _LOG.warning("%s was read again: %d keys", self._path.name, len(self._ring))


def _stamp_of(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
