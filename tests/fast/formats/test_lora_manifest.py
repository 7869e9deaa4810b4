"""LoRA adapter folders: which are taken, what is in them, and how each fault is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft.config import LoraLimits
from sgl_esft.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFiniteError,
    ConfigError,
    EsftError,
    UnsupportedAdapterError,
)
from sgl_esft.formats.adapter_config import kind_of
from sgl_esft.formats.lora_manifest import (
    LoraManifest,
    read_lora_manifest,
    read_matrix,
    served_targets,
)
from sgl_esft.formats.lora_targets import targets_of
from sgl_esft.formats.manifest import content_digest
from tests.support.base_factory import (
    SERVED_ARCHITECTURES,
    random_base_config,
    write_random_base,
)
from tests.support.lora_factory import (
    LORA_CONFIG,
    LORA_WEIGHTS,
    linear_layers,
    scaling_of,
    write_random_lora,
)

ARCHITECTURES = (*SERVED_ARCHITECTURES, "DeepseekV3ForCausalLM")
QWEN = "Qwen3MoeForCausalLM"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("bases")

    def base(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else write_random_base(folder, architecture, seed=1)

    return base


@pytest.fixture
def lora(bases: Callable[[str], Path], tmp_path: Path) -> Path:
    return write_random_lora(tmp_path / "lora", bases(QWEN), seed=2)


def read(folder: Path, architecture: str = QWEN, max_rank: int = 8) -> LoraManifest:
    return read_lora_manifest(folder, targets_of(random_base_config(architecture)), max_rank)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / LORA_CONFIG).read_text())
    (folder / LORA_CONFIG).write_text(json.dumps({**config, **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / LORA_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / LORA_WEIGHTS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_layers_of_a_checkpoint_are_the_ones_that_config_json_says(
    architecture: str, bases: Callable[[str], Path]
) -> None:
    """Shapes of the base's own tensors, against the table that is made of its config.json."""
    targets = targets_of(random_base_config(architecture)).by_projection
    said = {
        path: (module.parts[place].out_features, module.in_features)
        for path, (module, place) in targets.items()
    }
    assert said == {path: shape for path, _, shape in linear_layers(bases(architecture))}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_adapter_of_every_layer_is_taken(
    architecture: str, bases: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_random_lora(tmp_path / "lora", bases(architecture), seed=2, rank=4)
    manifest = read(folder, architecture)
    held = load_file(folder / LORA_WEIGHTS)
    assert kind_of(folder) == manifest.kind == "lora"
    assert len(manifest.tensors) == len(held)
    assert manifest.num_bytes == sum(t.nbytes for t in held.values())
    for (module, place, side), tensor in manifest.tensors.items():
        assert tensor.name == (
            f"base_model.model.model.layers.{module.layer_id}.{module.parts[place].name}"
            f".lora_{side}.weight"
        )
        raw = read_matrix("x", tensor)
        again = torch.frombuffer(raw, dtype=torch.float32).view(tensor.info.shape)
        assert torch.equal(again, held[tensor.name])


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"lora_alpha": 5}])
def test_the_scaling_is_pefts(
    settings: dict[str, Any], bases: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write_random_lora(tmp_path / "lora", bases(QWEN), seed=2, rank=4, **settings)
    config = json.loads((folder / LORA_CONFIG).read_text())
    found = read(folder).config
    assert found.scaling == scaling_of(config)
    assert found.alpha / found.rank == pytest.approx(scaling_of(config)), "as SGLang divides it"


def test_the_digest_is_of_the_content(lora: Path) -> None:
    before = content_digest(lora)
    edit(lora, lora_alpha=9)
    assert content_digest(lora) != before


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"r": 16}, AdapterMismatchError, "--max-lora-rank 16"),
        ({"r": 2}, AdapterMismatchError, "for r = 2"),
        ({"r": 0}, AdapterFormatError, "r = 0"),
        ({"r": True}, AdapterFormatError, "r = True"),
        ({"lora_alpha": None}, AdapterFormatError, "lora_alpha = None"),
        ({"lora_alpha": float("inf")}, AdapterFormatError, "lora_alpha = inf"),
        ({"peft_type": "IA3"}, UnsupportedAdapterError, "peft_type 'IA3'"),
        ({"use_dora": True}, UnsupportedAdapterError, "use_dora"),
        ({"bias": "all"}, UnsupportedAdapterError, "bias = 'all'"),
        ({"lora_bias": True}, UnsupportedAdapterError, "lora_bias"),
        ({"rank_pattern": {"q_proj": 8}}, UnsupportedAdapterError, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, UnsupportedAdapterError, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedAdapterError, "modules_to_save"),
        ({"target_parameters": ["mlp.experts"]}, UnsupportedAdapterError, "target_parameters"),
        ({"init_lora_weights": "pissa"}, UnsupportedAdapterError, "init_lora_weights = 'pissa'"),
        ({"target_modules": 3}, AdapterFormatError, "target_modules = 3"),
        ({"target_modules": ["q_proj", "w_proj"]}, AdapterFormatError, "lists 'w_proj'"),
    ],
)
def test_what_the_config_may_not_say(
    lora: Path, change: dict[str, Any], kind: type[EsftError], said: str
) -> None:
    read(lora)
    edit(lora, **change)
    with pytest.raises(kind) as raised:
        read(lora)
    assert said in str(raised.value)


PREFIX = "base_model.model.model.layers.1."


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        ("self_attn.o_proj", "mlp.experts.3.down_proj", UnsupportedAdapterError, "routed experts"),
        ("self_attn.o_proj", "mlp.gate", UnsupportedAdapterError, "the router"),
        ("self_attn.o_proj", "self_attn.z_proj", UnsupportedAdapterError, "takes LoRA in"),
        ("self_attn.o_proj", "mlp.down_proj", UnsupportedAdapterError, "takes LoRA in"),
        ("layers.1.self_attn.o", "layers.99.self_attn.o", AdapterMismatchError, "another model"),
        ("model.layers.1.self_attn.o_proj", "lm_head", UnsupportedAdapterError, "the head"),
        ("lora_B.weight", "lora_B.bias", UnsupportedAdapterError, "no LoRA matrix"),
        ("o_proj.lora_A", "o_proj.lora_embedding_A", UnsupportedAdapterError, "no LoRA matrix"),
    ],
)
def test_what_a_tensor_may_not_be_called(
    lora: Path, old: str, new: str, kind: type[EsftError], said: str
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(PREFIX) and old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    change_tensors(lora, rename)
    with pytest.raises(kind) as raised:
        read(lora)
    assert said in str(raised.value)


A, B = f"{PREFIX}self_attn.o_proj.lora_A.weight", f"{PREFIX}self_attn.o_proj.lora_B.weight"


def test_a_matrix_without_its_other(lora: Path) -> None:
    change_tensors(lora, lambda tensors: tensors.__delitem__(B))
    with pytest.raises(AdapterFormatError, match="no lora_B beside it"):
        read(lora)


def test_no_matrix_at_all(lora: Path) -> None:
    change_tensors(lora, lambda tensors: tensors.clear())
    with pytest.raises(AdapterFormatError, match="empty"):
        read(lora)


def test_one_of_another_base(lora: Path) -> None:
    change_tensors(lora, lambda tensors: tensors.update({A: torch.zeros(4, 96)}))
    with pytest.raises(AdapterMismatchError, match=r"\[4, 96\].*it is \[4, 128\]"):
        read(lora)


def test_integers_are_no_matrix(lora: Path) -> None:
    change_tensors(lora, lambda tensors: tensors.update({A: tensors[A].to(torch.int8)}))
    with pytest.raises(AdapterMismatchError, match="dtype int8"):
        read(lora)


def test_a_nan_is_found_when_it_is_read(lora: Path) -> None:
    change_tensors(lora, lambda tensors: tensors[B].view(-1)[7:8].fill_(torch.nan))
    (tensor,) = (each for each in read(lora).tensors.values() if each.name == B)
    with pytest.raises(AdapterNotFiniteError, match=r"layers\.1\.self_attn\.o_proj\.lora_B"):
        read_matrix("x", tensor)


@pytest.mark.parametrize("file", ["expert_cfg.json"])
def test_both_kinds_in_one_folder(lora: Path, file: str) -> None:
    (lora / file).write_text('{"experts": {"1": [0]}}')
    with pytest.raises(UnsupportedAdapterError, match="an adapter is of one kind"):
        read(lora)
    with pytest.raises(UnsupportedAdapterError, match="an adapter is of one kind"):
        kind_of(lora)


def test_only_some_projections_are_served(lora: Path) -> None:
    config = random_base_config(QWEN)
    targets = served_targets(config, LoraLimits(2, 8, ("o_proj",)))
    assert targets.names == ("o_proj",)
    with pytest.raises(UnsupportedAdapterError, match=r"takes LoRA in o_proj\."):
        read_lora_manifest(lora, targets, 8)
    with pytest.raises(ConfigError, match="--lora-target-modules down_proj"):
        served_targets(config, LoraLimits(2, 8, ("o_proj", "down_proj")))
