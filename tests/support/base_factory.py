"""Tiny random base checkpoints of the four served families, complete enough for a real server.

Every size divides by four, so that TP, DP attention and EP of up to four ranks work. Weights are
scaled so that activations stay near one, routing differs from token to token, and a replaced
expert changes what is generated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgl_esft.formats.model_spec import PROJS, MoeSpec

SERVED_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
)
BOS, EOS, PAD = 256, 257, 258

# An expert's w13 and w2 are then 1.5 and 0.75 pages of 128 KiB (of 2 MiB, DeepSeek-V2-Lite's are
# 5.5 and 2.75). On a CPU, SGLang pads experts whose width is no multiple of 32 for each rank.
MOE_WIDTH = 192
AWKWARD_PAGE = "128KiB"

_COMMON: Mapping[str, Any] = {
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_DEEPSEEK_V2: Mapping[str, Any] = {
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": MOE_WIDTH,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    # SGLang's MLA path expects the yarn entry that every published DeepSeek-V2 has.
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_QWEN: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 256,
    "moe_intermediate_size": MOE_WIDTH,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
    "router_aux_loss_coef": 0.001,
}
_DEEPSEEK_V3: Mapping[str, Any] = {
    **_DEEPSEEK_V2,
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "rope_scaling": {**_DEEPSEEK_V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **_QWEN},
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        **_QWEN,
        "shared_expert_intermediate_size": 128,
        "qkv_bias": True,
    },
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "num_attention_heads": 8,
        "intermediate_size": MOE_WIDTH,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def random_base_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """A complete config.json; `overrides` replace its entries."""
    return {
        "architectures": [architecture],
        **_COMMON,
        **_CONFIGS[architecture],
        **overrides,
    }


def write_random_base(
    folder: Path, architecture: str, seed: int, *, num_shards: int = 1, **overrides: Any
) -> Path:
    """Write a checkpoint with a byte-level tokenizer into `folder` (made if missing)."""
    config = random_base_config(architecture, **overrides)
    spec = MoeSpec.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    tensors = {
        name: random_weight(name, shape, generator).to(dtype)
        for name, shape in _tensor_shapes(config, spec)
    }
    # A special token that wins would end an answer early; its row of zeros never does.
    tensors["lm_head.weight"][BOS : PAD + 1] = 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_shards(folder, tensors, num_shards)
    _write_tokenizer(folder, config["vocab_size"])
    return folder


def save_shards(folder: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    """Write `model.safetensors`, or shards dealt out in turn and their index."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 noise at the scale that suits the tensor's part in the model."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    is_router = name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
    is_down = name.endswith((".down_proj.weight", ".w2.weight"))
    # Sharp routing, so that tokens differ in it; loud experts, so that each one matters.
    gain = 3.0 if is_router or is_down else 1.0
    return noise * (gain / math.sqrt(shape[-1]))


def _tensor_shapes(config: Mapping[str, Any], spec: MoeSpec) -> _Shapes:
    vocab, hidden = config["vocab_size"], spec.hidden_size
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        attention = _mla_shapes if "kv_lora_rank" in config else _gqa_shapes
        yield from attention(f"{prefix}.self_attn", config, hidden)
        if layer in spec.moe_layer_ids:
            yield from _moe_shapes(layer, config, spec)
        else:
            yield from _mlp_shapes(f"{prefix}.mlp", hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _mla_shapes(prefix: str, config: Mapping[str, Any], hidden: int) -> _Shapes:
    heads, rank, value = config["num_attention_heads"], config["kv_lora_rank"], config["v_head_dim"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if q_rank := config["q_lora_rank"]:
        yield f"{prefix}.q_a_proj.weight", (q_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (q_rank,)
        yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank)
    else:
        yield f"{prefix}.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)


def _gqa_shapes(prefix: str, config: Mapping[str, Any], hidden: int) -> _Shapes:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{prefix}.{name}_proj.weight", (count * head_dim, hidden)
        if config.get("qkv_bias"):
            yield f"{prefix}.{name}_proj.bias", (count * head_dim,)
    yield f"{prefix}.o_proj.weight", (hidden, heads * head_dim)
    if config["model_type"] == "qwen3_moe":
        yield f"{prefix}.q_norm.weight", (head_dim,)
        yield f"{prefix}.k_norm.weight", (head_dim,)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> _Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _moe_shapes(layer: int, config: Mapping[str, Any], spec: MoeSpec) -> _Shapes:
    hidden = spec.hidden_size
    block = spec.expert_tensor_name(layer, 0, "gate").split(".experts.")[0]
    yield f"{block}.gate.weight", (spec.num_experts, hidden)
    if config.get("topk_method") == "noaux_tc":
        yield f"{block}.gate.e_score_correction_bias", (spec.num_experts,)
    for expert in range(spec.num_experts):
        for proj in PROJS:
            yield spec.expert_tensor_name(layer, expert, proj), spec.expert_tensor_shape(proj)
    if shared := config.get("n_shared_experts"):
        width = shared * spec.expert_intermediate_size
        yield from _mlp_shapes(f"{block}.shared_experts", hidden, width)
    if width := config.get("shared_expert_intermediate_size"):
        yield from _mlp_shapes(f"{block}.shared_expert", hidden, width)
        yield f"{block}.shared_expert_gate.weight", (1, hidden)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token a byte, three special ones, and fillers that only decode."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= special | {f"<t{i}>": i for i in range(PAD + 1, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
