"""One device's memory, in this process: budgets, idempotence, copies, what is left alone."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.device import DeviceMemory
from sgl_elastic.types import Region, RegionKind
from tests.fast.elastic.memory_workers import PAGE, SHAPE, region_of

W13, W2 = "experts.0.w13", "experts.0.w2"


def make_device(num_pages=100, device_id=0):
    device = DeviceMemory("host", device_id, PAGE, num_pages * PAGE)
    device.define(SHAPE)
    return device


@pytest.fixture
def device():
    return make_device()


def counts(device):
    """What must not change when a request fails."""
    usage = device.usage()
    return usage.used_pages, usage.pages, usage.mapped_slots, usage.loaded_slots


def test_mapping_twice_maps_once(device):
    assert device.map_slots({W13: [(1, 2)]}) == {W13: ((1, 2),)}
    before = counts(device)
    assert device.map_slots({W13: [(1, 2)]}) == {}
    assert counts(device) == before
    assert device.map_slots({W13: [(0, 4)]}) == {W13: ((0, 1), (3, 1))}


def test_a_budget_that_is_exhausted_changes_nothing():
    device = make_device(num_pages=6)
    device.map_slots({W13: [(0, 2)]})
    before = counts(device)
    with pytest.raises(MemoryWorkerError, match="has no memory for mapping"):
        device.map_slots({"trunk": [(0, 1)], W2: [(0, 8)]})
    with pytest.raises(MemoryWorkerError, match="larger budget"):
        device.map_slots({W13: [(2, 6)], "kv.0": [(0, 1)]})
    assert counts(device) == before
    device.map_slots({W13: [(2, 2)]})  # exactly what is left
    assert device.usage().used_pages == 6


def test_only_defined_regions_and_slots(device):
    with pytest.raises(MemoryWorkerError, match="no region 'nothing'"):
        device.map_slots({"nothing": [(0, 1)]})
    with pytest.raises(MemoryWorkerError, match="14 slots, 14-15 are not"):
        device.map_slots({W13: [(12, 4)]})
    for call in (device.pages, device.mark_loaded, device.not_loaded):
        with pytest.raises(MemoryWorkerError, match="no pages behind experts"):
            call({W13: [(3, 1)]})
    with pytest.raises(MemoryWorkerError, match="no pages"):
        device.digest(W13, 3)


def test_a_shape_is_defined_once(device):
    device.define(SHAPE)
    with pytest.raises(MemoryWorkerError, match="another memory shape"):
        device.define(dataclasses.replace(SHAPE, num_experts=9))
    fresh = DeviceMemory("host", 0, PAGE, PAGE)
    twice = (Region("a", RegionKind.KV, 1, 1),) * 2
    for wrong in ({"page_bytes": 2 * PAGE}, {"regions": twice}):
        with pytest.raises(MemoryWorkerError, match="not a shape"):
            fresh.define(dataclasses.replace(SHAPE, **wrong))


def test_a_device_that_cannot_be_opened_is_named():
    with pytest.raises(MemoryWorkerError, match="device 7 failed at opening"):
        DeviceMemory("host", 7, 1000, 4000)


def test_content_is_valid_until_unmapped(device):
    device.map_slots({W13: [(0, 4)]})
    device.mark_loaded({W13: [(0, 4)]})
    device.mark_loaded({W13: [(1, 1)]}, is_loaded=False)
    device.unmap_slots({W13: [(2, 1)]})
    device.map_slots({W13: [(2, 1)]})
    assert device.not_loaded({W13: [(0, 4)]}) == {W13: ((1, 2),)}


class SlotsLikeSets(RuleBasedStateMachine):
    """Random maps and unmaps of two regions: pages, slots and identities as sets say."""

    def __init__(self):
        super().__init__()
        self.device = make_device(num_pages=12)
        self.mapped = {W13: set(), W2: set()}

    @rule(name=st.sampled_from([W13, W2]), first=st.integers(0, 13), count=st.integers(1, 6))
    def map(self, name, first, count):
        wanted = set(range(first, min(first + count, 14)))
        pages = self.pages_of(name, self.mapped[name] | wanted)
        other = W2 if name == W13 else W13
        total = len(pages) + len(self.pages_of(other, self.mapped[other]))
        run = [(first, len(wanted))]
        if total > 12:
            with pytest.raises(MemoryWorkerError):
                self.device.map_slots({name: run})
        else:
            self.device.map_slots({name: run})
            self.mapped[name] |= wanted

    @rule(name=st.sampled_from([W13, W2]), first=st.integers(0, 13), count=st.integers(1, 6))
    def unmap(self, name, first, count):
        gone = set(range(first, min(first + count, 14)))
        self.device.unmap_slots({name: [(first, len(gone))]})
        self.mapped[name] -= gone

    @invariant()
    def pages_are_those_of_the_mapped_slots(self):
        usage = self.device.usage()
        expected = [len(self.pages_of(name, slots)) for name, slots in self.mapped.items()]
        assert usage.used_pages == usage.pages["expert"] == sum(expected)
        assert usage.mapped_slots["expert"] == sum(map(len, self.mapped.values()))
        assert usage.resident_bytes == (usage.used_pages + usage.free_pages + 1) * PAGE

    def pages_of(self, name, slots):
        size = region_of(name).slot_bytes
        return {b // PAGE for s in slots for b in range(s * size, (s + 1) * size, 512)}


TestSlotsLikeSets = SlotsLikeSets.TestCase
TestSlotsLikeSets.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
