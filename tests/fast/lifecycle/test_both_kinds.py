"""Random operations on adapters of both kinds, from names to what a batch computes.

HTTP's process is our engine over SGLang's registry; the rank is our manager over SGLang's LoRA
manager (both_kinds.py). A name means an adapter of one kind, and another kind's after a
replacement. Requests name one adapter, or one of each kind, and hold both until they end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sgl_esft.errors import (
    AdapterExistsError,
    AdapterMismatchError,
    EsftError,
    NoFreeSlotError,
    OutOfHostMemoryError,
    UnknownAdapterError,
    UnsupportedAdapterError,
)
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.lifecycle.adapter_engine import nobody_looks
from sgl_esft.lifecycle.ranks import Ranks
from sgl_esft.lifecycle.registry import AdapterGoneError, AdapterRefusedError
from sgl_esft.lifecycle.room import HostLimits, LoadTimeouts
from sgl_esft.lifecycle.sglang_engine import SglangEngine
from sgl_esft.plugin import registry_hooks
from tests.fast.lifecycle.both_kinds import (
    ESFT_SLOTS,
    LORA_SLOTS,
    TARGET,
    BothKinds,
    Ground,
    in_sglangs_context,
)
from tests.support.adapter_factory import write_random_adapter
from tests.support.lora_factory import write_random_lora
from tests.support.state_machines import run_steps

NAMES = ("a", "b", "c", "d", "e")
GOOD = ("e0", "e1", "e2", "l0", "l1", "l2", "l3")
BAD = {"mixed": UnsupportedAdapterError, "large": AdapterMismatchError}
SLOTS = {"esft": ESFT_SLOTS, "lora": LORA_SLOTS}
SETTLE_S = 60.0
names, folders = st.sampled_from(NAMES), st.sampled_from(GOOD)


@dataclass(frozen=True)
class Version:
    """What a name means."""

    adapter_id: str
    name: str
    folder: Path
    pinned: bool

    @property
    def kind(self) -> str:
        return str(kind_of(self.folder))


@dataclass(frozen=True)
class Flight:
    """A request and the versions it holds, the ESFT adapter's first."""

    rid: str
    state: SimpleNamespace
    parts: tuple[Version, ...]

    @property
    def lora_id(self) -> str:
        return "+".join(part.adapter_id for part in self.parts)


class BothKindsMachine(RuleBasedStateMachine):
    """Each rule says first what must come of it."""

    ground: ClassVar[Ground]
    root: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.manager = BothKinds(self.ground)
        self.known: dict[str, Version] = {}
        self.evicted: dict[str, Version] = {}  # left for others; a request brings them back
        self.flying: list[Flight] = []
        self.leaving: dict[str, asyncio.Task[None]] = {}  # unloads that wait for requests
        self.num_requests = 0

    @initialize(limit=st.sampled_from([None, None, 3]))
    def begin(self, limit: int | None) -> None:
        self.limit = limit
        self.engine = SglangEngine(
            self.manager,
            Ranks(self.manager),
            self.ground.check,
            HostLimits(max_names=limit),
            LoadTimeouts(wait_s=0.0, stay_s=0.0, turn_s=0.0),
            SLOTS,
        )
        registry_hooks.engine_of = lambda manager: self.engine  # type: ignore[assignment]

    def teardown(self) -> None:
        """All requests end, all names are unloaded: nothing is left anywhere."""
        while self.flying:
            self._end(self.flying[-1])
        for name in (*self.known, *self.evicted) if hasattr(self, "engine") else ():
            self.run(self.engine.unload(name))
        for task in self.leaving.values():
            self.run(asyncio.wait_for(task, SETTLE_S))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        assert self.manager.inner.memory_pool.uid_to_buffer_id == {None: 0}
        assert self.manager.device.slots() == {}
        assert self.manager.rank.store.names == {}
        assert set(self.manager.unloads.values()) <= {1}, "each is unloaded once"

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    # ---- changes ----

    @rule(name=names, folder=folders, pinned=st.sampled_from([False, False, True]))
    def load(self, name: str, folder: str, pinned: bool) -> None:
        if name in self.leaving:
            return
        expected = self._obstacle(name, folder, pinned)
        if name in self.known:
            expected = AdapterExistsError
        self._change(
            name,
            self.engine.load(name, self.root / folder, pinned=pinned, on_progress=nobody_looks),
            expected,
            self.root / folder,
            pinned,
        )

    @rule(name=names, folder=folders, pinned=st.sampled_from([False, False, True]))
    def replace(self, name: str, folder: str, pinned: bool) -> None:
        """Also by the other kind."""
        if name in self.leaving:
            return
        expected = self._obstacle(name, folder, pinned)
        if name not in self.known and name not in self.evicted:
            expected = UnknownAdapterError
        self._change(
            name,
            self.engine.replace(name, self.root / folder, pinned=pinned, on_progress=nobody_looks),
            expected,
            self.root / folder,
            pinned,
        )

    def _obstacle(self, name: str, folder: str, pinned: bool) -> type[EsftError] | None:
        """Why a name cannot mean a folder: no name may leave for it, or no slot may be kept."""
        others = [each for each in self.known.values() if each.name != name]
        kind = str(kind_of(self.root / folder))
        num_pinned = sum(each.pinned for each in others if each.kind == kind)
        if pinned and num_pinned >= SLOTS[kind] - 1:
            return NoFreeSlotError
        is_full = self.limit is not None and len(others) >= self.limit
        if is_full and all(each.pinned or self._is_used(each) for each in others):
            return OutOfHostMemoryError
        return NoFreeSlotError if pinned and not self._has_pin_left(kind) else None

    def _has_pin_left(self, kind: str) -> bool:
        """One slot of each kind stays for adapters that are not pinned."""
        held = {part.adapter_id: part for flight in self.flying for part in flight.parts}
        held |= {each.adapter_id: each for each in self.known.values()}
        pinned = self._pins()
        return sum(pinned[each.adapter_id] for each in held.values() if each.kind == kind) < (
            SLOTS[kind] - 1
        )

    def _pins(self) -> Counter[str]:
        """Adapter id -> 1 where a rank keeps it pinned, old versions too."""
        refs = [*self.engine._registry.refs().values(), *self.engine._tenants.draining_refs()]
        return Counter({ref.lora_id: int(bool(ref.pinned)) for ref in refs})

    def _change(
        self,
        name: str,
        change: Any,
        expected: type[EsftError] | None,
        folder: Path,
        pinned: bool,
    ) -> None:
        before = self.known.get(name)
        found = self._attempt(change)
        assert (None if found is None else type(found)) is expected, found
        if found is None:
            ref = self.engine._registry.refs()[name]
            self.evicted.pop(name, None)
            self.known[name] = Version(ref.lora_id, name, folder, pinned)
            assert before is None or before.adapter_id != ref.lora_id, "a version has its own id"
        self._settle()

    def _attempt(self, change: Any) -> EsftError | None:
        try:
            self.run(change)
        except EsftError as error:
            return error
        return None

    @rule(name=names, folder=st.sampled_from(sorted(BAD)), replaces=st.booleans())
    def refuse(self, name: str, folder: str, replaces: bool) -> None:
        """Nothing changes: this is checked before any rank hears of it."""
        is_known = name in self.known or name in self.evicted
        if name in self.leaving or replaces != is_known:
            return
        change = self.engine.replace if replaces else self.engine.load
        found = self._attempt(
            change(name, self.root / folder, pinned=False, on_progress=nobody_looks)
        )
        assert type(found) is BAD[folder], found

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name in self.leaving:
            return
        if name not in self.known and name not in self.evicted:
            assert isinstance(self._attempt(self.engine.unload(name)), UnknownAdapterError)
            return
        is_used = any(part.name == name for flight in self.flying for part in flight.parts)
        self.known.pop(name, None)
        self.evicted.pop(name, None)
        task = self.loop.create_task(self.engine.unload(name))
        if not is_used:
            self.run(asyncio.wait_for(task, SETTLE_S))
            return
        while name in self.engine._registry.refs() or name in self.manager.lora_ref_cache:
            self.run(asyncio.sleep(0.001))
        assert not task.done(), "requests use it"
        self.leaving[name] = task
        self._settle()

    @rule(name=names, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if name in self.leaving:
            return
        known = self.known.get(name)
        expected: type[EsftError] | None = None
        if known is None:
            expected = UnknownAdapterError
        elif pinned and not known.pinned and not self._has_pin_left(known.kind):
            expected = NoFreeSlotError
        found = self._attempt(self.engine.set_pinned(name, pinned))
        assert (None if found is None else type(found)) is expected, found
        if known is not None and found is None:
            self.known[name] = Version(known.adapter_id, name, known.folder, pinned)

    # ---- requests ----

    @rule(asked=st.lists(names, min_size=1, max_size=2, unique=True))
    def begin_request(self, asked: list[str]) -> None:
        self.num_requests += 1
        request = SimpleNamespace(lora_path="+".join(asked), lora_id=None)
        there = {**self.evicted, **self.known}
        lacks_room = self._lacks_room(asked)
        found: Exception | None = None
        try:
            self.run(registry_hooks.resolve(self.manager, request))
        except (AdapterGoneError, AdapterRefusedError) as error:
            found = error
        self._settle()
        if isinstance(found, AdapterGoneError):  # or two of them took the one room by turns
            assert any(name not in there for name in asked) or lacks_room, found
        elif found is not None:
            self._expect_refused(asked, there, str(found), lacks_room=lacks_room)
        else:
            parts = sorted((self.known[name] for name in asked), key=lambda part: part.kind)
            state = SimpleNamespace(obj=request, lora_released=False)
            flight = Flight(str(self.num_requests), state, tuple(parts))
            assert request.lora_id == flight.lora_id, "the ESFT adapter's id is first"
            assert len({part.kind for part in parts}) == len(parts)
            self.manager.rid_to_state[flight.rid] = state
            self.flying.append(flight)

    def _lacks_room(self, asked: list[str]) -> bool:
        """Whether what has to stay beside them leaves too few names."""
        others = [each for each in self.known.values() if each.name not in asked]
        num_kept = sum(each.pinned or self._is_used(each) for each in others)
        return self.limit is not None and num_kept + len(asked) > self.limit

    def _expect_refused(
        self, asked: list[str], there: dict[str, Version], said: str, *, lacks_room: bool
    ) -> None:
        error = said.partition(":")[0]
        if error == "TooManyAdaptersError":
            assert len({there[name].kind for name in asked}) < len(asked)
        else:  # what was evicted does not come back
            assert error == "OutOfHostMemoryError", said
            assert lacks_room
            assert any(name not in self.known for name in asked)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        self._end(self.flying[data.draw(st.integers(0, len(self.flying) - 1))])
        self._settle()

    def _end(self, flight: Flight) -> None:
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        self.flying.remove(flight)

        async def end() -> None:
            del self.manager.rid_to_state[flight.rid]
            for _ in range(2):  # SGLang may ask for it more than once
                task = registry_hooks.release(
                    TokenizerManager._release_lora_once, self.manager, flight.state
                )
                if task is not None:
                    await task

        self.run(end())

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), with_base=st.booleans())
    def step(self, data: st.DataObject, with_base: bool) -> None:
        """A batch of requests in flight, if the slots are enough, computes what they ask for."""
        places = st.lists(st.integers(0, len(self.flying) - 1), min_size=1, max_size=4)
        batch = [self.flying[place] for place in data.draw(places)]
        ids: set[str | None] = {flight.lora_id for flight in batch}
        fits = self._fits("esft", batch) and self._fits("lora", batch)
        assert self.manager.rank.validate_lora_batch(ids | {None}) == fits
        if fits:
            rows: list[Any] = [
                (flight.lora_id, [(p.adapter_id, p.folder) for p in flight.parts])
                for flight in batch
            ]
            self.manager.run(rows + ([(None, [])] if with_base else []))

    def _fits(self, kind: str, batch: list[Flight]) -> bool:
        """Whether slots are left beside the pinned: ESFT's pins are kept from their first batch."""
        wanted = {p.adapter_id for flight in batch for p in flight.parts if p.kind == kind}
        if kind == "esft":
            kept = set(self.manager.device.plane._slots.pinned)
        else:
            kept = {i for i, ref in self.manager.inner.lora_refs.items() if ref.pinned}
        return len(wanted | kept) <= SLOTS[kind]

    # ---- what must hold ----

    def _is_used(self, version: Version) -> bool:
        parts = (part for flight in self.flying for part in flight.parts)
        return any(part.adapter_id == version.adapter_id for part in parts)

    def _settle(self) -> None:
        """Until old versions that nobody uses have left; then, who has left for others."""
        used = {part.adapter_id for flight in self.flying for part in flight.parts}
        deadline = time.monotonic() + SETTLE_S
        while not {ref.lora_id for ref in self.engine._tenants.draining_refs()} <= used:
            assert time.monotonic() < deadline, "an old version stays, and nobody uses it"
            self.run(asyncio.sleep(0.002))
        for name in [name for name, task in self.leaving.items() if task.done()]:
            self.leaving.pop(name).result()
        refs = self.engine._registry.refs()
        for name in set(self.known) - set(refs):
            gone = self.known.pop(name)
            assert self.limit is not None, f"{name} left, and there is no limit"
            assert not gone.pinned
            assert not self._is_used(gone), f"{name} left while it was in use"
            self.evicted[name] = gone
        for name in set(refs) & set(self.evicted):  # a request has brought it back
            old = self.evicted.pop(name)
            self.known[name] = Version(refs[name].lora_id, name, old.folder, old.pinned)

    @invariant()
    def the_listing_is_as_predicted(self) -> None:
        if not hasattr(self, "engine"):
            return
        counts = Counter(part.adapter_id for flight in self.flying for part in flight.parts)
        listed = {
            (each.name, each.adapter_id, each.kind, each.folder, each.pinned, each.num_references)
            for each in self.engine.loaded()
        }
        assert listed == {
            (each.name, each.adapter_id, each.kind, each.folder, each.pinned, counts[i])
            for each in self.known.values()
            for i in (each.adapter_id,)
        }
        counters = self.manager.lora_registry._counters
        assert {i: n for i, c in counters.items() if (n := c.value())} == dict(counts)
        drained = {each.adapter_id for each in self.engine.draining()}
        assert drained == set(counts) - {each.adapter_id for each in self.known.values()}

    @invariant()
    def a_rank_holds_each_once_and_as_its_kind(self) -> None:
        """All that names mean and requests use, in the one table of its kind."""
        rank, pool = self.manager.rank, self.manager.inner.memory_pool
        held = {part.adapter_id: part for flight in self.flying for part in flight.parts}
        held |= {each.adapter_id: each for each in self.known.values()}
        tables = {"esft": set(rank.plane._loaded), "lora": set(rank.lora._loaded)}
        for kind, table in tables.items():
            assert table == {i for i, each in held.items() if each.kind == kind}
        for flight in self.flying:
            assert rank.has(flight.lora_id)
            assert rank.name_of(flight.lora_id) == "+".join(part.name for part in flight.parts)
        for loaded in (self.manager.inner.loras, self.manager.inner.lora_refs):
            assert set(loaded) == tables["lora"]
        slots = pool.uid_to_buffer_id
        assert set(slots) <= tables["lora"] | {None}
        assert sorted(slots.values()) == sorted(set(slots.values()))
        assert {pool.buffer_id_to_uid[slot]: slot for slot in slots.values()} == slots
        num_empty = sum(not isinstance(uid, str | None) for uid in pool.buffer_id_to_uid)
        assert num_empty == LORA_SLOTS + 1 - len(slots), "a slot is freed once"
        pinned = sum(bool(ref.pinned) for ref in self.manager.inner.lora_refs.values())
        assert self.manager.inner.num_pinned_loras == pinned < LORA_SLOTS
        assert set(rank.lora.memory().adapters) == {rank.name_of(i) for i in set(slots) - {None}}
        self.manager.device.plane._slots.check_integrity()
        self.manager.device.check_mapped_slots()


@pytest.fixture(scope="module")
def ground(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("both-kinds")
    base = root / "base"
    for seed in range(3):
        write_random_adapter(folder / f"e{seed}", base, seed=seed, max_experts=2)
    for seed, (rank, is_rs) in enumerate(((4, False), (8, True), (2, False), (8, False))):
        write_random_lora(
            folder / f"l{seed}", base, seed, rank=rank, targets=(TARGET,), use_rslora=is_rs
        )
    write_random_lora(folder / "large", base, 9, rank=9, targets=(TARGET,))
    write_random_lora(folder / "mixed", base, 9, targets=(TARGET,))
    (folder / "mixed" / "expert_cfg.json").write_text("{}")
    BothKindsMachine.root = folder.resolve()
    with in_sglangs_context():
        BothKindsMachine.ground = Ground.of(base)
        yield


@pytest.fixture
def _own_engine() -> Iterator[None]:
    before: Callable[..., Any] = registry_hooks.engine_of
    yield
    registry_hooks.engine_of = before  # type: ignore[assignment]


@pytest.mark.usefixtures("ground", "_own_engine", "one_thread")
def test_hundreds_of_steps() -> None:
    run_steps(BothKindsMachine, 12, 50)


@pytest.mark.soak
@pytest.mark.usefixtures("ground", "_own_engine", "one_thread")
def test_ten_thousand_steps() -> None:
    run_steps(BothKindsMachine, 100, 100, derandomize=False)
