"""Workers and engines over the vendors' contract simulators: one descriptor or key a page."""

import subprocess
import sys

import pytest
import xxhash

from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import MemoryShape, Region, RegionKind, Step, StepKind
from tests.fast.csrc.csrc_build import simulator_paths
from tests.fast.elastic.memory_workers import comes_to, count_fds, settle

PAGE = 2 << 20
REGIONS = (
    Region("trunk", RegionKind.TRUNK, 1, 1000),
    Region("w", RegionKind.EXPERT, 4, 3 * PAGE // 4, 0),
    Region("kv", RegionKind.KV, 5001, 1152),
)
SHAPE = MemoryShape(PAGE, 4, 0, 0, REGIONS)
SLOTS = {"trunk": [(0, 1)], "w": [(0, 4)], "kv": [(0, 101)]}

IMPORTS = """
import ctypes, sys
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.kv_rows import copy_rows
from sgl_elastic.memory.mapping import RegionMapping
from tests.fast.elastic.memory.test_simulators import SHAPE, SLOTS, num_bytes_of
vendor, library, path, other = sys.argv[1:]
"""
ENGINE = f"""{IMPORTS}
with DeviceClient(path, 10.0) as client:
    mapping = RegionMapping(SHAPE, vendor, device_id=int(other), library=library)
    mapping.park(client)
    for _ in range(2):
        mapping.attach(client, SLOTS)
        for name in SLOTS:
            ctypes.memset(mapping.range_of(name).address, ord(name[0]), num_bytes_of(name))
        mapping.park(client)
    client.mark_loaded({{"trunk": [(0, 1)], "w": [(0, 4)]}})
"""


COPY = f"""{IMPORTS}
with DeviceClient(path, 10.0) as client:
    mapping = RegionMapping(SHAPE, vendor, device_id=1, library=library)
    mapping.attach(client, {{"kv": [(0, 21)]}})
    copy_rows(mapping, [(90, 3), (91, 4)], other)
    copy_rows(mapping, [(92, 5)], other)
    copy_rows(mapping, [(5, 6)])
    mapping.park(client)
"""


def num_bytes_of(name):
    region = next(region for region in SHAPE.regions if region.name == name)
    return SLOTS[name][0][1] * region.slot_bytes


@pytest.mark.parametrize("vendor", ["cuda", "acl"])
def test_a_scale_of_one_device_to_two(tmp_path, vendor):
    library = str(simulator_paths()[vendor])
    budgets = dict.fromkeys((0, 1), 40 * PAGE)
    hmm = Hmm(tmp_path / "s", budgets, backend=vendor, library=library, verify_copies=True)
    hmm.add_device(0)
    hmm.define(SHAPE)
    try:
        hmm.client(0).map_slots(SLOTS)
        command = [sys.executable, "-c", ENGINE, vendor, library, str(hmm.socket_path(0)), "0"]
        subprocess.run(command, check=True, timeout=60)
        steps = (
            Step(StepKind.ADD_DEVICE, 1),
            Step(StepKind.MAP_TRUNK, 1),
            Step(StepKind.MAP_EXPERTS, 1, expert_ids=(1, 2)),
            Step(StepKind.MAP_KV, 1, num_tokens=20),
            Step(StepKind.COPY_TRUNK, 1, source_id=0),
            Step(StepKind.COPY_EXPERTS, 1, source_id=0, expert_ids=(1, 2)),
        )
        for step in steps:
            hmm.execute(step)
        pid = hmm.client(1).info.pid
        fds = settle(lambda: count_fds(pid))
        command = [sys.executable, "-c", COPY, vendor, library]
        sockets = [str(hmm.socket_path(device_id)) for device_id in (1, 0)]
        subprocess.run([*command, *sockets], check=True, timeout=60)
        expert = xxhash.xxh3_64_hexdigest(b"w" * (3 * PAGE // 4))
        row = xxhash.xxh3_64_hexdigest(b"k" * 1152)
        assert [hmm.client(1).digest("w", slot) for slot in (1, 2)] == [expert] * 2
        assert [hmm.client(1).digest("kv", slot) for slot in (3, 4, 5, 6)] == [row] * 4
        assert comes_to(lambda: count_fds(pid), fds) == fds
        for step in reversed(steps):
            hmm.undo(step)
        assert hmm.device_ids() == (0,)
    finally:
        hmm.close()
