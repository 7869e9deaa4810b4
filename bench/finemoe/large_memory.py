"""The memory of this process's children, as the operating system counts it, while they run.

    /proc/PID/smaps_rollup of every process below this one --[MemoryWatch]--> the peak of their sum
    /proc/meminfo --> by how much the page cache grew, whoever used it

Proportional set sizes: what several processes map together counts once. A mapped file's pages count
for the process that mapped them; pages that were only read are in the page cache alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.common.process_watch import Sampler

PERIOD_S = 1.0
_KIB = 1024


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
    """Files' pages in memory."""
    return _kib_of(Path("/proc/meminfo").read_text(), "Cached:")


def _kib_of(text: str, name: str) -> int:
    """Bytes of the line that begins so; 0 without one."""
    lines = (line.split() for line in text.splitlines() if line.startswith(name))
    return next((int(words[1]) * _KIB for words in lines), 0)
