"""Layers in virtual memory against a pure model: random maps, unmaps and failures by hypothesis.

The model knows which slots are mapped and what was written there; from these alone it computes the
references of each page and the pages of the pool. Contents are read back after every step.
"""

from __future__ import annotations

import ctypes
import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sgl_vmm
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sgl_esft.errors import ExpertMemoryError, InvariantError, OutOfExpertMemoryError
from sgl_esft.weave.expert_memory import ExpertArena, VirtualMemory
from tests.fast.csrc.simulator import CALLS, Simulator

PAGE = 4096
NUM_LAYERS = 2
CAPACITY_PAGES = 512
NOISE = random.Random(0).randbytes(6 * PAGE + 4099)

# 5.5 and 2.75 pages, about a page, many slots a page, primes.
SLOT_BYTES = st.sampled_from(
    [11 * PAGE // 2, 11 * PAGE // 4, PAGE, 2 * PAGE, PAGE - 8, PAGE + 2, 101, 1021, 8191]
)
SLOTS = st.integers(0, 15)
COUNTS = st.integers(1, 5)


class Layer:
    """One layer under test, and what it should be."""

    def __init__(self, memory: VirtualMemory, num_slots: int, slot_bytes: list[int]) -> None:
        self.memory = memory
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.versions: dict[int, int] = {}  # mapped slot -> what was written there

    def clip(self, first: int, count: int) -> range:
        first = min(first, self.num_slots - 1)
        return range(first, min(first + count, self.num_slots))

    def refs(self, size: int) -> Counter[int]:
        """Page position -> mapped slots on it, of the tensor with slots of `size` bytes."""
        return Counter(page for slot in self.versions for page in pages_of(slot, size))

    def num_missing(self, slots: range) -> int:
        """Pages that mapping these slots needs, if no idle page lies about."""
        wanted = ({p for slot in slots for p in pages_of(slot, size)} for size in self.slot_bytes)
        return sum(
            len(pages - self.refs(size).keys())
            for pages, size in zip(wanted, self.slot_bytes, strict=True)
        )

    def num_pages(self) -> int:
        return sum(len(self.refs(size)) for size in self.slot_bytes)

    def write(self, slot: int, version: int) -> None:
        self.versions[slot] = version
        for tensor, size in zip(self.memory.tensors, self.slot_bytes, strict=True):
            ctypes.memmove(tensor.address + slot * size, contents(version, size), size)

    def holds_what_was_written(self) -> bool:
        return all(
            ctypes.string_at(tensor.address + slot * size, size) == contents(version, size)
            for slot, version in self.versions.items()
            for tensor, size in zip(self.memory.tensors, self.slot_bytes, strict=True)
        )


def pages_of(slot: int, size: int) -> range:
    return range(slot * size // PAGE, -(-(slot + 1) * size // PAGE))


def contents(version: int, size: int) -> bytes:
    start = version * 37 % 4099
    return NOISE[start : start + size]


class VirtualMemoryMachine(RuleBasedStateMachine):
    """Over the host backend; the vendors' machines below order failures as well."""

    simulator: ClassVar[Simulator | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.version = 0
        self.num_pages_allowed = 0
        self.fault_ordered = False  # since then any call may fail, and idle pages may lie about

    @initialize(
        num_slots=st.integers(2, 16),
        slot_bytes=st.lists(SLOT_BYTES, min_size=1, max_size=3),
        max_pages=st.integers(10, 120),
    )
    def open(self, num_slots: int, slot_bytes: list[int], max_pages: int) -> None:
        self.num_pages_allowed = max_pages
        self.arena = ExpertArena(self.open_backend(), PAGE, max_pages * PAGE)
        self.layers = [
            Layer(self.arena.make_layer(num_slots, slot_bytes), num_slots, slot_bytes)
            for _ in range(NUM_LAYERS)
        ]

    def open_backend(self) -> sgl_vmm.Backend:
        if self.simulator is None:
            capacity = CAPACITY_PAGES * PAGE
            return sgl_vmm.open_backend("host", page_bytes=PAGE, capacity_bytes=capacity)
        # A failed example may keep its backend open in its traceback, which is worth more.
        if self.simulator.live() == (0, 0, 0):
            self.simulator.reset(PAGE)
        return self.simulator.open()

    def teardown(self) -> None:
        if not self.layers:
            return
        try:
            self.unmap_everything()
        finally:  # also after a failure: the next example resets the simulator
            del self.arena
            self.layers.clear()
            gc.collect()
        assert self.simulator is None or self.simulator.live() == (0, 0, 0)

    def unmap_everything(self) -> None:
        for layer in self.layers:
            self.unmap_for_sure(layer, range(layer.num_slots))
        assert self.arena.pool.state().num_used == 0

    @rule(layer=st.integers(0, NUM_LAYERS - 1), first=SLOTS, count=COUNTS)
    def map(self, layer: int, first: int, count: int) -> None:
        self.map_slots(self.layers[layer], self.layers[layer].clip(first, count))

    @rule(layer=st.integers(0, NUM_LAYERS - 1), first=SLOTS, count=COUNTS)
    def choose_and_map(self, layer: int, first: int, count: int) -> None:
        """As an adapter's slot does: the best run in a region of which nothing is mapped."""
        chosen_in = self.layers[layer]
        stop = first
        while stop < chosen_in.num_slots and stop not in chosen_in.versions:
            stop += 1
        region = range(first, stop)
        if len(region) < count:
            return
        slots = chosen_in.memory.choose(region, count)
        assert len(slots) == count
        assert set(slots) <= set(region)
        if not self.fault_ordered:
            starts = range(region.start, region.stop - count + 1)
            best = min(chosen_in.num_missing(range(s, s + count)) for s in starts)
            assert chosen_in.num_missing(slots) == best
        self.map_slots(chosen_in, slots)

    def map_slots(self, layer: Layer, slots: range) -> None:
        twice = bool(layer.versions.keys() & set(slots))
        fits = layer.num_missing(slots) + self.num_pages() <= self.num_pages_allowed
        try:
            layer.memory.map(slots)
        except InvariantError:
            assert twice
        except (OutOfExpertMemoryError, ExpertMemoryError) as error:
            if not self.fault_ordered and (fits or isinstance(error, ExpertMemoryError)):
                raise
            # An unmap may have failed too, on the way back; the same call again finishes it.
            if self.fault_ordered and not twice:
                self.unmap_for_sure(layer, slots)
        else:
            assert not twice
            assert fits
            for slot in slots:
                self.version += 1
                layer.write(slot, self.version)

    @rule(layer=st.integers(0, NUM_LAYERS - 1), first=SLOTS, count=COUNTS)
    def unmap(self, layer: int, first: int, count: int) -> None:
        self.unmap_for_sure(self.layers[layer], self.layers[layer].clip(first, count))

    def unmap_for_sure(self, layer: Layer, slots: range) -> None:
        for _ in range(100):
            try:
                layer.memory.unmap(slots)
                break
            except (ExpertMemoryError, OutOfExpertMemoryError):
                assert self.fault_ordered
                layer.memory.check_integrity()
                assert not layer.memory.mapped_slots().intersection(slots)
        for slot in slots:
            layer.versions.pop(slot, None)

    @rule(num_free=st.integers(0, 20))
    def trim(self, num_free: int) -> None:
        try:
            self.arena.pool.trim(num_free)
        except sgl_vmm.VendorCallError:
            assert self.fault_ordered
        except sgl_vmm.PoolExhaustedError:
            assert self.fault_ordered

    @rule(max_pages=st.integers(10, 120))
    def change_budget(self, max_pages: int) -> None:
        exist = self.arena.pool.state().num_pages
        try:
            self.arena.pool.set_budget(max_pages * PAGE)
        except sgl_vmm.InvalidArgumentError:
            assert max_pages < exist
        else:
            assert max_pages >= exist
            self.num_pages_allowed = max_pages

    @precondition(lambda self: self.simulator is not None)
    @rule(
        call=st.sampled_from(["create", "destroy", "map", "unmap"]),
        nth=st.integers(1, 20),
        runs_out=st.booleans(),
    )
    def order_a_failure(self, call: str, nth: int, runs_out: bool) -> None:
        calls = self.simulator.calls
        code = calls.out_of_memory if runs_out else calls.broken
        self.simulator.fail(getattr(calls, call), nth, code)
        self.fault_ordered = True

    def num_pages(self) -> int:
        return sum(layer.num_pages() for layer in self.layers)

    @invariant()
    def contents_are_intact(self) -> None:
        assert all(layer.holds_what_was_written() for layer in self.layers)

    @invariant()
    def books_balance(self) -> None:
        if not self.layers:
            return
        self.arena.check_integrity()
        for layer in self.layers:
            layer.memory.check_integrity()
            assert layer.memory.mapped_slots() == layer.versions.keys()
            for tensor, size in zip(layer.memory.tensors, layer.slot_bytes, strict=True):
                refs = tensor.page_refs()
                expected = layer.refs(size)
                assert refs == [expected[position] for position in range(len(refs))]

    @invariant()
    def no_page_is_leaked(self) -> None:
        if not self.layers:
            return
        held = [layer.memory.usage() for layer in self.layers]
        mapped = sum(usage.mapped_bytes for usage in held) // PAGE
        state = self.arena.pool.state()
        assert state.num_used == mapped
        assert mapped >= self.num_pages() if self.fault_ordered else mapped == self.num_pages()
        assert state.num_pages <= self.num_pages_allowed
        if self.simulator is not None:
            assert self.simulator.live()[:2] == (state.num_pages, state.num_used)


def machine_over(backend: str, simulators: dict[str, Path]) -> type[VirtualMemoryMachine]:
    if backend == "host":
        return VirtualMemoryMachine
    simulator = Simulator(backend, simulators[backend])
    return type(f"{backend}Machine", (VirtualMemoryMachine,), {"simulator": simulator})


def search(backend: str, simulators: dict[str, Path], **how: Any) -> None:
    """Without shrinking, which takes many minutes here; the failing steps are printed in full.

    Every example collects garbage. What other tests have imported is none of it, and would be most
    of the time.
    """
    gc.collect()
    gc.freeze()
    try:
        run_state_machine_as_test(
            machine_over(backend, simulators), settings=settings(phases=[Phase.generate], **how)
        )
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("backend", ["host", *CALLS])
def test_random_sequences(backend: str, simulators: dict[str, Path]) -> None:
    search(backend, simulators, max_examples=40, stateful_step_count=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["host", *CALLS])
def test_long_random_sequences(backend: str, simulators: dict[str, Path]) -> None:
    search(backend, simulators, max_examples=1500, stateful_step_count=100, derandomize=False)
