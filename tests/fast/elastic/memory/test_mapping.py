"""An engine's addresses: parked, attached, extended, shrunk, in a process of its own."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sgl_vmm

from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.mapping import RegionMapping
from tests.fast.elastic.memory_workers import (
    SHAPE,
    digests,
    expected_digests,
    fill,
    hmm_of,
    slot_view,
)

W13, W2 = "experts.0.w13", "experts.0.w2"
ROOT = Path(__file__).parents[4]


class Engine:
    """A rank in another process; verbs are methods."""

    def __init__(self, socket_path):
        command = [sys.executable, "-m", "tests.fast.elastic.memory_engine", str(socket_path)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __getattr__(self, verb):
        def call(*arguments):
            self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            return json.loads(answer) if answer else None

        return call

    def close(self):
        with contextlib.suppress(BrokenPipeError):  # it has died
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(10)


@pytest.fixture
def hmm(tmp_path):
    with hmm_of(tmp_path, num_devices=1) as found:
        found.client(0).map_slots({W13: [(0, 8)], W2: [(0, 8)], "kv.0": [(0, 30)]})
        yield found


@pytest.fixture
def engine(hmm):
    found = Engine(hmm.socket_path(0))
    yield found
    found.close()


def test_parked_everything_can_be_read_and_nothing_is_anybodys(hmm, engine):
    fill(hmm, 0, {W13: [(0, 8)]})
    assert engine.park() is None
    assert all(engine.is_zero(region.name) for region in SHAPE.regions)
    engine.write(W13, 2, "scribble")  # as a warm-up does
    assert engine.attached() == {}
    assert digests(hmm, 0, {W13: [(0, 8)]}) == expected_digests({W13: [(0, 8)]})


def test_attaching_shows_the_workers_bytes_at_addresses_that_never_change(hmm, engine):
    slots = {W13: [(2, 3)], W2: [(1, 2), (6, 1)]}
    fill(hmm, 0, slots)
    engine.park()
    addresses = engine.addresses()
    fds = None
    for _ in range(3):
        assert engine.attach(slots) is None
        for key, digest in expected_digests(slots).items():
            assert engine.read(*key) == digest
        assert engine.attached() == {name: [list(run) for run in r] for name, r in slots.items()}
        assert engine.addresses() == addresses
        assert fds in (None, engine.fds())  # imported once; nothing piles up
        fds = engine.fds()
        engine.park()
        assert engine.is_zero(W13)


def test_what_an_engine_writes_is_the_workers_and_other_engines(hmm, engine):
    other = Engine(hmm.socket_path(0))
    for one in (engine, other):
        one.attach({W2: [(3, 1)]})
    engine.write(W2, 3, 5)
    engine.mark_loaded({W2: [(3, 1)]})
    expected = expected_digests({W2: [(3, 1)]}, seed=5)
    assert other.read(W2, 3) == expected[W2, 3], "two see the same pages at once"
    assert other.close() == engine.close() == 0
    assert digests(hmm, 0, {W2: [(3, 1)]}) == expected
    following = Engine(hmm.socket_path(0))
    following.attach({W2: [(3, 1)]})
    assert following.read(W2, 3) == expected[W2, 3]
    following.close()
    assert hmm.usage()[0].loaded_slots["expert"] == 1


@pytest.mark.parametrize("verb", ["attach", "shrink", "detach"])
def test_a_read_beyond_what_is_attached_is_a_fault(hmm, engine, verb):
    engine.park()
    engine.attach({W13: [(2, 4)]})
    if verb == "shrink":
        engine.shrink({W13: [(4, 2)]})
    if verb == "detach":
        engine.detach()
    slot = {"attach": 7, "shrink": 5, "detach": 2}[verb]
    assert engine.read(W13, slot) is None
    assert engine.process.wait(10) == -signal.SIGSEGV
    assert hmm.client(0).hello().device_id == 0


def test_slots_come_and_go_and_edge_pages_stay_for_neighbours(hmm, engine):
    fill(hmm, 0, {W2: [(0, 8)]})  # 0.75 pages each: slot 2 lies on pages 1 and 2
    expected = expected_digests({W2: [(0, 8)]})
    engine.attach({W2: [(1, 2)]})
    engine.extend({W2: [(0, 6)]})
    engine.extend({W2: [(0, 6)], W13: [(0, 1)]})
    assert all(engine.read(W2, slot) == expected[W2, slot] for slot in range(6))
    engine.shrink({W2: [(3, 5)]})
    engine.shrink({W2: [(0, 1)], "kv.0": [(0, 3)]})
    assert engine.attached() == {W2: [[1, 2]], W13: [[0, 1]]}
    assert [engine.read(W2, slot) for slot in (1, 2)] == [expected[W2, 1], expected[W2, 2]]


def test_memory_that_an_engine_has_left_can_be_another_regions(hmm, engine):
    engine.attach({W13: [(0, 8)]})
    engine.shrink({W13: [(4, 4)]})
    client = hmm.client(0)
    client.unmap_slots({W13: [(4, 4)]})
    client.map_slots({"trunk": [(0, 1)]})
    engine.extend({"trunk": [(0, 1)]})
    engine.write("trunk", 0, 9)
    assert digests(hmm, 0, {"trunk": [(0, 1)]}) == expected_digests({"trunk": [(0, 1)]}, seed=9)


def test_attaching_to_pages_that_are_not_there_changes_nothing(hmm, engine):
    fill(hmm, 0, {W13: [(0, 2)]})
    engine.attach({W13: [(0, 2)]})
    for slots in ({W13: [(0, 9)]}, {"trunk": [(0, 1)]}, {"nothing": [(0, 1)]}):
        for verb in (engine.attach, engine.extend):
            assert verb(slots)["error"] == "MemoryWorkerError"
    assert engine.attached() == {W13: [[0, 2]]}
    assert engine.read(W13, 1) == expected_digests({W13: [(0, 2)]})[W13, 1]


def test_a_mapping_that_fails_halfway_is_parked_again(hmm):
    mapping = RegionMapping(SHAPE, "host")
    client = hmm.client(0)
    [(_, handles)] = client.import_pages(mapping.backend, {W2: [(0, 1)]})[W2]
    mapping.attach(client, {W13: [(0, 1)]})
    mapping.range_of("trunk")
    client.import_pages = lambda *_: {W13: [(0, handles)], W2: [(10**6, handles)]}
    with pytest.raises(MemoryWorkerError, match=r"mapping experts\.0\.w2"):
        mapping.attach(client, {W13: [(0, 1)], W2: [(0, 1)]})
    assert mapping.attached() == {}
    assert not slot_view(mapping, W13, 0).any()
    mapping.detach()


def test_a_rank_without_a_worker_yet_parks_on_a_page_of_its_own(hmm):
    fill(hmm, 0, {W13: [(1, 1)]})
    mapping = RegionMapping(SHAPE, "host")
    for _ in range(2):
        mapping.park()
        assert not slot_view(mapping, W13, 1).any()
        mapping.attach(hmm.client(0), {W13: [(1, 1)]})
        assert slot_view(mapping, W13, 1).any()
    mapping.detach()


def test_a_client_imports_for_one_backend(hmm):
    mapping = RegionMapping(SHAPE, "host")
    other = sgl_vmm.open_backend("host", page_bytes=4096, capacity_bytes=4096)
    hmm.client(0).import_scratch(mapping.backend)
    with pytest.raises(MemoryWorkerError, match="make another client"):
        hmm.client(0).import_scratch(other)
    with pytest.raises(MemoryWorkerError, match="failed at reserving"):
        RegionMapping(SHAPE, "nothing")
