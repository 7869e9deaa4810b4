"""Load and unload an adapter very often, and print what the process holds before and after.

LEAK_BACKEND, LEAK_CYCLES, LEAK_LIBRARY -> [leak_cycles] -> {"before": ..., "after": ...} on stdout
Its own process: nothing else opens files, maps memory or starts threads meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path

import sgl_vmm

from sgl_esft.weave.expert_memory import ExpertArena, VirtualMemory
from tests.fast.csrc.simulator import Simulator

PAGE_BYTES = 64 << 10
SLOT_BYTES = (5 * PAGE_BYTES + PAGE_BYTES // 2, 2 * PAGE_BYTES + 3 * PAGE_BYTES // 4)
NUM_SLOTS = 12
WARM_UP_CYCLES = 500


def cycle(memory: VirtualMemory, number: int) -> None:
    """One adapter comes, writes its experts and goes; a neighbour shares its edge pages."""
    slots = memory.choose(range(2, NUM_SLOTS), 1 + number % 3)
    memory.map(slots)
    for tensor, size in zip(memory.tensors, SLOT_BYTES, strict=True):
        ctypes.memset(tensor.address + slots.start * size, number % 251, 64)
        ctypes.memset(tensor.address + slots.stop * size - 64, number % 251, 64)
    memory.unmap(slots)


def held(arena: ExpertArena) -> dict[str, int]:
    """What this process has of everything that could leak."""
    gc.collect()
    state = arena.pool.state()
    return {
        "pages": state.num_pages,
        "used_pages": state.num_used,
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python_threads": threading.active_count(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "rss_kib": resident_kib(),
        "resident_bytes": arena.backend.resident_bytes or 0,
    }


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS:")).split()[1])


def open_backend() -> sgl_vmm.Backend:
    name = os.environ["LEAK_BACKEND"]
    if name == "host":
        return sgl_vmm.open_backend(name, page_bytes=PAGE_BYTES, capacity_bytes=64 << 20)
    simulator = Simulator(name, Path(os.environ["LEAK_LIBRARY"]))
    simulator.reset(PAGE_BYTES)
    return simulator.open()


def main() -> None:
    arena = ExpertArena(open_backend(), PAGE_BYTES)
    memory = arena.make_layer(NUM_SLOTS, SLOT_BYTES)
    memory.map(range(1, 2))
    for number in range(WARM_UP_CYCLES):
        cycle(memory, number)
    before = held(arena)
    for number in range(int(os.environ["LEAK_CYCLES"])):
        cycle(memory, number)
    after = held(arena)
    memory.check_integrity()
    arena.check_integrity()
    sys.stdout.write(json.dumps({"before": before, "after": after}))


if __name__ == "__main__":
    main()
