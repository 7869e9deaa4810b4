"""The memory of this process's children, as the operating system counts it, while they run.

    /proc/PID/smaps_rollup of every process below this one --[MemoryWatch]--> the peak of their sum
    /proc/meminfo --> by how much the page cache grew, whoever used it
    a control group --[MemoryLimit]--> the kernel holds them, and what they read, to so many bytes

Proportional set sizes: what several processes map together counts once. A mapped file's pages count
for the process that mapped them; pages that were only read are in the page cache alone.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from bench.common.process_watch import Sampler

PERIOD_S = 1.0
_GONE_S = 20.0  # until a process that was killed has left its group
_KIB = 1024
_Group = tuple[Path, str, str]  # where they are made, the file of the limit, that of the peak
_V1: _Group = (
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
)
_V2: _Group = (Path("/sys/fs/cgroup"), "memory.max", "memory.peak")


@dataclass(frozen=True)
class Held:
    """Proportional set sizes of processes together, bytes."""

    total: int = 0
    own: int = 0  # without mapped files

    def most(self, other: Held) -> Held:
        return Held(max(self.total, other.total), max(self.own, other.own))


class MemoryWatch(Sampler):
    """The peaks of all children together, for as long as its context is open."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        super().__init__(period_s, "memory")
        self.peak, self.serving = Held(), Held()
        self.is_serving = False  # from when on `serving` counts
        self.peak_cached_bytes = 0  # beyond what was cached before
        self._before = cached_bytes()

    def sample(self) -> None:
        now = held_by_children()
        self.peak = self.peak.most(now)
        if self.is_serving:
            self.serving = self.serving.most(now)
        self.peak_cached_bytes = max(self.peak_cached_bytes, cached_bytes() - self._before)


def held_by_children() -> Held:
    """Of all processes below this one, now."""
    total = files = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += _kib_of(rollup, "Pss:")
            files += _kib_of(rollup, "Pss_File:")
    return Held(total, total - files)


def cached_bytes() -> int:
    """Files' pages in memory; those of shared memory are not files'."""
    text = Path("/proc/meminfo").read_text()
    return _kib_of(text, "Cached:") - _kib_of(text, "Shmem:")


class MemoryLimit:
    """A control group: this process's children are born in it, and the kernel keeps it in bounds.

    What they read through the page cache counts too. `peak_bytes` is None where this process may
    not make one: then nothing is limited.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._root, self._limit, self._peak = _V1 if _V1[0].is_dir() else _V2
        self._folder = self._root / f"bench-{os.getpid()}"
        self._is_made = False
        self.peak_bytes: int | None = None

    def __enter__(self) -> Self:
        self._home = self._root / _own_group(is_first_version=self._root == _V1[0])
        with suppress(OSError):
            self._folder.mkdir()
            self._is_made = True
            (self._folder / self._limit).write_text(str(self._num_bytes))
            _move_to(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_made:
            _move_to(self._home)
            self.peak_bytes = int((self._folder / self._peak).read_text())
            _remove(self._folder)


def _remove(group: Path) -> None:
    """Once its last process is gone: one that was killed may take a while. Raises OSError."""
    until = time.monotonic() + _GONE_S
    while True:
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
        time.sleep(0.1)


def _own_group(*, is_first_version: bool) -> str:
    """This process's, below the root: of lines as `4:memory:/a/b`, or `0::/a/b`."""
    controllers = "memory" if is_first_version else ""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(path.lstrip("/") for _, names, path in lines if names == controllers)


def _move_to(folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def _kib_of(text: str, name: str) -> int:
    """Bytes of the line that begins so; 0 without one."""
    lines = (line.split() for line in text.splitlines() if line.startswith(name))
    return next((int(words[1]) * _KIB for words in lines), 0)
