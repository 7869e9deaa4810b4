"""Adapters that tune shared experts: read exactly, merged, shown, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.config import EsftConfig, TierConfig
from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from sgl_esft.formats.adapter_config import read_config, read_expert_config, write_expert_config
from sgl_esft.formats.adapter_shapes import read_adapter_shape
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.finite import check_weights
from sgl_esft.formats.manifest import check_loadable, content_digest, read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.tools.adapter_report import inspect_adapter
from sgl_esft.tools.merge import merge_adapter
from tests.support.adapter_factory import write_random_adapter, write_random_base

EXPERTS = {1: (3,), 2: (0, 5)}
SHARED = (2, 3)  # a layer with tuned routed experts, and one without
SMALL = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "vocab_size": 300}
NAME = "model.layers.3.mlp.shared_experts.up_proj.weight"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return write_random_base(folder, "DeepseekV2ForCausalLM", seed=1, num_shards=2, **SMALL)


@pytest.fixture(scope="module")
def spec(base: Path) -> MoeSpec:
    return read_moe_spec(base)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_random_adapter(tmp_path / "math", base, 2, EXPERTS, shared_layers=SHARED)


def load(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    return found


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("old_prefix", [False, True])
@pytest.mark.parametrize(
    ("architecture", "leaf", "width"),
    [
        ("DeepseekV2ForCausalLM", "shared_experts", 2 * 192),
        ("DeepseekV3ForCausalLM", "shared_experts", 192),
        ("Qwen2MoeForCausalLM", "shared_expert", 128),
    ],
)
def test_reads_what_was_written(
    architecture: str, leaf: str, width: int, old_prefix: bool, num_shards: int, tmp_path: Path
) -> None:
    base = write_random_base(tmp_path / "base", architecture, seed=1)
    options: dict[str, Any] = {"old_prefix": old_prefix, "num_shards": num_shards}
    folder = write_random_adapter(
        tmp_path / "a", base, 2, {1: (3,)}, shared_layers=SHARED, **options
    )
    manifest = read_manifest(folder, read_moe_spec(base))
    written = load(folder)
    prefix = "" if old_prefix else "model."
    assert manifest.shared_layers == SHARED
    assert {key: (each.name, each.shape) for key, each in manifest.shared.items()} == {
        (layer, proj): (
            f"{prefix}layers.{layer}.mlp.{leaf}.{proj}_proj.weight",
            (128, width) if proj == "down" else (width, 128),
        )
        for layer in SHARED
        for proj in PROJS
    }
    assert manifest.num_experts == 1
    assert manifest.num_bytes == sum(tensor.nbytes for tensor in written.values())
    assert {file.name for file in manifest.files} == {f.name for f in folder.glob("*.safetensors")}
    for location in manifest.shared.values():
        assert location.name in load_file(location.file)


def test_the_digest_covers_them(adapter: Path) -> None:
    before = content_digest(adapter)
    edit(adapter, lambda tensors: tensors[NAME].view(-1)[-1:].neg_())
    assert content_digest(adapter) != before


def test_merge_writes_them(base: Path, adapter: Path, spec: MoeSpec, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "merged")
    before, tuned, merged = load(base), load(adapter), load(tmp_path / "merged")
    assert len([name for name in tuned if ".shared_experts." in name]) == 6
    assert merged.keys() == before.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, tuned.get(name, before[name])), name
    assert read_moe_spec(tmp_path / "merged") == spec


def test_merge_needs_a_base_that_has_them(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    write_random_base(folder, "DeepseekV2ForCausalLM", seed=1, **SMALL)
    edit(folder, lambda tensors: tensors.pop(NAME))
    with pytest.raises(UnsupportedModelError, match=f"{NAME} as none"):
        merge_adapter(folder, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM"])
def test_inspect_shows_them(architecture: str, has_base: bool, tmp_path: Path) -> None:
    base = write_random_base(tmp_path / "base", architecture, seed=1)
    folder = write_random_adapter(tmp_path / "a", base, 2, EXPERTS, shared_layers=SHARED)
    report = inspect_adapter(str(folder), base if has_base else None)
    assert report.as_json()["shared_experts"] == [2, 3]
    assert "shared    shared experts of 2 layers: 2 3" in list(report.as_table())


def test_inspect_without_base_or_gates(adapter: Path) -> None:
    edit(adapter, lambda t: [t.pop(n) for n in list(t) if "shared_experts.gate" in n])
    with pytest.raises(AdapterFormatError, match="no gate tensor"):
        inspect_adapter(str(adapter), None)


def _untold(folder: Path) -> None:
    write_expert_config(folder / "expert_cfg.json", EXPERTS)


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, change)


_BAD: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "one of three is missing": (
        _tensors(lambda t: t.pop(NAME)),
        AdapterFormatError,
        rf"^1 of 15 tensors are missing, the first is {NAME}\. ",
    ),
    "all are missing": (
        _tensors(lambda t: [t.pop(name) for name in list(t) if ".shared_experts." in name]),
        AdapterFormatError,
        "shared_experts = true, but there is no tensor of them, such as model.layers.1.mlp.shared",
    ),
    "not told": (_untold, AdapterFormatError, "has shared_experts = false. Write true"),
    "of a dense layer": (
        _tensors(lambda t: t.update({NAME.replace(".3.", ".0."): t[NAME].clone()})),
        AdapterFormatError,
        r"layers\.0\.mlp\.shared_experts.* is of no expert",
    ),
    "a bias": (
        _tensors(lambda t: t.update({NAME.replace("weight", "bias"): torch.zeros(2)})),
        AdapterFormatError,
        r"shared_experts\.up_proj\.bias.* is of no expert",
    ),
    "another width": (
        _tensors(lambda t: t.update({NAME: t[NAME][:-1].clone()})),
        AdapterMismatchError,
        rf"{NAME} has shape \[15, 16\], the base model's is \[16, 16\]",
    ),
    "another dtype": (
        _tensors(lambda t: t.update({NAME: t[NAME].half()})),
        AdapterMismatchError,
        f"{NAME} has dtype float16, the base checkpoint's is float32",
    ),
    "quantised": (
        _tensors(lambda t: t.update({NAME.replace("weight", "weight_scale"): torch.zeros(2)})),
        AdapterMismatchError,
        "weight_scale .*is of a quantised adapter",
    ),
}


@pytest.mark.parametrize("kind", _BAD)
def test_bad_ones(kind: str, adapter: Path, spec: MoeSpec) -> None:
    damage, error, message = _BAD[kind]
    read_manifest(adapter, spec)
    damage(adapter)
    with pytest.raises(error, match=message) as caught:
        read_manifest(adapter, spec)
    assert type(caught.value) is error


def test_a_nan_in_them_is_named(adapter: Path, spec: MoeSpec) -> None:
    edit(adapter, lambda t: t[NAME].view(-1)[-1:].fill_(torch.nan))
    with pytest.raises(AdapterNotFiniteError, match="in layer 3, shared experts, up projection"):
        check_weights("math", read_manifest(adapter, spec))


def test_bases_that_have_no_place_for_them(adapter: Path, spec: MoeSpec, tmp_path: Path) -> None:
    quantised = replace(spec, scheme=ExpertScheme("int8", 1, 0))
    with pytest.raises(UnsupportedAdapterError, match=r"not shown with a quantised base \(int8\)"):
        read_manifest(adapter, quantised)
    for architecture in ("Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        base = write_random_base(tmp_path / architecture, architecture, seed=1)
        folder = write_random_adapter(tmp_path / f"{architecture}-a", base, 2, {1: (3,)})
        config = json.loads((folder / "expert_cfg.json").read_text())
        (folder / "expert_cfg.json").write_text(json.dumps({**config, "shared_experts": True}))
        with pytest.raises(UnsupportedAdapterError, match="the base model has no shared experts"):
            read_manifest(folder, read_moe_spec(base))


def test_refused_where_experts_are_in_tiers(adapter: Path, spec: MoeSpec) -> None:
    config = EsftConfig(2, 4)
    manifest = check_loadable("math", str(adapter), (), spec, config)
    assert manifest.shared_layers == SHARED
    with pytest.raises(UnsupportedAdapterError, match="in tiers: leave --expert-cache out"):
        check_loadable("math", str(adapter), (), spec, replace(config, tiers=TierConfig(4, 2)))


def test_a_plan_counts_routed_experts_alone(adapter: Path, spec: MoeSpec) -> None:
    assert read_adapter_shape(adapter, spec).experts == {1: 1, 2: 2}


def test_lists_of_routed_experts_are_not_for_them(adapter: Path) -> None:
    assert read_config(adapter / "expert_cfg.json").shared_experts
    with pytest.raises(UnsupportedAdapterError, match="only routed experts can be listed"):
        read_expert_config(adapter / "expert_cfg.json")


@pytest.mark.parametrize("number", [-1, "2", True])
def test_a_base_with_a_strange_number_of_them(base: Path, number: object) -> None:
    config = json.loads((base / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match="n_shared_experts"):
        MoeSpec.from_config({**config, "n_shared_experts": number})
    for absent in (None, 0):
        found = MoeSpec.from_config({**config, "n_shared_experts": absent})
        assert found.shared_intermediate_size == 0
