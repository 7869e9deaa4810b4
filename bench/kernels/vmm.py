"""What virtual memory calls cost: reserve, create, map, set access, unmap, destroy; pools on top.

    every operation on the same pages, round by round, among copies of the same bytes
    -> each call over that round's memcpy of one page (on a GPU: microseconds) -> bench/results

`raw` operations go to the backend, one page or a run of pages a call. `pooled` ones are
map_slots and unmap_slots of a virtual tensor whose pages come from a pool: warm where the pool
has them, cold where it must create them. Figures of runs are for each page of the run.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import sgl_vmm

from bench.common.record import spread, write_result
from bench.kernels.native_memory import describe_device, is_host_memory
from sgl_esft.byte_size import parse_bytes

T = TypeVar("T")
MEMCPY = "memcpy"


@dataclass
class Timer:
    """Seconds of each call, by operation."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def call(self, operation: str, work: Callable[[], T], pages: int = 1) -> T:
        """Run and note `work`, which handles so many pages."""
        start = time.perf_counter_ns()
        result = work()
        taken = (time.perf_counter_ns() - start) * 1e-9
        self.seconds.setdefault(operation, []).append(taken / pages)
        return result


@dataclass(frozen=True)
class Subject:
    """A backend, and the pages to use of it."""

    backend: sgl_vmm.Backend
    page_bytes: int
    num_pages: int
    source: int | None  # address of as many bytes to copy from; None: memory is out of reach

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def addresses(self, start: int) -> list[int]:
        return [start + i * self.page_bytes for i in range(self.num_pages)]


def raw_round(subject: Subject, timer: Timer) -> None:
    """Every call of the backend once for each page, then for all pages in one run."""
    backend, page, granularity = subject.backend, subject.page_bytes, subject.backend.granularity
    start = timer.call("reserve", lambda: backend.reserve(subject.num_bytes, granularity))
    handles = [timer.call("create", lambda: backend.create(page)) for _ in range(subject.num_pages)]
    addresses = subject.addresses(start)
    for at, handle in zip(addresses, handles, strict=True):
        timer.call("map", lambda at=at, handle=handle: backend.map(at, page, handle))
    for at in addresses:
        timer.call("set_access", lambda at=at: backend.set_access(at, page))
    if subject.source is not None:
        for at, source in zip(addresses, subject.addresses(subject.source), strict=True):
            timer.call(MEMCPY, lambda at=at, source=source: ctypes.memmove(at, source, page))
    for at in addresses:
        timer.call("unmap", lambda at=at: backend.unmap(at, page))
    count = subject.num_pages
    timer.call("map_run", lambda: backend.map_run(start, page, handles), count)
    timer.call("set_access_run", lambda: backend.set_access(start, subject.num_bytes), count)
    for at in addresses:
        backend.unmap(at, page)
    for handle in handles:
        timer.call("destroy", lambda handle=handle: backend.destroy(handle))
    timer.call("release", lambda: backend.release(start, subject.num_bytes))


def pooled_round(subject: Subject, timer: Timer) -> None:
    """Slots of one page each: all at once from a cold and from a warm pool, then one by one."""
    pool = sgl_vmm.PagePool(subject.backend, page_bytes=subject.page_bytes)
    tensor = sgl_vmm.VirtualTensor(pool, subject.num_pages, subject.page_bytes)
    count = subject.num_pages
    timer.call("map_slots_cold_run", lambda: tensor.map_slots(0, count), count)
    timer.call("unmap_slots_run", lambda: tensor.unmap_slots(0, count), count)
    timer.call("map_slots_run", lambda: tensor.map_slots(0, count), count)
    tensor.unmap_slots(0, count)
    for slot in range(count):
        timer.call("map_slots", lambda slot=slot: tensor.map_slots(slot, 1))
    for slot in range(count):
        timer.call("unmap_slots", lambda slot=slot: tensor.unmap_slots(slot, 1))
    timer.call("trim_run", lambda: pool.trim(0), count)


RAW = (
    *("reserve", "create", "map", "set_access", "unmap", "map_run", "set_access_run"),
    *("destroy", "release"),
)
POOLED = (
    *("map_slots_cold_run", "map_slots_run", "unmap_slots_run", "map_slots", "unmap_slots"),
    "trim_run",
)
KINDS = {"raw": RAW, "pooled": POOLED}


def measure(
    backend_name: str, page_bytes: int, num_pages: int, rounds: int, library: str = ""
) -> list[dict[str, object]]:
    """A row for each operation at this page size."""
    # A host backend's arena is sized for one set of pages; a warm-up round touches it all.
    backend = sgl_vmm.open_backend(
        backend_name,
        page_bytes=page_bytes,
        capacity_bytes=num_pages * page_bytes,
        library=library,
    )
    in_reach = is_host_memory(backend_name, library)
    source = ctypes.create_string_buffer(num_pages * page_bytes if in_reach else 1)
    ctypes.memset(source, 1, len(source))
    address = ctypes.addressof(source) if in_reach else None
    subject = Subject(backend, page_bytes, num_pages, address)
    timers = []
    for number in range(-1, rounds):
        timer = Timer()
        for part in (raw_round, pooled_round) if number % 2 else (pooled_round, raw_round):
            part(subject, timer)
        if number >= 0:
            timers.append(timer)
    unit, figures = _figures(timers)
    return [
        {
            "operation": operation.removesuffix("_run"),
            "kind": kind,
            "per": _per(operation),
            "page_bytes": page_bytes,
            "num_pages": num_pages,
            unit: spread(figures[operation]),
        }
        for kind, operations in KINDS.items()
        for operation in operations
    ]


def _per(operation: str) -> str:
    if operation.endswith("_run"):
        return "page of a run"
    return "reservation" if operation in ("reserve", "release") else "page"


def _figures(timers: Sequence[Timer]) -> tuple[str, dict[str, list[float]]]:
    """Every call over its round's median memcpy; in microseconds where nothing was copied."""
    figures: dict[str, list[float]] = {}
    for timer in timers:
        copies = timer.seconds.get(MEMCPY)
        unit = statistics.median(copies) if copies else 1e-6
        for operation, seconds in timer.seconds.items():
            figures.setdefault(operation, []).extend(value / unit for value in seconds)
    return ("over_memcpy" if MEMCPY in figures else "microseconds"), figures


def _page_size(text: str) -> int:
    return parse_bytes(text, "--page-size")


def main() -> None:
    """Measure at each page size and write bench/results/vmm.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("host", "cuda", "acl"), default="host")
    parser.add_argument("--page-size", type=_page_size, nargs="+", default=[2 << 20])
    parser.add_argument("--pages", type=int, default=128, help="pages in use at once")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--library", default="", help="a contract simulator instead of the driver")
    options = parser.parse_args()
    rows = []
    for page_bytes in options.page_size:
        rows += measure(options.backend, page_bytes, options.pages, options.rounds, options.library)
    for row in rows:
        print_row(row)
    path = write_result(
        "vmm",
        {
            "what": "cost of a call, for each page, over a memcpy of the page; GPU: microseconds",
            "backend": options.backend,
            "is_simulated": bool(options.library),
            "rounds": options.rounds,
            "rows": rows,
        },
        device=describe_device(options.backend, options.library),
    )
    print(f"wrote {path.name}")


def print_row(row: dict[str, object]) -> None:
    """One line for a person."""
    unit = "over_memcpy" if "over_memcpy" in row else "microseconds"
    figures = row[unit]
    assert isinstance(figures, dict)
    print(
        f"{row['kind']:7} {row['operation']:15} {row['per']:14} {unit} "
        f"{figures['median']:8.4f} ({figures['q1']:.4f} to {figures['q3']:.4f})"
    )


if __name__ == "__main__":
    main()
