"""Shared experts of adapters go where their adapter goes: placed, evicted, replaced, unloaded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sgl_esft.config import EsftConfig
from sgl_esft.errors import InvariantError, UnsupportedAdapterError
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.host_cache import HostAdapter
from sgl_esft.weave.plane import AdapterSource
from sgl_esft.weave.shared_mlp import SharedMlp, SharedMlps
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.random_layers import ONE_RANK, Rank
from tests.support.woven_device import Device

SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}
LAYERS = {"math": (1, 2, 3), "law": (2,), "plain": ()}  # whose shared experts an adapter has
EXPERTS = {1: (0, 2), 2: (1,)}
TP2 = Rank(tp_rank=1, tp_size=2)


class Mlp(torch.nn.Module):
    """What a rank's shared MLP holds; computes so that each weight counts."""

    def __init__(self, spec: MoeSpec, rank: Rank) -> None:
        super().__init__()
        width = spec.shared_intermediate_size // rank.tp_size
        zeros = torch.zeros
        self.up = torch.nn.Parameter(zeros(2 * width, spec.hidden_size), requires_grad=False)
        self.down = torch.nn.Parameter(zeros(spec.hidden_size, width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.up.T).chunk(2, dim=-1)
        return (gate * up) @ self.down.T


class SharedDevice(Device):
    """A device whose model has shared experts, zeros in the base."""

    def __init__(self, spec: MoeSpec, max_adapters: int, rank: Rank = ONE_RANK) -> None:
        self.modules = {layer: Mlp(spec, rank) for layer in spec.moe_layer_ids}
        self.tags = BatchTags(16, "cpu")
        width = spec.shared_intermediate_size // rank.tp_size
        rows = range(rank.tp_rank * width, (rank.tp_rank + 1) * width)
        self.mlps = SharedMlps(
            {
                layer: SharedMlp(module, (module.up, module.down), rows, self.tags)
                for layer, module in self.modules.items()
            }
        )
        config = EsftConfig(max_adapters, 4)
        super().__init__(spec, config, rank, is_resident=False, shared=self.mlps)

    def held(self) -> dict[int, list[int]]:
        """Layer id -> adapter slots with shared experts there."""
        return {layer: sorted(mlp.held_slots) for layer, mlp in self.mlps.layers.items()}

    def check_shared(self, folder: Path, adapter_id: str | None = None) -> None:
        """Tokens of the adapter meet the folder's shared experts, or the base's zeros."""
        slot = self.plane.slot_of(adapter_id or folder.name)
        tensors = load_file(folder / "model.safetensors")
        x = torch.randn(4, self.spec.hidden_size)
        self.tags.set(torch.tensor([slot, -1, slot, -1], dtype=torch.int32))
        for layer, module in self.modules.items():
            names = [self.spec.shared_tensor_name(layer, proj) for proj in PROJS]
            expected = torch.zeros(4, self.spec.hidden_size)
            if names[0] in tensors:
                rows = self.mlps.layers[layer].rows
                part = slice(rows.start, rows.stop)
                gate, up, down = (tensors[name] for name in names)
                own = ((x @ gate[part].T) * (x @ up[part].T)) @ down[:, part].T
                expected[::2] = own[::2]
            torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(module.up, torch.zeros_like(module.up)), "the base's are lent no longer"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    base = write_random_base(root / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    for seed, (name, layers) in enumerate(LAYERS.items()):
        write_random_adapter(root / name, base, seed, EXPERTS, shared_layers=layers)
    return root


@pytest.fixture(scope="module")
def spec(root: Path) -> MoeSpec:
    return read_moe_spec(root / "base")


@pytest.mark.parametrize("rank", [ONE_RANK, TP2], ids=str)
def test_loaded_and_unloaded(root: Path, spec: MoeSpec, rank: Rank) -> None:
    device = SharedDevice(spec, 3, rank)
    for name in LAYERS:
        device.load(root / name)
    assert device.held() == {1: [0], 2: [0, 1], 3: [0]}
    for name in LAYERS:
        device.check(root / name)
        device.check_shared(root / name)
    device.plane.check_integrity()
    for name in LAYERS:
        device.plane.unload(name)
        assert not any(0 in slots for slots in device.held().values())
    assert device.held() == {1: [], 2: [], 3: []}
    assert all("forward" not in module.__dict__ for module in device.modules.values())


def test_bytes_are_counted_where_they_are(root: Path, spec: MoeSpec) -> None:
    device = SharedDevice(spec, 3)
    for name in LAYERS:
        device.load(root / name)
    one = 3 * spec.hidden_size * spec.shared_intermediate_size * 4
    placed = device.plane.placements()
    plain = placed["plain"][1]
    assert plain == 3 * spec.expert_bytes
    assert {name: num_bytes - plain for name, (_, num_bytes) in placed.items()} == {
        name: len(layers) * one for name, layers in LAYERS.items()
    }
    told: list[int] = []
    read: list[int] = []
    source = AdapterSource("again", "again", str(root / "math"))
    adapter = device.plane.read(source, told.append, read.append)
    assert told == [sum(read)] == [adapter.num_bytes] == [plain + 3 * one]


def test_unloading_frees_them(root: Path, spec: MoeSpec) -> None:
    device = SharedDevice(spec, 1)
    device.load(root / "math")
    device.check_shared(root / "math")
    adapter: HostAdapter = device.plane._loaded["math"]
    gone = [weakref.ref(tensor) for each in adapter.shared.values() for tensor in each.tensors]
    assert len(gone) == 6
    del adapter
    device.plane.unload("math")
    gc.collect()
    assert [reference() for reference in gone] == [None] * 6


def test_they_leave_and_come_back_with_their_adapter(root: Path, spec: MoeSpec) -> None:
    device = SharedDevice(spec, 1)
    for name in LAYERS:
        device.load(root / name)
    for name in (*LAYERS, *reversed(LAYERS)):
        device.plane.ensure_on_device([name])
        device.check_shared(root / name)
        device.plane.check_integrity()


def test_a_new_version_is_placed_beside_the_old(root: Path, spec: MoeSpec, tmp_path: Path) -> None:
    device = SharedDevice(spec, 2)
    device.load(root / "math", adapter_id="first")
    newer = write_random_adapter(tmp_path / "math", root / "base", 9, EXPERTS, shared_layers=(1, 2))
    device.load(newer, adapter_id="second")
    device.check_shared(root / "math", "first")
    device.check_shared(newer, "second")
    device.plane.unload("first")
    device.check_shared(newer, "second")
    assert device.held() == {1: [1], 2: [1], 3: []}


@pytest.mark.parametrize("broken_layer", [1, 3])
def test_a_load_that_fails_half_way_leaves_nothing(
    root: Path, spec: MoeSpec, broken_layer: int
) -> None:
    device = SharedDevice(spec, 2)
    device.load(root / "law")
    before = (device.snapshot(), device.held())
    weights = device.mlps.layers[broken_layer]._weights
    weights[1].data = torch.zeros(1, 1)
    with pytest.raises(InvariantError, match="shared experts of"):
        device.load(root / "math")
    assert (device.snapshot(), device.held()) == before
    device.plane.check_integrity()


@pytest.mark.parametrize("broken_layer", [1, 2])
def test_a_batch_that_cannot_have_them_leaves_nothing(
    root: Path, spec: MoeSpec, broken_layer: int
) -> None:
    device = SharedDevice(spec, 1)
    device.load(root / "plain")
    device.load(root / "math")
    own = device.mlps.layers[broken_layer]._weights[1].data
    device.mlps.layers[broken_layer]._weights[1].data = torch.zeros(1, 1)
    with pytest.raises(InvariantError, match="shared experts of"):
        device.plane.ensure_on_device(["math"])
    assert device.held() == {1: [], 2: [], 3: []}
    assert [dict(layer.slots_by_adapter) for layer in device.layers.values()] == [{}] * 3
    device.mlps.layers[broken_layer]._weights[1].data = own
    device.plane.ensure_on_device(["math"])
    device.check_shared(root / "math")


def test_what_is_left_behind_is_found(root: Path, spec: MoeSpec) -> None:
    device = SharedDevice(spec, 2)
    device.load(root / "math")
    device.load(root / "plain")
    weights = device.plane._loaded["math"].shared[1]
    device.mlps.layers[1].place(1, weights)
    with pytest.raises(InvariantError, match=r"layer 1: adapter slots \[1\]"):
        device.plane.check_integrity()
    with pytest.raises(InvariantError, match="adapter slot 0 has shared experts already"):
        device.mlps.layers[1].place(0, weights)


def test_refused_by_a_rank_without_them(root: Path, spec: MoeSpec) -> None:
    device = Device(spec, EsftConfig(2, 4), ONE_RANK, is_resident=False)
    device.load(root / "plain")
    before = device.snapshot()
    with pytest.raises(UnsupportedAdapterError, match="adapter 'math' has shared_experts = true"):
        device.load(root / "math")
    assert device.snapshot() == before
