"""A tiny memory shape, and real memory workers for it."""

import ctypes
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.mapping import RegionMapping
from sgl_elastic.types import AdapterEntry, MemoryShape, Region, RegionKind
from tests.support.processes import stop_process

PAGE = 4096
NUM_EXPERTS = 8
# Slots are no multiples of a page: 1.5 pages, and 0.75 (edge pages are shared), and small KV rows.
SHAPE = MemoryShape(
    page_bytes=PAGE,
    num_experts=NUM_EXPERTS,
    max_adapters=2,
    slots_per_adapter=3,
    regions=(
        Region("trunk", RegionKind.TRUNK, 1, 3 * PAGE + 100),
        Region("experts.0.w13", RegionKind.EXPERT, NUM_EXPERTS + 6, 3 * PAGE // 2, 0),
        Region("experts.0.w2", RegionKind.EXPERT, NUM_EXPERTS + 6, 3 * PAGE // 4, 0),
        Region("experts.1.w13", RegionKind.EXPERT, NUM_EXPERTS + 6, 3 * PAGE // 2, 1),
        Region("experts.1.w2", RegionKind.EXPERT, NUM_EXPERTS + 6, 3 * PAGE // 4, 1),
        Region("kv.0", RegionKind.KV, 101, 160),
        Region("kv.1", RegionKind.KV, 101, 160),
    ),
)
ADAPTERS = (
    AdapterEntry("id-a", "a", "/a", 0, False, {0: (1, 4, 6), 1: (5,)}),
    AdapterEntry("id-b", "b", "/b", 1, False, {1: (0, 1, 7)}),
)
BUDGET = 100 * PAGE


@contextmanager
def hmm_of(directory: Path, num_devices=2, budget_bytes=BUDGET, add=True, shape=None, **options):
    """A control plane over SHAPE, with workers for its devices 0, 1, .. unless not `add`."""
    options = {"timeout_s": 10.0, "copy_timeout_s": 20.0, "verify_copies": True, **options}
    budgets = dict.fromkeys(range(num_devices), budget_bytes)
    hmm = Hmm(directory / "sockets", budgets, page_bytes=PAGE, **options)
    try:
        for device_id in range(num_devices) if add else ():
            hmm.add_device(device_id)
        hmm.define(shape or SHAPE)
        yield hmm
    finally:
        hmm.close()


def shape_of_one_region(num_pages):
    """A trunk of so many pages, and nothing else."""
    return replace(SHAPE, regions=(replace(SHAPE.regions[0], slot_bytes=num_pages * PAGE),))


def region_of(name):
    return next(region for region in SHAPE.regions if region.name == name)


def slot_view(mapping, name, slot):
    """The bytes of one slot at the mapping's addresses, writable; touching them may fault."""
    num_bytes = region_of(name).slot_bytes
    address = mapping.range_of(name).address + slot * num_bytes
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


def all_slots(name):
    return {name: [(0, region_of(name).num_slots)]}


@contextmanager
def attached(hmm, device_id, slots):
    """A rank's mapping of a device's mapped slots, in this process, and its client."""
    with DeviceClient(hmm.socket_path(device_id, device_id), 10.0) as client:
        mapping = RegionMapping(SHAPE, "host")
        mapping.attach(client, slots)
        yield mapping, client
        mapping.detach()


def fill(hmm, device_id, slots, seed=0):
    """Write patterns into mapped slots of a device, as an engine would, and say they are loaded."""
    with attached(hmm, device_id, slots) as (mapping, client):
        for name, slot in each(slots):
            slot_view(mapping, name, slot)[:] = pattern(
                (seed, name, slot), region_of(name).slot_bytes
            )
        client.mark_loaded(slots)


def each(slots):
    """(region, slot) pairs."""
    return [
        (name, slot)
        for name, runs in slots.items()
        for first, count in runs
        for slot in range(first, first + count)
    ]


def digests(hmm, device_id, slots):
    client = hmm.client(device_id)
    return {key: client.digest(*key) for key in each(slots)}


def expected_digests(slots, seed=0):
    return {
        (name, slot): xxhash.xxh3_64_hexdigest(
            pattern((seed, name, slot), region_of(name).slot_bytes).tobytes()
        )
        for name, slot in each(slots)
    }


def pattern(seed, num_bytes):
    """Bytes that differ from seed to seed."""
    number = xxhash.xxh3_64_intdigest(repr(seed).encode())
    return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)


def count_fds(pid="self"):
    """Open descriptors of a process; the one that lists them counts too."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def settle(read):
    """What is read once it has stayed for a moment: a closed connection's thread ends later."""
    last, same = read(), 0
    while same < 5:
        time.sleep(0.02)
        now = read()
        same = same + 1 if now == last else 0
        last = now
    return last


def comes_to(read, wanted, timeout_s=5.0):
    """What is read once it is `wanted`, or in the end: on a busy machine threads end much later."""
    deadline = time.monotonic() + timeout_s
    while (found := read()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def stopped(pid):
    """The process hangs for as long as the block runs."""
    stop_process(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
