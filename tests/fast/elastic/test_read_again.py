"""Adapters' experts that are read from their folder again, into slots that are mapped already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from sgl_elastic.engine.loader import _Reader, fill_adapters
from sgl_elastic.engine.memory import expert_of, layer_of
from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance.rank_messages import Attach
from sgl_elastic.types import AdapterEntry
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.weave.moe_layer import ExpertShard
from tests.support.adapter_factory import write_random_adapter, write_random_base

M, E_MAX = 16, 4


class Layer:
    """A layer's slots, and which of them an adapter's experts have."""

    def __init__(self, spec: MoeSpec, experts: tuple[int, ...]) -> None:
        width, hidden = spec.expert_intermediate_size, spec.hidden_size
        self.shard = ExpertShard(frozenset(), range(width))
        self.w13 = torch.zeros(M + 2 * E_MAX, 2 * width, hidden)
        self.w2 = torch.zeros(M + 2 * E_MAX, hidden, width)
        self._experts = experts

    def slots_of(self, adapter_slot: int) -> dict[int, int]:
        first = M + adapter_slot * E_MAX
        return {expert: first + k for k, expert in enumerate(self._experts)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_random_base(tmp_path / "base", "DeepseekV2ForCausalLM", seed=1)


def attach(folder: Path, experts: Any, disk_experts: tuple[int, ...]) -> Attach:
    adapter = AdapterEntry("id", "a", str(folder), 1, False, experts)
    return Attach("/socket", disk_experts, 0, (adapter,), disk_experts=disk_experts)


def test_what_is_asked_for_is_read_into_its_slots_and_nothing_else(
    base: Path, tmp_path: Path
) -> None:
    spec = read_moe_spec(base)
    layer_id = spec.moe_layer_ids[0]
    folder = write_random_adapter(tmp_path / "a", base, seed=2, experts={layer_id: (0, 1, 3)})
    layer = Layer(spec, (0, 1, 3))
    plane: Any = SimpleNamespace(layers={layer_id: layer})
    num_bytes = fill_adapters(plane, spec, attach(folder, {layer_id: (0, 1, 3)}, (1, 2, 3)))
    written = {
        key: load_file(at.file)[at.name] for key, at in read_manifest(folder, spec).tensors.items()
    }
    for expert, slot in ((1, M + E_MAX + 1), (3, M + E_MAX + 2)):
        gate, up, down = (written[layer_id, expert, proj] for proj in PROJS)
        assert torch.equal(layer.w13[slot], torch.cat([gate, up]).float())
        assert torch.equal(layer.w2[slot], down.float())
    written = layer.w13.flatten(1).any(1).nonzero().flatten().tolist()
    assert written == [M + E_MAX + 1, M + E_MAX + 2]
    numel = layer.w13[0].numel() + layer.w2[0].numel()
    element = {"float32": 4}.get(spec.dtype, 2)
    assert num_bytes == 2 * numel * element


def test_only_some_layers_of_an_expert(base: Path, tmp_path: Path) -> None:
    """Of the checkpoint and of the adapter alike: the other layers are another device's copies."""
    spec = read_moe_spec(base)
    first, second = spec.moe_layer_ids[:2]
    experts = {first: (0, 1), second: (0, 1)}
    folder = write_random_adapter(tmp_path / "a", base, seed=2, experts=experts)
    layers = {layer_id: Layer(spec, (0, 1)) for layer_id in experts}
    plane: Any = SimpleNamespace(layers=layers)
    wanted = structs.replace(attach(folder, experts, ()), disk_parts=((second, (1,)),))
    assert fill_adapters(plane, spec, wanted) > 0
    written = {
        layer_id: layer.w13.flatten(1).any(1).nonzero().flatten().tolist()
        for layer_id, layer in layers.items()
    }
    assert written == {first: [], second: [M + E_MAX + 1]}


def test_the_checkpoint_is_read_by_layer_and_expert(base: Path) -> None:
    first, second = read_moe_spec(base).moe_layer_ids[:2]
    files = [str(path) for path in base.glob("*.safetensors")]
    whole, parts = frozenset({2}), frozenset({(second, 1)})
    names = [name for name, _ in _Reader(files, whole, parts, loads_trunk=False).weights()]
    assert {(layer_of(name), expert_of(name)) for name in names} == {
        *((layer_id, 2) for layer_id in read_moe_spec(base).moe_layer_ids),
        (second, 1),
    }
    assert first != second


def test_a_folder_that_is_gone_is_the_engines_failure(base: Path, tmp_path: Path) -> None:
    spec = read_moe_spec(base)
    plane: Any = SimpleNamespace(layers={})
    with pytest.raises(EngineFailedError, match="read again"):
        fill_adapters(plane, spec, attach(tmp_path / "gone", {}, (0,)))
