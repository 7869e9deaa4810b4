"""Loads, replacements and evictions over SGLang's own registry, with made-up ranks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sgl_esft import errors
from sgl_esft.formats.manifest import content_digest
from sgl_esft.lifecycle import tenants, transfer
from sgl_esft.lifecycle.adapter_engine import LoadedAdapter, LoadPhase
from sgl_esft.lifecycle.registry import AdapterGoneError, acquire
from sgl_esft.lifecycle.room import HostLimits
from sgl_esft.lifecycle.sglang_engine import SglangEngine
from tests.fast.lifecycle.fake_manager import FakeManager, make_engine

NAMES = ("math", "law", "code")

pytestmark = pytest.mark.anyio


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def engine(root: Path, manager: FakeManager) -> SglangEngine:
    return make_engine(manager, root / "base")


async def load(
    engine: SglangEngine, folder: Path, *, name: str | None = None, pinned: bool = False
) -> LoadedAdapter:
    return await engine.load(name or folder.name, folder, pinned=pinned, on_progress=ignore)


def ignore(phase: LoadPhase, share: float) -> None: ...


async def test_a_loaded_adapter_is_described(root: Path, manager: FakeManager) -> None:
    engine, told = make_engine(manager, root / "base"), []
    math = await engine.load(
        "math",
        root / "math",
        pinned=True,
        on_progress=lambda phase, share: told.append((phase, share)),
    )
    assert engine.loaded() == (math,)
    assert math.digest == content_digest(root / "math")
    assert (math.pinned, math.num_references, math.last_used_s) == (True, 0, None)
    assert math.num_experts > 0 < math.num_bytes
    assert [phase for phase, _ in told] == sorted(
        (phase for phase, _ in told), key=list(LoadPhase).index
    )
    assert all(0 <= share <= 1 for _, share in told)
    assert manager.on_ranks[math.adapter_id].pinned is True
    assert [place.adapter_slot for place in (await engine.residency())[math.adapter_id]] == [0]
    async with manager.request("math"):
        assert engine.loaded()[0].num_references == 1
    assert engine.loaded()[0].num_references == 0
    assert engine.loaded()[0].last_used_s is not None


async def test_what_cannot_be_loaded_changes_nothing(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    await load(engine, root / "math")
    with pytest.raises(errors.AdapterExistsError):
        await load(engine, root / "math")
    with pytest.raises(errors.AdapterPathError):
        await load(engine, root / "nowhere", name="law")
    manager.fail_next = "AdapterFormatError: a file changed"
    with pytest.raises(errors.AdapterFormatError, match="a file changed"):
        await load(engine, root / "law")
    with pytest.raises(errors.UnknownAdapterError):
        await engine.replace("law", root / "law", pinned=False, on_progress=ignore)
    assert [adapter.name for adapter in engine.loaded()] == ["math"]
    assert len(manager.on_ranks) == 1
    assert not manager.staged
    assert engine.counters.num_failed_loads == 3 + 0


async def test_a_replacement_lets_old_requests_end_on_the_old_version(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    old = await load(engine, root / "math")
    async with manager.request("math") as used:
        new = await engine.replace("math", root / "law", pinned=False, on_progress=ignore)
        assert used == old.adapter_id != new.adapter_id
        assert await acquire(manager.lora_registry, "math") == new.adapter_id
        await manager.lora_registry.release(new.adapter_id)
        await asyncio.sleep(0.1)
        assert [adapter.digest for adapter in engine.draining()] == [old.digest]
        assert set(manager.on_ranks) == {old.adapter_id, new.adapter_id}
    await until(lambda: not engine.draining())
    assert set(manager.on_ranks) == {new.adapter_id}
    assert [adapter.digest for adapter in engine.loaded()] == [new.digest]
    assert engine.counters.num_replacements == 1


async def test_a_failed_replacement_leaves_the_old_version(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    old = await load(engine, root / "math")
    manager.fail_next = "OutOfExpertMemoryError: no pages"
    with pytest.raises(errors.OutOfExpertMemoryError, match="no pages"):
        await engine.replace("math", root / "law", pinned=False, on_progress=ignore)
    assert [adapter.adapter_id for adapter in engine.loaded()] == [old.adapter_id]
    assert set(manager.on_ranks) == {old.adapter_id}


async def test_unloading_waits_for_the_last_request(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    math = await load(engine, root / "math")
    async with manager.request("math"):
        leaving = asyncio.create_task(engine.unload("math"))
        await asyncio.sleep(0.1)
        assert not leaving.done()
        assert engine.loaded() == ()
        assert math.adapter_id in manager.on_ranks
        with pytest.raises(AdapterGoneError, match="'math' is not loaded"):
            await acquire(manager.lora_registry, "math")
    await leaving
    assert manager.on_ranks == {}
    with pytest.raises(errors.UnknownAdapterError):
        await engine.unload("math")


async def test_a_caller_that_gives_up_leaves_no_half_load(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    for num_turns in range(30):
        loading = asyncio.create_task(load(engine, root / "math"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await until(lambda: not tenants._tasks)
        ids = {adapter.adapter_id for adapter in engine.loaded()}
        assert set(manager.on_ranks) == ids
        assert not manager.staged
        if ids:
            await engine.unload("math")


async def test_a_load_that_nobody_waits_for_keeps_its_turn(
    root: Path, manager: FakeManager
) -> None:
    engine, told = make_engine(manager, root / "base"), manager.told
    manager.is_reading = True
    loading = asyncio.create_task(load(engine, root / "math"))
    await until(lambda: "poll" in told)
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    next_one = asyncio.create_task(load(engine, root / "law"))
    await asyncio.sleep(0.2)
    manager.is_reading = False
    await next_one
    assert [each for each in told if each.startswith(("stage", "load"))] == [
        "stage math",
        "load math",
        "stage law",
        "load law",
    ]


async def test_a_file_system_that_hangs_holds_up_one_load_only(
    engine: SglangEngine, root: Path, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALLED_S", 0.05)
    manager.is_reading = True
    with pytest.raises(errors.RequestTimeoutError, match="'math': not a byte"):
        await load(engine, root / "math")
    assert not manager.staged
    manager.is_reading = False
    await load(engine, root / "law")


async def test_an_old_version_is_counted_from_the_moment_it_has_no_name(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    old = await load(engine, root / "math")
    replacing = asyncio.create_task(
        engine.replace("math", root / "law", pinned=False, on_progress=ignore)
    )
    while not replacing.done() or old.adapter_id in manager.on_ranks:
        if old.adapter_id in manager.on_ranks:
            counted = (*engine.loaded(), *engine.draining())
            assert old.adapter_id in [adapter.adapter_id for adapter in counted]
        await asyncio.sleep(0)


async def test_the_host_budget_keeps_what_is_pinned_or_in_use(
    root: Path, manager: FakeManager
) -> None:
    sizes = await sizes_of(root)
    budget = sizes["math"] + max(sizes["law"], sizes["code"])
    engine = make_engine(manager, root / "base", HostLimits(budget_bytes=budget))
    await load(engine, root / "math", pinned=True)
    await load(engine, root / "law")
    await load(engine, root / "code")
    assert [adapter.name for adapter in engine.loaded()] == ["math", "code"]
    async with manager.request("code"):
        with pytest.raises(errors.OutOfHostMemoryError, match="adapter-host-memory"):
            await load(engine, root / "law")
        loading = asyncio.create_task(load(engine, root / "law"))
        await asyncio.sleep(0.05)
    await loading  # as soon as code is idle
    assert [adapter.name for adapter in engine.loaded()] == ["math", "law"]
    assert engine.counters.num_evictions == 2
    assert engine.counters.num_reloads == 1


async def test_nobody_leaves_for_an_adapter_that_cannot_be_pinned(
    root: Path, manager: FakeManager
) -> None:
    """One slot stays for the others: the ranks would say so, after somebody has left."""
    engine = make_engine(manager, root / "base", HostLimits(max_names=2), slots={"esft": 2})
    await load(engine, root / "math", pinned=True)
    await load(engine, root / "law")
    with pytest.raises(errors.NoFreeSlotError, match=r"with it 2 of 2 .* raise --max-adapters"):
        await load(engine, root / "code", pinned=True)
    assert [adapter.name for adapter in engine.loaded()] == ["math", "law"]
    assert engine.counters.num_evictions == 0
    await load(engine, root / "code")
    assert [adapter.name for adapter in engine.loaded()] == ["math", "code"]


async def test_an_adapter_larger_than_the_budget_is_refused_at_once(
    root: Path, manager: FakeManager
) -> None:
    engine = make_engine(manager, root / "base", HostLimits(budget_bytes=1000), 1e9)
    with pytest.raises(errors.AdapterTooLargeError, match="1000 of host memory"):
        await load(engine, root / "math")
    assert set(manager.told) <= {"report"}


async def test_pins_reach_the_ranks(engine: SglangEngine, root: Path, manager: FakeManager) -> None:
    math = await load(engine, root / "math")
    await engine.set_pinned("math", True)
    assert manager.on_ranks[math.adapter_id].pinned is True
    assert engine.loaded()[0].pinned
    manager.fail_next = "NoFreeSlotError: none"
    with pytest.raises(errors.NoFreeSlotError):
        await engine.set_pinned("math", False)
    assert engine.loaded()[0].pinned
    assert engine.loaded()[0].adapter_id == math.adapter_id
    with pytest.raises(errors.UnknownAdapterError):
        await engine.set_pinned("law", True)


async def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    engine: SglangEngine, root: Path, manager: FakeManager, tmp_path: Path
) -> None:
    folder = tmp_path / "math"
    shutil.copytree(root / "math", folder)

    def change(phase: LoadPhase, share: float) -> None:
        if phase is LoadPhase.READING and share == 0:
            for file in folder.glob("*.safetensors"):
                file.write_bytes(file.read_bytes())

    with pytest.raises(errors.AdapterFormatError, match="changed while it was loaded"):
        await engine.load("math", folder, pinned=False, on_progress=change)
    assert engine.loaded() == ()
    assert manager.on_ranks == {}


async def test_a_request_is_counted_before_its_adapter_can_leave(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    await load(engine, root / "math")
    asking = asyncio.create_task(acquire(manager.lora_registry, ["math", None]))
    leaving = asyncio.create_task(engine.unload("math"))
    ids = await asking
    await asyncio.sleep(0.1)
    assert not leaving.done()
    assert set(manager.on_ranks) == {ids[0]}
    await manager.lora_registry.release(ids)
    await leaving


async def test_where_slots_are_permanent_the_idle_one_used_longest_ago_leaves(
    engine: SglangEngine, root: Path, manager: FakeManager
) -> None:
    manager.is_resident = True  # and there are three
    for name in ("one", "two", "three"):
        await load(engine, root / "math", name=name)
    async with manager.request("one"):
        await load(engine, root / "law")
        assert [adapter.name for adapter in engine.loaded()] == ["three", "one", "law"]
    manager.fail_next = None
    await engine.replace("law", root / "code", pinned=False, on_progress=ignore)
    assert [adapter.name for adapter in engine.loaded()] == ["one", "law"]
    await until(lambda: not engine.draining())


async def test_no_adapter_waits_for_ever_for_those_in_use(root: Path, manager: FakeManager) -> None:
    """Three slots, five adapters, and requests that overlap so that none is ever idle."""
    manager.is_resident = True
    names = ("one", "two", "three", "four", "five")
    engine = make_engine(manager, root / "base", room_timeout_s=20, stay_s=0.05)
    answered = dict.fromkeys(names, 0)

    async def client(name: str) -> None:
        while min(answered.values()) < 3:
            try:
                async with manager.request(name):
                    await asyncio.sleep(0.02)
            except AdapterGoneError:
                if name not in loading:
                    loading[name] = asyncio.create_task(load(engine, root / "math", name=name))
                await loading[name]
                loading.pop(name, None)
            else:
                answered[name] += 1

    loading: dict[str, asyncio.Task[LoadedAdapter]] = {}
    await asyncio.gather(*(client(name) for name in names for _ in range(3)))
    await until(lambda: not engine.draining())
    assert len(manager.on_ranks) <= 3
    assert engine.counters.num_failed_loads == 0


async def test_a_load_that_has_waited_for_others_has_a_turn(
    root: Path, manager: FakeManager
) -> None:
    """However long the loads before it have taken."""
    limits = HostLimits(budget_bytes=max((await sizes_of(root)).values()))
    engine = make_engine(manager, root / "base", limits, room_timeout_s=0.2, turn_s=10)
    await load(engine, root / "law")
    async with manager.request("law"):
        loads = [asyncio.create_task(load(engine, root / name)) for name in ("math", "code")]
        await asyncio.sleep(0.5)  # longer than either would wait by itself
        assert not any(each.done() for each in loads)
    await asyncio.gather(*loads)
    assert engine.counters.num_failed_loads == 0


async def test_what_has_just_come_stays_for_a_turn(root: Path, manager: FakeManager) -> None:
    """In use, or about to be used by the request that it was loaded for; pinned it always stays."""
    manager.is_resident = True
    engine = make_engine(manager, root / "base", room_timeout_s=5, stay_s=0.5)
    await load(engine, root / "math", name="pinned", pinned=True)
    await load(engine, root / "math", name="used")
    await load(engine, root / "math", name="expected")
    async with manager.request("used"):
        coming = asyncio.create_task(load(engine, root / "law"))
        await asyncio.sleep(0.2)
        assert [each.name for each in engine.loaded()] == ["pinned", "expected", "used"]
        await coming
        assert [each.name for each in engine.loaded()] == ["pinned", "used", "law"]


@asynccontextmanager
async def three_in_use(root: Path, manager: FakeManager) -> AsyncIterator[SglangEngine]:
    """Each of three slots is an adapter's that a request uses, until the context ends."""
    manager.is_resident = True
    engine = make_engine(manager, root / "base", room_timeout_s=5)
    for name in ("one", "two", "three"):
        await load(engine, root / "math", name=name)
    async with manager.request("one"), manager.request("two"), manager.request("three"):
        yield engine


async def test_one_that_leaves_for_another_can_be_unloaded(
    root: Path, manager: FakeManager
) -> None:
    async with three_in_use(root, manager) as engine:
        coming = asyncio.create_task(load(engine, root / "law"))
        await until(engine.draining)
        unloading = asyncio.create_task(engine.unload("one"))
        await asyncio.sleep(0.2)
        assert not unloading.done()
    await asyncio.gather(coming, unloading)
    assert [each.name for each in engine.loaded()] == ["two", "three", "law"]


async def test_what_waits_for_a_slot_is_read_meanwhile(root: Path, manager: FakeManager) -> None:
    async with three_in_use(root, manager) as engine:
        coming = asyncio.create_task(load(engine, root / "law"))
        await until(engine.draining)
        await until(lambda: manager.staged)
        assert "unload one" not in manager.told
    await coming
    told = manager.told[manager.told.index("stage law") :]
    assert told[:2] == ["stage law", "unload one"]
    assert told.count("stage law") == 1
    assert not manager.staged


async def test_what_was_read_and_found_no_room_is_dropped(root: Path, manager: FakeManager) -> None:
    manager.is_resident = True
    engine = make_engine(manager, root / "base", room_timeout_s=0.2)
    for name in ("one", "two", "three"):
        await load(engine, root / "math", name=name, pinned=True)
    with pytest.raises(errors.OutOfHostMemoryError):
        await load(engine, root / "law")
    assert "stage law" in manager.told
    assert not manager.staged


async def test_what_host_memory_has_no_room_for_is_not_read_ahead(
    root: Path, manager: FakeManager
) -> None:
    manager.is_resident = True
    limits = HostLimits(budget_bytes=max((await sizes_of(root)).values()))
    engine = make_engine(manager, root / "base", limits, room_timeout_s=0.3)
    await load(engine, root / "law")
    async with manager.request("law"):
        with pytest.raises(errors.OutOfHostMemoryError):
            await load(engine, root / "math")
    assert "stage math" not in manager.told


async def sizes_of(root: Path) -> dict[str, int]:
    engine = make_engine(FakeManager(), root / "base")
    return {name: (await load(engine, root / name)).num_bytes for name in NAMES}


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
