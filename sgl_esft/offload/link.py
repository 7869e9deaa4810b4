"""How fast experts come from where they lie, and how many of them should be read at a time.

    some experts --[measured_link]--> seconds a load, for 1, 2 and 4 at a time --[chosen]--> Link

Those that are read at a time share the link, and each lands later: a layer that waits for one of
four waits about four times as long. So as few are read at a time as give nearly all of the
bandwidth. One does where the kernel cuts a large read into many; storage across a network, or
bytes that a thread has to copy or check, want more. And so do small experts: while a thread waits
for its turn on a processor that computes a layer, nothing is read unless another one reads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sgl_esft.errors import InvariantError
from sgl_esft.offload.loader import Arrivals, Loader, LoadJob, LoadPriority
from sgl_esft.offload.reader import ExpertReader
from sgl_esft.offload.source import ExpertPlace

THREAD_COUNTS: Final = (1, 2, 4)
DEVICE_READ_THREADS: Final = 2  # where nothing is measured: one reads while one is copied
ENOUGH: Final = 0.9  # of the best bandwidth, for which fewer at a time are worth it
TURN_S: Final = 0.5e-3  # until a thread goes on that has read, beside a layer that is computed
_LOADS: Final = 8  # that are timed of each count


@dataclass(frozen=True)
class Link:
    """`num_threads` experts are read at a time. `load_s`: seconds a load; None = not measured."""

    num_threads: int
    load_s: float | None


def make_loader(reader: ExpertReader, num_threads: int, read: Callable[[LoadJob], None]) -> Loader:
    """Whose prefetches, `read` by this reader, give way to what is on demand."""
    loader = Loader(num_threads, read)
    reader.before_piece = loader.give_way
    return loader


def measured_link(
    read: Callable[[LoadJob], None],
    places: Sequence[ExpertPlace],
    num_rows: int,
    counts: Sequence[int] = THREAD_COUNTS,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Link:
    """Read experts at `places` into rows of one layer, at least so long for each count.

    num_rows: as many as the largest count, or more, since into a row one is read at a time.
    clock: seconds, as they pass for `read`. Raises what reading raises, and InvariantError without
    a place.
    """
    if not places or not counts:
        raise InvariantError(f"a link of {len(places)} experts, {len(counts)} counts of threads")
    return chosen({n: _load_seconds(read, places, num_rows, n, seconds, clock) for n in counts})


def chosen(load_s: Mapping[int, float]) -> Link:
    """The fewest at a time that read about as fast as any. load_s: by threads, not empty."""
    busy_s = {count: each + TURN_S / count for count, each in load_s.items()}
    best = min(busy_s.values())
    num_threads = min(count for count, each in busy_s.items() if each * ENOUGH <= best)
    return Link(num_threads, load_s[num_threads])


def _load_seconds(
    read: Callable[[LoadJob], None],
    places: Sequence[ExpertPlace],
    num_rows: int,
    num_threads: int,
    seconds: float,
    clock: Callable[[], float],
) -> float:
    """Of one load, where so many threads read all the time."""
    jobs = (
        LoadJob(0, index, index % num_rows, LoadPriority.ON_DEMAND, place)
        for index, place in enumerate(itertools.cycle(places))
    )
    with Loader(num_threads, read) as loader:
        began, count = clock(), 0
        while count == 0 or clock() - began < seconds:
            some = [loader.submit(job) for job in itertools.islice(jobs, _LOADS)]
            for ticket in Arrivals(some):
                ticket.wait()
            count += len(some)
        return max(1e-9, (clock() - began) / count)
