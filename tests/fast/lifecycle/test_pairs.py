"""Requests of an ESFT and a LoRA adapter at once: SGLang's registry, our engine and hooks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.errors import UnsupportedAdapterError
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.lora_manifest import AnyManifest, check_lora
from sgl_esft.formats.lora_targets import targets_of
from sgl_esft.formats.manifest import check_loadable
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.lifecycle.catalogue import names_below, scan
from sgl_esft.lifecycle.ranks import Ranks
from sgl_esft.lifecycle.registry import AdapterGoneError, AdapterRefusedError, Registry
from sgl_esft.lifecycle.room import HostLimits
from sgl_esft.lifecycle.sglang_engine import SglangEngine
from sgl_esft.plugin import registry_hooks
from tests.fast.lifecycle.fake_manager import FakeManager
from tests.support.lora_factory import write_random_lora

pytestmark = pytest.mark.anyio

CONFIG = EsftConfig(max_adapters=3, max_experts_per_adapter=3, lora=LoraLimits(2, 8))


@pytest.fixture(scope="session")
def loras(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(("tone", "mood")):
        write_random_lora(folder / name, root / "base", seed)
    return folder


@pytest.fixture
async def manager(root: Path, loras: Path, monkeypatch: pytest.MonkeyPatch) -> FakeManager:
    """math and law of the one kind, tone and mood of the other."""
    manager = FakeManager()
    spec = read_moe_spec(root / "base")
    targets = targets_of(json.loads((root / "base" / "config.json").read_text()))

    def check(name: str, folder: str, taken: Sequence[str]) -> AnyManifest:
        if kind_of(Path(folder)) == "lora":
            return check_lora(name, folder, taken, targets, CONFIG)
        return check_loadable(name, folder, taken, spec, CONFIG)

    engine = SglangEngine(manager, Ranks(manager), check, HostLimits())
    monkeypatch.setattr(registry_hooks, "engine_of", lambda found: engine)
    for folder in (root / "math", root / "law", loras / "tone", loras / "mood"):
        await engine.load(folder.name, folder, pinned=False, on_progress=lambda phase, share: None)
    return manager


def ids(manager: FakeManager) -> dict[str, str]:
    return {name: ref.lora_id for name, ref in manager.lora_registry.get_all_adapters().items()}


def counts(manager: FakeManager) -> dict[str, int]:
    counters = manager.lora_registry._counters
    return {name: counters[adapter_id].value() for name, adapter_id in ids(manager).items()}


def of_batch(*names: str | None) -> SimpleNamespace:
    return SimpleNamespace(lora_path=list(names), lora_id=None)


async def test_a_pair_has_one_id_whatever_its_order(manager: FakeManager) -> None:
    known = ids(manager)
    expected = f"{known['math']}+{known['tone']}"
    for name in ("math+tone", "tone+math"):
        request = SimpleNamespace(lora_path=name, lora_id=None)
        await registry_hooks.resolve(manager, request)
        assert request.lora_id == expected
    assert counts(manager) == {"math": 2, "tone": 2, "law": 0, "mood": 0}


async def test_both_are_held_until_the_request_ends(manager: FakeManager) -> None:
    request = SimpleNamespace(lora_path="math+tone", lora_id=None)
    await registry_hooks.resolve(manager, request)
    state = SimpleNamespace(obj=request, lora_released=False)
    manager.rid_to_state["rid"] = state
    registry = Registry(manager)
    assert all(registry.is_busy(ids(manager)[name]) for name in ("math", "tone"))
    assert not registry.is_busy(ids(manager)["law"])
    manager._lora_release_tasks = set()  # type: ignore[attr-defined]

    def sglangs_own(manager: Any, state: Any) -> None:
        raise AssertionError("it knows one id a request only")

    for _ in range(2):  # SGLang may ask for it more than once
        task = registry_hooks.release(sglangs_own, manager, state)
        if task is not None:
            await task
    del manager.rid_to_state["rid"]
    assert counts(manager) == dict.fromkeys(("math", "law", "tone", "mood"), 0)


async def test_a_batch_mixes_all_of_them(manager: FakeManager) -> None:
    batch = of_batch("law", None, "tone", "mood+law")
    await registry_hooks.resolve(manager, batch)
    known = ids(manager)
    assert batch.lora_id == [known["law"], None, known["tone"], f"{known['law']}+{known['mood']}"]
    assert counts(manager) == {"math": 0, "law": 2, "tone": 1, "mood": 1}


@pytest.mark.parametrize("name", ["math+law", "tone+mood", "math+tone+mood", "math+math"])
async def test_two_of_one_kind_are_refused_and_nothing_is_counted(
    manager: FakeManager, name: str
) -> None:
    with pytest.raises(AdapterRefusedError, match="TooManyAdaptersError"):
        await registry_hooks.resolve(manager, of_batch("math", name))
    assert set(counts(manager).values()) == {0}


async def test_half_a_pair_that_is_not_there(manager: FakeManager) -> None:
    with pytest.raises(AdapterGoneError):
        await registry_hooks.resolve(manager, of_batch("math+nobody"))
    assert set(counts(manager).values()) == {0}


async def test_a_lora_in_use_by_a_pair_stays(manager: FakeManager) -> None:
    request = SimpleNamespace(lora_path="math+tone", lora_id=None)
    await registry_hooks.resolve(manager, request)
    manager.rid_to_state["rid"] = SimpleNamespace(obj=request)
    engine: SglangEngine = vars(registry_hooks)["engine_of"](manager)
    leaving = asyncio.create_task(engine.unload("tone"))
    await asyncio.sleep(0.1)
    assert not leaving.done()
    assert [each.name for each in engine.draining()] == ["tone"]
    del manager.rid_to_state["rid"]
    counters = manager.lora_registry._counters
    for part in request.lora_id.split("+"):
        await counters[part].decrement()
    await asyncio.wait_for(leaving, 5)
    assert {each.name: each.kind for each in engine.loaded()} == {
        "math": "esft",
        "law": "esft",
        "mood": "lora",
    }


def test_a_root_shows_loras_where_they_can_be_loaded(root: Path, loras: Path) -> None:
    targets = targets_of(json.loads((root / "base" / "config.json").read_text()))

    def check(folder: Path) -> AnyManifest:
        return check_lora(folder.name, str(folder), (), targets, CONFIG)

    assert names_below(loras) == []
    found = scan(loras, check, files=CONFIG.adapter_files)
    assert {name: entry.kind for name, entry in found.items()} == {"tone": "lora", "mood": "lora"}
    (loras / "tone" / "expert_cfg.json").write_text("{}")
    try:
        assert isinstance(
            scan(loras, check, files=CONFIG.adapter_files)["tone"].error, UnsupportedAdapterError
        )
    finally:
        (loras / "tone" / "expert_cfg.json").unlink()
