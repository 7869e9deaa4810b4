"""The folder of one server's sockets; folders that servers left behind when they were killed.

runtime.py --> [make] --> /tmp/sgl-elastic-XXXX, mode 0700, its lock held while this process lives
          '--> [remove_stale] --> those whose lock nobody holds
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_PREFIX = "sgl-elastic-"
_LOCK = "owner.lock"


@dataclass(frozen=True)
class Workdir:
    """`lock` is the open file that says that the folder is in use."""

    path: Path
    lock: TextIO

    def remove(self) -> None:
        """Remove the folder and everything in it; harmless a second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def make(parent: Path | None = None) -> Workdir:
    """A new folder, under `parent` or where temporary files go."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = (path / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return Workdir(path, lock)


def remove_stale(parent: Path | None = None) -> list[Path]:
    """Remove this user's folders whose server is gone. Returns them."""
    removed = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            if path.stat().st_uid == os.geteuid() and _is_stale(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_stale(path: Path) -> bool:
    """A folder without a lock is one that is being made. Raises FileNotFoundError for it."""
    with (path / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
