"""ESFT and LoRA adapters in one manager: ids of both kinds, and pairs, with real ESFT slots.

SGLang's own LoRA manager needs a model runner; here its scheduling methods run on a slot table that
is filled by hand (`Inner`), and tests/server/test_lora.py runs all of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.config import EsftConfig, LoraLimits
from sgl_esft.errors import InvariantError, UnknownAdapterError
from sgl_esft.formats.lora_manifest import check_lora
from sgl_esft.formats.lora_targets import targets_of
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.plugin import mixed_manager
from sgl_esft.plugin.lora_manager import EsftManager
from sgl_esft.plugin.lora_store import LoraStore
from sgl_esft.plugin.mixed_manager import MixedManager
from sgl_esft.weave.batch_tags import BatchTags
from tests.fast.plugin.test_lora_manager import SMALL, Ref, batch, ref
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.base_factory import random_base_config
from tests.support.lora_factory import LORA_WEIGHTS, write_random_lora
from tests.support.random_layers import Rank
from tests.support.woven_device import Device

CONFIG = EsftConfig(max_adapters=1, max_experts_per_adapter=2, lora=LoraLimits(1, 8))
ARCHITECTURE = "DeepseekV2ForCausalLM"
TARGETS = targets_of(random_base_config(ARCHITECTURE, **SMALL))


class Inner:
    """SGLang's LoRA manager as far as it schedules, and what it was told of each batch."""

    def __init__(self, max_loras: int) -> None:
        from sglang.srt.lora.lora_manager import LoRAManager

        self._validate = LoRAManager.validate_lora_batch
        self.max_loras_per_batch = max_loras + 1
        self.num_pinned_loras = 0
        self.lora_refs: dict[str, Any] = {}
        self.tensors: dict[str, Mapping[str, torch.Tensor]] = {}
        self.memory_pool = SimpleNamespace(
            uid_to_buffer_id={None: 0}, max_loras_per_batch=self.max_loras_per_batch
        )
        self.told: list[Any] = []

    def num_bytes_of_slot(self) -> int:
        return 10

    def validate_lora_batch(self, ids: set[str | None]) -> bool:
        return bool(self._validate(self, ids))

    def fetch_new_loras(self, ids: Collection[str | None]) -> None:
        self.memory_pool.uid_to_buffer_id = {
            each: slot for slot, each in enumerate(sorted(ids, key=lambda i: (i is not None, i)))
        }

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        self.told.append(list(forward_batch.lora_ids))

    def reset_lora_batch(self) -> None:
        self.told.append("reset")

    def unload_lora_adapter(self, found: Any) -> Any:
        del self.lora_refs[found.lora_id]
        self.memory_pool.uid_to_buffer_id.pop(found.lora_id, None)
        return SimpleNamespace(success=True)


def take(inner: Inner, found: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    inner.lora_refs[found.lora_id] = found
    inner.tensors[found.lora_id] = tensors
    inner.num_pinned_loras += int(found.pinned)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed-manager")
    base = write_random_base(root / "base", ARCHITECTURE, seed=1, **SMALL)
    for seed, name in enumerate(("math", "law")):
        write_random_adapter(root / name, base, seed=seed, max_experts=2)
    for seed, name in enumerate(("tone", "short")):
        write_random_lora(root / name, base, seed)
    write_random_lora(root / "part", base, 3, targets=("up_proj", "kv_b_proj"), layers=(0, 2))
    return root


MakeManager = Callable[[int], MixedManager]


@pytest.fixture
def make(root: Path) -> MakeManager:
    def make(max_loras: int) -> MixedManager:
        from sgl_esft import sglang_api

        store = LoraStore(
            Inner(max_loras),
            lambda name, folder: check_lora(name, folder, (), TARGETS, CONFIG),
            Ref,
            take,
        )
        device = Device(read_moe_spec(root / "base"), CONFIG, Rank(), is_resident=False)
        manager = MixedManager(
            device.plane, BatchTags(16, "cpu"), sglang_api.make_lora_result, None, lora=store
        )
        manager.load_initial([ref(root, "math"), ref(root, "tone"), ref(root, "short")])
        return manager

    return make


@pytest.fixture
def manager(make: MakeManager) -> MixedManager:
    """One ESFT and one LoRA slot; math, tone and short are loaded."""
    return make(1)


def test_each_kind_sees_its_part_of_a_batch(manager: MixedManager) -> None:
    ids = ["id-math", None, "id-tone", "id-math+id-tone"]
    manager.fetch_new_loras(set(ids))
    tokens = batch("EXTEND", ids, extend_seq_lens_cpu=[2, 1, 1, 2])
    manager.prepare_lora_batch(tokens)
    assert manager.tags.token_adapter_slots(6).tolist() == [0, 0, -1, -1, 0, 0]
    assert manager.lora.inner.told == [[None, None, "id-tone", "id-tone"]]
    assert tokens.lora_ids == ids, "SGLang's batch is as it was"


@pytest.mark.parametrize("ids", [None, [], [None], ["id-math", None]])
def test_a_batch_without_lora_computes_none(manager: MixedManager, ids: Any) -> None:
    manager.prepare_lora_batch(batch("DECODE", ids))
    assert manager.lora.inner.told == ["reset"]


def test_what_runs_keeps_its_slot_beside_what_comes(make: MakeManager) -> None:
    manager = make(2)
    running = "id-math+id-tone"
    manager.fetch_new_loras({running})
    manager.fetch_new_loras({"id-short", None}, running_loras={running})
    manager.prepare_lora_batch(batch("DECODE", [running, "id-short"]))
    assert manager.lora.inner.told == [["id-tone", "id-short"]]
    assert manager.tags.token_adapter_slots(2).tolist() == [0, -1]


def test_both_kinds_have_to_fit(make: MakeManager) -> None:
    one, two = make(1), make(2)
    pair = {None, "id-math+id-tone", "id-math", "id-tone"}
    assert one.validate_lora_batch(pair), "base requests take no LoRA slot"
    assert not one.validate_lora_batch(pair | {"id-math+id-short"})
    assert two.validate_lora_batch(pair | {"id-math+id-short"})


def test_esft_slots_bound_pairs_too(manager: MixedManager, root: Path) -> None:
    assert manager.load_lora_adapter(ref(root, "law")).success
    assert not manager.validate_lora_batch({"id-math+id-tone", "id-law"})


def test_ids_and_names(manager: MixedManager, root: Path) -> None:
    assert manager.has("id-math+id-tone")
    assert manager.name_of("id-math+id-tone") == "math+tone"
    assert manager.name_of("id-short") == "short"
    for unknown in ("id-nobody", "id-math+id-nobody", "id-nobody+id-tone"):
        assert not manager.has(unknown)
        assert manager.name_of(unknown) is None
    assert manager.unload_lora_adapter(ref(root, "tone")).success
    assert not manager.has("id-math+id-tone")
    assert manager.has("id-math")
    again = manager.unload_lora_adapter(ref(root, "tone"))
    assert not again.success
    assert again.error_message.startswith("UnknownAdapterError")


def test_what_is_not_here_is_never_taken_for_the_base(manager: MixedManager) -> None:
    with pytest.raises(InvariantError, match="id-tone"):
        manager.prepare_lora_batch(batch("DECODE", ["id-math+id-tone"]))
    with pytest.raises(InvariantError, match="id-nobody"):
        manager.prepare_lora_batch(batch("DECODE", ["id-math+id-nobody"]))
    with pytest.raises(UnknownAdapterError, match="id-nobody"):
        manager.lora.ensure_on_device({"id-nobody"})


def test_a_listing_has_both(manager: MixedManager, root: Path) -> None:
    table = manager.load_lora_adapter(ref(root, "law")).loaded_adapters
    assert table == {name: str(root / name) for name in ("math", "tone", "short", "law")}


def test_a_layers_parts_lie_behind_each_other(manager: MixedManager, root: Path) -> None:
    """What an adapter leaves alone is zeros, so that SGLang's one layer computes all parts."""
    assert manager.load_lora_adapter(ref(root, "part")).success
    found = manager.lora.inner.tensors["id-part"]
    held = load_file(root / "part" / LORA_WEIGHTS)
    prefix = "base_model.model.model.layers.0.mlp.up_proj.lora"
    up_a, up_b = held[f"{prefix}_A.weight"], held[f"{prefix}_B.weight"]
    a = found["model.layers.0.mlp.gate_up_proj.lora_A.weight"]
    b = found["model.layers.0.mlp.gate_up_proj.lora_B.weight"]
    assert torch.equal(a, torch.cat([torch.zeros_like(up_a), up_a]))
    assert torch.equal(b, torch.cat([torch.zeros_like(up_b), up_b]))
    assert {name.partition(".lora_")[0] for name in found} == {
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.self_attn.kv_b_proj",
        "model.layers.2.mlp.shared_experts.gate_up_proj",
        "model.layers.2.self_attn.kv_b_proj",
    }


def test_pins_leave_the_others_a_slot(make: MakeManager, root: Path) -> None:
    one, two = make(1), make(2)
    for manager in (one, two):
        pinned = ref(root, "tone", pinned=True)
        found = manager.load_lora_adapter(pinned)
        assert found.success == (manager is two), found.error_message
    assert two.lora.inner.num_pinned_loras == 1
    refused = two.load_lora_adapter(ref(root, "short", pinned=True))
    assert refused.error_message.startswith("NoFreeSlotError: adapter 'short' cannot be pinned")
    assert two.load_lora_adapter(ref(root, "part")).success
    assert not two.validate_lora_batch({"id-short", "id-part"}), "one slot is tone's"
    assert two.validate_lora_batch({"id-short", "id-tone", None})
    assert two.load_lora_adapter(ref(root, "tone")).success
    assert two.lora.inner.num_pinned_loras == 0


def test_without_lora_there_is_nothing_of_it() -> None:
    """No manager, no layers, no hooks: the code is not even imported."""
    from sgl_esft.plugin import hook_table

    plain = EsftConfig(max_adapters=1, max_experts_per_adapter=1)
    assert mixed_manager.manager_kind(None, plain) is EsftManager
    code = (
        "import os, sys; os.environ['ESFT_CONFIG'] = sys.argv[1]\n"
        "from sgl_esft.plugin import build, register\n"
        "print([h.target for h in register.select_hooks() if 'lora.deepseek' in h.target])\n"
        "print([m for m in sys.modules if m.endswith(('lora_layers', 'lora_backend'))])\n"
    )
    said = {}
    for config in (plain, CONFIG):
        text = json.dumps(asdict(config))
        found = subprocess.run(
            [sys.executable, "-c", code, text], capture_output=True, text=True, check=True
        )
        said[config] = found.stdout.splitlines()[-2:]
    assert said[plain] == ["[]", "[]"]
    assert said[CONFIG] == [str([hook.target for hook in hook_table.LORA_HOOKS]), "[]"]
