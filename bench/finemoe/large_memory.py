"""The memory of this process's children, as the operating system counts it, while they run.

    /proc/PID/smaps_rollup of every process below this one --[MemoryWatch]--> the peak of their sum
    /proc/meminfo --> by how much the page cache grew, whoever used it

Proportional set sizes: what several processes map together counts once. A mapped file's pages count
for the process that mapped them; pages that were only read are in the page cache alone.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from bench.common.process_watch import Sampler

PERIOD_S = 1.0
_KIB = 1024


class MemoryWatch(Sampler):
    """The peaks, for as long as its context is open."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        super().__init__(period_s, "memory")
        self.peak_bytes = 0  # of all children together
        self.peak_cached_bytes = 0  # beyond what was cached before
        self._before = cached_bytes()

    def sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, children_bytes())
        self.peak_cached_bytes = max(self.peak_cached_bytes, cached_bytes() - self._before)


def children_bytes() -> int:
    """Proportional set sizes of all processes below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += _kib_of(rollup, "Pss:")
    return total


def cached_bytes() -> int:
    """Files' pages in memory."""
    return _kib_of(Path("/proc/meminfo").read_text(), "Cached:")


def _kib_of(text: str, name: str) -> int:
    """Bytes of the line that begins so; 0 without one."""
    lines = (line.split() for line in text.splitlines() if line.startswith(name))
    return next((int(words[1]) * _KIB for words in lines), 0)
