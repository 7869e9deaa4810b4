"""How a request gets hold of its adapters: SGLang's registry, our engine, made-up ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_esft.errors import OutOfHostMemoryError, TooManyAdaptersError, UnknownAdapterError
from sgl_esft.lifecycle.registry import AdapterGoneError, AdapterRefusedError
from sgl_esft.lifecycle.room import HostLimits
from sgl_esft.lifecycle.sglang_engine import SglangEngine
from sgl_esft.plugin import registry_hooks
from tests.fast.lifecycle.fake_manager import FakeManager, make_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> FakeManager:
    return FakeManager()


EngineOf = Callable[[HostLimits], SglangEngine]


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch, manager: FakeManager, root: Path) -> EngineOf:
    def make(limits: HostLimits) -> SglangEngine:
        engine = make_engine(manager, root / "base", limits)
        monkeypatch.setattr(registry_hooks, "engine_of", lambda found: engine)
        return engine

    return make


async def load(engine: SglangEngine, root: Path, *names: str) -> None:
    for name in names:
        await engine.load(name, root / name, pinned=False, on_progress=lambda phase, share: None)


def asked(*names: str | None) -> SimpleNamespace:
    """A request, or a batch of them that SGLang has taken apart."""
    if len(names) == 1:
        return SimpleNamespace(lora_path=names[0], lora_id=None)
    singles = {place: SimpleNamespace(lora_id=None) for place in range(len(names))}
    return SimpleNamespace(lora_path=list(names), lora_id=None, _sub_obj_cache=singles)


async def test_what_left_for_others_comes_back_once_for_all_who_ask(
    root: Path, manager: FakeManager, engine_of: EngineOf
) -> None:
    engine = engine_of(HostLimits(max_names=2))
    await load(engine, root, "math", "law", "code")  # math leaves
    requests = [asked("math") for _ in range(5)]
    await asyncio.gather(*(registry_hooks.resolve(manager, each) for each in requests))
    (adapter_id,) = {each.lora_id for each in requests}
    assert manager.on_ranks[adapter_id].lora_name == "math"
    assert manager.told.count("load math") == 2


async def test_whoever_loads_for_requests_is_asked_and_nobody_loads_beside_it(
    root: Path, manager: FakeManager, engine_of: EngineOf
) -> None:
    """The library knows of another version: what SGLang remembers would be the wrong one."""
    engine = engine_of(HostLimits(max_names=1))
    wanted: list[Collection[str]] = []

    async def ensure(names: Collection[str]) -> None:
        wanted.append(set(names))
        await engine.load(
            "math", root / "code", pinned=False, on_progress=lambda phase, share: None
        )

    await load(engine, root, "math", "law")  # math leaves
    engine.load_by(ensure)
    request = asked("math")
    await registry_hooks.resolve(manager, request)
    assert manager.on_ranks[request.lora_id].lora_path == str(root / "code")
    assert wanted == [{"math"}]


async def test_one_that_leaves_on_the_way_is_brought_again(
    root: Path, manager: FakeManager, engine_of: EngineOf
) -> None:
    engine = engine_of(HostLimits())
    left: list[str] = []

    async def ensure(names: Collection[str]) -> None:
        if "math" in manager.lora_registry._registry:
            return
        await load(engine, root, "math")
        if len(left) < 3:
            left.append("math")
            await engine._room._registry.take("math")

    engine.load_by(ensure)
    request = asked("math")
    await registry_hooks.resolve(manager, request)
    assert request.lora_id in manager.on_ranks
    assert len(left) == 3


async def test_a_batch_has_an_adapter_for_each_of_its_parts(
    root: Path, manager: FakeManager, engine_of: EngineOf
) -> None:
    engine = engine_of(HostLimits())
    await load(engine, root, "math", "law")
    batch = asked("math", None, "law")
    await registry_hooks.resolve(manager, batch)
    singles = [each.lora_id for each in batch._sub_obj_cache.values()]
    assert singles == batch.lora_id
    assert singles[1] is None
    assert [manager.on_ranks[singles[place]].lora_name for place in (0, 2)] == ["math", "law"]


async def test_a_refusal_says_why_and_names_no_other_adapter(
    root: Path, manager: FakeManager, engine_of: EngineOf
) -> None:
    engine = engine_of(HostLimits(max_names=2))

    async def refuse(names: Collection[str]) -> None:
        raise OutOfHostMemoryError("no room")

    async def unknown(names: Collection[str]) -> None:
        raise UnknownAdapterError("adapter 'x' is not known; loaded: math")

    await load(engine, root, "math")
    with pytest.raises(AdapterGoneError) as gone:
        await registry_hooks.resolve(manager, asked("x"))
    assert str(gone.value) == "UnknownAdapterError: adapter 'x' is not loaded"
    assert gone.value.status_code == 404
    with pytest.raises(AdapterRefusedError, match=TooManyAdaptersError.__name__):
        await registry_hooks.resolve(manager, asked("math", "law", "code"))
    engine.load_by(refuse)
    with pytest.raises(AdapterRefusedError, match="OutOfHostMemoryError: no room") as full:
        await registry_hooks.resolve(manager, asked("law"))
    assert full.value.status_code == 503
    engine.load_by(unknown)
    with pytest.raises(AdapterGoneError) as left:
        await registry_hooks.resolve(manager, asked("x"))
    assert "loaded: math" not in str(left.value)
