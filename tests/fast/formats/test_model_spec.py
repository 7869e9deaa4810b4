"""config.json -> MoeSpec, for the five architectures and for what must be refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from sgl_esft.errors import EsftError, UnsupportedModelError
from sgl_esft.formats.model_spec import PROJS, SUPPORTED, MoeSpec, read_moe_spec
from tests.support.adapter_factory import (
    SERVED_ARCHITECTURES,
    random_base_config,
    write_random_base,
)

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "torch_dtype": "bfloat16",
}


def test_deepseek_v2_lite() -> None:
    spec = MoeSpec.from_config(DEEPSEEK_V2_LITE)
    assert spec.moe_layer_ids == tuple(range(1, 27))
    assert (spec.num_layers, spec.num_experts, spec.dtype) == (27, 64, "bfloat16")
    assert spec.expert_bytes == 17_301_504
    assert spec.expert_tensor_shape("gate") == (1408, 2048)
    assert spec.expert_tensor_shape("up") == (1408, 2048)
    assert spec.expert_tensor_shape("down") == (2048, 1408)
    assert (
        spec.expert_tensor_name(3, 17, "down") == "model.layers.3.mlp.experts.17.down_proj.weight"
    )


def test_deepseek_v3_follows_the_same_rules() -> None:
    config = {**DEEPSEEK_V2_LITE, "architectures": ["DeepseekV3ForCausalLM"]}
    config |= {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    assert MoeSpec.from_config(config).moe_layer_ids == tuple(range(3, 61))


@pytest.mark.parametrize(
    ("first", "step", "layers"),
    [(0, 1, (0, 1, 2, 3, 4, 5)), (1, 2, (2, 4)), (3, 3, (3,)), (2, None, (2, 3, 4, 5))],
)
def test_deepseek_dense_layers(first: int, step: int | None, layers: tuple[int, ...]) -> None:
    config = {**DEEPSEEK_V2_LITE, "num_hidden_layers": 6, "first_k_dense_replace": first}
    if step is None:
        del config["moe_layer_freq"]
    else:
        config["moe_layer_freq"] = step
    assert MoeSpec.from_config(config).moe_layer_ids == layers


def test_mixtral_names() -> None:
    spec = MoeSpec.from_config(random_base_config("MixtralForCausalLM"))
    names = [spec.expert_tensor_name(1, 2, proj) for proj in PROJS]
    block = "model.layers.1.block_sparse_moe.experts.2"
    assert names == [f"{block}.w1.weight", f"{block}.w3.weight", f"{block}.w2.weight"]


def test_qwen3_as_transformers_5_saves_it() -> None:
    config = random_base_config("Qwen3MoeForCausalLM")
    config["num_local_experts"] = config.pop("num_experts")
    assert MoeSpec.from_config(config).num_experts == 16


@pytest.mark.parametrize("architecture", SERVED_ARCHITECTURES)
def test_every_name_and_shape_is_in_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    spec = read_moe_spec(write_random_base(tmp_path, architecture, seed=0))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        experts = {name for name in file.keys() if ".experts." in name}  # noqa: SIM118
        expected = {
            spec.expert_tensor_name(layer, expert, proj): spec.expert_tensor_shape(proj)
            for layer in spec.moe_layer_ids
            for expert in range(spec.num_experts)
            for proj in PROJS
        }
        assert experts == expected.keys()
        for name, shape in expected.items():
            assert tuple(file.get_slice(name).get_shape()) == shape


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dense model": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "no architecture": ({"architectures": None}, "Supported"),
    "empty architectures": ({"architectures": []}, "Supported"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    "odd quantisation": ({"quantization_config": "int4"}, "quantization_config"),
    "compressed": ({"compression_config": {"quant_method": "w8"}}, "compression_config"),
    "no dtype": ({"torch_dtype": None}, "dtype"),
    "float64": ({"torch_dtype": "float64"}, "float64"),
    "fp8 dtype": ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    "no experts": ({"n_routed_experts": None}, "n_routed_experts"),
    "bool count": ({"n_routed_experts": True}, "n_routed_experts"),
    "zero width": ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
    "text size": ({"hidden_size": "2048"}, "hidden_size"),
    "negative first": ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "all dense": ({"first_k_dense_replace": 27}, "no MoE layer"),
    "zero step": ({"moe_layer_freq": 0}, "moe_layer_freq"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        MoeSpec.from_config({**DEEPSEEK_V2_LITE, **change})


def test_unsupported_architecture_says_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        MoeSpec.from_config({**DEEPSEEK_V2_LITE, "architectures": ["GptOssForCausalLM"]})
    assert all(name in str(caught.value) for name in SUPPORTED)


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("change", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_qwen_with_dense_layers(architecture: str, change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="dense"):
        MoeSpec.from_config(random_base_config(architecture, **change))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\ufeff{}", "[" * 100_000])
def test_config_that_is_not_an_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        read_moe_spec(tmp_path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)):
        read_moe_spec(tmp_path)


def test_modelopt_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="modelopt"):
        read_moe_spec(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(DEEPSEEK_V2_LITE)), _JSON))
def test_any_config_is_read_or_refused(change: dict[str, Any]) -> None:
    try:
        spec = MoeSpec.from_config({**DEEPSEEK_V2_LITE, **change})
    except EsftError:
        return
    assert spec.moe_layer_ids
    assert spec.expert_bytes > 0


def test_import_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sgl_esft.formats.manifest, sgl_esft.formats.model_spec;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'sglang')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
