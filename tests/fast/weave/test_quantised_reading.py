"""Adapters over a quantised base, read into host memory: stored quantised, or quantised once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.config import EsftConfig
from sgl_esft.errors import AdapterMismatchError, AdapterNotFiniteError, InvariantError
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.quant.adapter_copy import quantise_adapter
from sgl_esft.quant.rounding import quantise_expert
from sgl_esft.weave.host_cache import HostAdapter, num_bytes_to_read, read_adapter, read_for_base
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights
from sgl_esft.weave.quantised_experts import lay_out
from tests.support.adapter_factory import write_random_adapter
from tests.support.base_factory import write_random_base

EXPERTS = {1: (0, 3), 2: (1,)}
HIDDEN, WIDTH, NUM_EXPERTS = 128, 256, 4
SCHEMES = {
    "int8": ExpertScheme("int8", 1, 0),
    "fp8": ExpertScheme("fp8", 128, 128),
    "fp8-tensor": ExpertScheme("fp8-tensor", 0, 0),
    "int4": ExpertScheme("int4", 1, 128, "bfloat16"),
}
SHARDS = {
    "whole": ExpertShard(range(NUM_EXPERTS), range(WIDTH)),
    "TP2": ExpertShard(range(NUM_EXPERTS), range(WIDTH // 2, WIDTH)),
    "EP2": ExpertShard(range(NUM_EXPERTS // 2), range(WIDTH)),
}


class Adapter:
    """One adapter: its weights, its folder in bfloat16, and its base's spec in one scheme."""

    def __init__(self, folder: Path, scheme: str) -> None:
        base = write_random_base(
            folder / "base",
            "DeepseekV2ForCausalLM",
            seed=1,
            dtype="bfloat16",
            moe_intermediate_size=WIDTH,
            n_routed_experts=NUM_EXPERTS,
            num_hidden_layers=3,
        )
        self.scheme = SCHEMES[scheme]
        self.spec: MoeSpec = replace(read_moe_spec(base), scheme=self.scheme)
        self.folder = write_random_adapter(folder / "math", base, seed=2, experts=EXPERTS)
        self.weights = load_file(self.folder / "model.safetensors")
        self.copies = EsftConfig(1, 2, quantised_adapters=str(folder / "copies"))
        self._folder = folder

    def manifest(self) -> AdapterManifest:
        return read_manifest(self.folder, self.spec)

    def stored(self) -> AdapterManifest:
        out = self._folder / "stored"
        return quantise_adapter(self.manifest(), self.spec, out)

    def expected(self, layer: int, expert: int, shard: ExpertShard) -> ExpertWeights:
        weights = {p: self.weights[self.spec.expert_tensor_name(layer, expert, p)] for p in PROJS}
        return lay_out(quantise_expert(weights, self.scheme), self.scheme, shard.intermediate)

    def check(self, found: HostAdapter, shard: ExpertShard) -> None:
        wanted = {
            (layer, e) for layer, ids in EXPERTS.items() for e in ids if e in shard.expert_ids
        }
        assert {(layer, e) for layer, of in found.experts.items() for e in of} == wanted
        for layer, expert in wanted:
            seen = found.experts[layer][expert]
            pairs = zip(seen.tensors, self.expected(layer, expert, shard).tensors, strict=True)
            assert all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(params=SCHEMES)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Adapter:
    return Adapter(tmp_path, request.param)


@pytest.fixture(params=SHARDS)
def shard(request: pytest.FixtureRequest) -> ExpertShard:
    return SHARDS[request.param]


def test_an_adapter_that_is_stored_quantised(adapter: Adapter, shard: ExpertShard) -> None:
    manifest, shards = adapter.stored(), dict.fromkeys(EXPERTS, shard)
    read: list[int] = []
    found = read_adapter("math", manifest, shards, on_read=read.append)
    adapter.check(found, shard)
    assert sum(read) == num_bytes_to_read(manifest, shards) > 0
    for experts in found.experts.values():
        for expert in experts.values():
            held = sum(tensor.untyped_storage().nbytes() for tensor in expert.tensors)
            assert held == expert.num_bytes, "the rank's part keeps the rest in memory"


def read_as_a_rank(adapter: Adapter, shard: ExpertShard) -> tuple[HostAdapter, int]:
    """With the bytes that were read, which are those that were told before."""
    sizes: list[int] = []
    read: list[int] = []
    found = read_for_base(
        "math",
        adapter.manifest(),
        adapter.spec,
        dict.fromkeys(EXPERTS, shard),
        adapter.copies,
        sizes.append,
        read.append,
    )
    assert [sum(read)] == sizes
    return found, sum(read)


def test_an_adapter_in_bfloat16_is_quantised_once(adapter: Adapter, shard: ExpertShard) -> None:
    found, num_bytes = read_as_a_rank(adapter, shard)
    adapter.check(found, shard)
    manifest = adapter.manifest()
    assert found.manifest == manifest, "that of the copy may be gone tomorrow"
    assert num_bytes > manifest.num_bytes
    again, num_bytes_again = read_as_a_rank(adapter, shard)
    adapter.check(again, shard)
    assert num_bytes_again == num_bytes - manifest.num_bytes
    assert len(list(adapter.copies.quantised_adapters_path.glob("[!.]*"))) == 1


def test_another_content_is_quantised_anew(tmp_path: Path) -> None:
    adapter = Adapter(tmp_path, "int8")
    read_as_a_rank(adapter, SHARDS["whole"])
    name = adapter.spec.expert_tensor_name(1, 3, "down")
    adapter.weights[name] *= 2
    save_file(adapter.weights, adapter.folder / "model.safetensors")
    found, _ = read_as_a_rank(adapter, SHARDS["whole"])
    adapter.check(found, SHARDS["whole"])


def change_stored(adapter: Adapter, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = adapter.stored().files[0]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def read_stored(adapter: Adapter) -> None:
    manifest = read_manifest(adapter.folder.parent / "stored", adapter.spec)
    read_adapter("math", manifest, dict.fromkeys(EXPERTS, SHARDS["whole"]))


def test_a_scale_that_is_no_number_is_refused(adapter: Adapter) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        part = adapter.spec.expert_parts("down")[1]
        name = adapter.spec.expert_part_name((2, 1, "down"), part)
        tensors[name].view(-1)[-1] = float("nan")

    change_stored(adapter, spoil)
    with pytest.raises(AdapterNotFiniteError, match="layer 2, expert 1, down projection"):
        read_stored(adapter)


def test_gate_and_up_with_two_scales_are_refused(tmp_path: Path) -> None:
    adapter = Adapter(tmp_path, "fp8-tensor")

    def double(tensors: dict[str, torch.Tensor]) -> None:
        part = adapter.spec.expert_parts("up")[1]
        tensors[adapter.spec.expert_part_name((1, 3, "up"), part)] *= 2

    change_stored(adapter, double)
    with pytest.raises(AdapterMismatchError, match=r"gate and up .* two scales"):
        read_stored(adapter)


@pytest.mark.parametrize(("scheme", "rows"), [("fp8", range(64, 192)), ("int4", range(1, 129))])
def test_a_part_that_cuts_through_a_block(tmp_path: Path, scheme: str, rows: range) -> None:
    adapter = Adapter(tmp_path, scheme)
    with pytest.raises(InvariantError, match="cut through a block"):
        adapter.expected(1, 0, ExpertShard(range(NUM_EXPERTS), rows))
