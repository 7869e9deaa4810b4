"""Sizes from config.json equal the bytes of the tensors in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import SUPPORTED
from sgl_esft.memory.model_sizes import ModelSizes, read_model_sizes
from tests.support.base_factory import random_base_config, write_random_base

V2_LITE = Path(__file__).parents[2] / "data" / "deepseek-v2-lite.json"

_BF16 = {"dtype": "bfloat16", "tie_word_embeddings": False}
_GROUPED = {
    **_BF16,
    "num_key_value_heads": 4,
    "num_attention_heads": 32,
    "hidden_size": 2048,
    "num_experts_per_tok": 8,
}

# Published models: config entries that size them, and their published number of parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "DeepSeek-V3": (
        {
            **json.loads(V2_LITE.read_text()),
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "topk_method": "noaux_tc",
        },
        671_026_419_200,
    ),
    "Qwen3-30B-A3B": (
        {
            **_GROUPED,
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
        },
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            **_GROUPED,
            "architectures": ["Qwen2MoeForCausalLM"],
            "vocab_size": 151936,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
        },
        14_315_784_192,
    ),
    "Mixtral-8x7B": (
        {
            **_GROUPED,
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
        },
        46_702_792_704,
    ),
}

# What changes the count within an architecture.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((architecture, {}) for architecture in SUPPORTED),
    *((architecture, {"dtype": "bfloat16"}) for architecture in SUPPORTED),
    ("DeepseekV2ForCausalLM", {"q_lora_rank": 48, "n_shared_experts": 3}),
    ("DeepseekV2ForCausalLM", {"first_k_dense_replace": 2, "num_hidden_layers": 5}),
    ("DeepseekV3ForCausalLM", {"q_lora_rank": None, "topk_method": "greedy"}),
    ("Qwen3MoeForCausalLM", {"num_key_value_heads": 2, "head_dim": 24}),
    ("Qwen2MoeForCausalLM", {"qkv_bias": False, "head_dim": None}),
    ("MixtralForCausalLM", {"num_key_value_heads": 2}),
]


def bytes_on_disk(folder: Path) -> tuple[int, int]:
    """Bytes of all tensors of the checkpoint, and of its routed experts alone."""
    total = routed = 0
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            total += tensor.nbytes
            routed += tensor.nbytes if ".experts." in name else 0
    return total, routed


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_sizes_are_those_of_the_checkpoint(
    architecture: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_random_base(tmp_path, architecture, seed=1, **overrides)
    sizes = read_model_sizes(folder)
    assert (sizes.total_bytes, sizes.routed_bytes) == bytes_on_disk(folder)
    assert sizes.trunk_bytes == sizes.total_bytes - sizes.routed_bytes
    assert sum(sizes.slot_bytes) == sizes.spec.expert_bytes


def test_deepseek_v2_lite() -> None:
    sizes = read_model_sizes(V2_LITE)
    assert sizes.total_bytes == 31_412_968_448
    assert len(sizes.spec.moe_layer_ids) == 26
    assert sizes.slot_bytes == (11_534_336, 5_767_168)
    assert sizes.kv_bytes_per_token() == 31_104
    assert sizes.kv_bytes_per_token("fp8_e4m3") == 15_552


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_numbers_of_parameters(model: str) -> None:
    config, parameters = PUBLISHED[model]
    assert ModelSizes.from_config(config).total_bytes == 2 * parameters


@pytest.mark.parametrize(
    ("architecture", "elements"),
    [
        ("DeepseekV2ForCausalLM", 4 * (32 + 16)),
        ("DeepseekV3ForCausalLM", 4 * (32 + 16)),
        ("Qwen3MoeForCausalLM", 4 * 2 * 4 * 16),
        ("Qwen2MoeForCausalLM", 4 * 2 * 4 * 16),
        ("MixtralForCausalLM", 4 * 2 * 4 * 16),
    ],
)
def test_kv_cache_of_a_token(architecture: str, elements: int) -> None:
    sizes = ModelSizes.from_config(random_base_config(architecture))
    assert sizes.kv_elements_per_token == elements
    assert sizes.kv_bytes_per_token() == 4 * elements
    assert sizes.kv_bytes_per_token("bfloat16") == 2 * elements


@pytest.mark.parametrize(
    ("architecture", "change", "elements"),
    [
        ("Qwen3MoeForCausalLM", {"tie_word_embeddings": True}, -512 * 128),
        ("Qwen3MoeForCausalLM", {"attention_bias": True}, 4 * ((8 + 4 + 4) * 16 + 128)),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, 4 * (64 + 32 + 16 + 128)),
    ],
)
def test_what_is_tied_or_added(architecture: str, change: dict[str, Any], elements: int) -> None:
    config = random_base_config(architecture)
    plain = ModelSizes.from_config(config).total_bytes
    assert ModelSizes.from_config({**config, **change}).total_bytes == plain + 4 * elements


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": None},
        {"vocab_size": "512"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": True},
        {"head_dim": -1},
        {"architectures": ["LlamaForCausalLM"]},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_malformed_configs(change: dict[str, Any]) -> None:
    config = random_base_config("Qwen3MoeForCausalLM", **change)
    with pytest.raises(UnsupportedModelError):
        ModelSizes.from_config(config)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot read"):
        read_model_sizes(tmp_path / "config.json")
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        read_model_sizes(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="not valid JSON"):
        read_model_sizes(tmp_path / "config.json")


def test_unknown_kv_dtype() -> None:
    with pytest.raises(ConfigError, match="--kv-dtype is 'int3'"):
        read_model_sizes(V2_LITE).kv_bytes_per_token("int3")
