"""Bytes of a base model's weights and of its KV cache, from its config.json alone.

    config.json -> MoeSpec -> [ModelSizes] -> plan.py

Counted tensor by tensor as the checkpoint stores them; no weight is read. Layers that a checkpoint
holds for speculative decoding only (DeepSeek-V3's multi-token prediction) are left out: SGLang
loads them for a draft model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import DTYPE_BYTES, PROJS, MoeSpec, read_moe_spec
from sgl_esft.formats.strict_json import read_object

Config = Mapping[str, object]

KV_DTYPE_BYTES: Final[Mapping[str, int]] = {**DTYPE_BYTES, "fp8_e5m2": 1, "fp8_e4m3": 1}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one whole copy of a base model, in bytes unless the name says otherwise."""

    spec: MoeSpec
    total_bytes: int  # all weights
    kv_elements_per_token: int  # over all layers
    vocab_size: int
    experts_per_token: int  # routed ones that a token visits in a layer
    derived_bytes: int = 0  # MLA's kv_b_proj once more, as SGLang splits it by head
    rotary_bytes: int = 0  # about as much as the table of positions takes

    @classmethod
    def from_config(cls, config: Config) -> ModelSizes:
        """Count a parsed config.json. Raises UnsupportedModelError."""
        spec = MoeSpec.from_config(config)
        attention, kv_elements = _attention(config, spec)
        num_moe = len(spec.moe_layer_ids)
        elements = (
            _embeddings(config, spec)
            + spec.num_layers * (attention + 2 * spec.hidden_size)
            + (spec.num_layers - num_moe) * _dense_mlp(config, spec)
            + num_moe * _moe_trunk(config, spec)
        )
        routed_bytes = num_moe * spec.num_experts * spec.expert_bytes
        return cls(
            spec=spec,
            total_bytes=elements * DTYPE_BYTES[spec.dtype] + routed_bytes,
            kv_elements_per_token=spec.num_layers * kv_elements,
            vocab_size=_int(config, "vocab_size"),
            experts_per_token=_int(config, "num_experts_per_tok"),
            derived_bytes=spec.num_layers * _split_by_head(config, spec) * DTYPE_BYTES[spec.dtype],
            rotary_bytes=_int(config, "max_position_embeddings", 0) * _rotary(config, spec) * 4,
        )

    @property
    def routed_bytes(self) -> int:
        """Of all weights, the routed experts'."""
        return len(self.spec.moe_layer_ids) * self.spec.num_experts * self.spec.expert_bytes

    @property
    def trunk_bytes(self) -> int:
        """All weights but the routed experts'."""
        return self.total_bytes - self.routed_bytes

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """One expert in the two large tensors of a layer: w13 (gate and up together) and w2."""
        gate, up, down = (self.spec.expert_parts(proj)[0].num_bytes for proj in PROJS)
        return (gate + up, down)

    @property
    def scale_bytes(self) -> int:
        """One expert's scales, which have memory for every slot; 0 where nothing is quantised."""
        return self.spec.expert_bytes - sum(self.slot_bytes)

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """Bytes of one token's KV cache in all layers; None means the checkpoint's dtype."""
        name = kv_dtype or self.spec.dtype
        if name not in KV_DTYPE_BYTES:
            raise ConfigError(f"--kv-dtype is {name!r}, not one of {', '.join(KV_DTYPE_BYTES)}.")
        return self.kv_elements_per_token * KV_DTYPE_BYTES[name]


def read_model_sizes(path: Path) -> ModelSizes:
    """Count a checkpoint folder or a config.json. Raises UnsupportedModelError."""
    if path.is_dir():
        read_moe_spec(path)  # also refuses a quantisation that only the folder shows
        path = path / "config.json"
    return ModelSizes.from_config(read_object(path, UnsupportedModelError))


def _embeddings(config: Config, spec: MoeSpec) -> int:
    """Embedding, head and the last norm."""
    copies = 1 if config.get("tie_word_embeddings") else 2
    return copies * _int(config, "vocab_size") * spec.hidden_size + spec.hidden_size


def _attention(config: Config, spec: MoeSpec) -> tuple[int, int]:
    """Elements of one layer's attention: (weights, KV of one token)."""
    if spec.architecture.startswith("Deepseek"):
        return _latent_attention(config, spec.hidden_size)
    return _grouped_attention(config, spec)


def _latent_attention(config: Config, hidden: int) -> tuple[int, int]:
    """MLA: the cache holds the compressed latent and the rotary part of the key."""
    heads, value = _int(config, "num_attention_heads"), _int(config, "v_head_dim")
    nope, rope = _int(config, "qk_nope_head_dim"), _int(config, "qk_rope_head_dim")
    rank, q_rank = _int(config, "kv_lora_rank"), _int(config, "q_lora_rank", 0)
    query = heads * (nope + rope)
    weights = (
        (q_rank * (hidden + 1 + query) if q_rank else hidden * query)
        + hidden * (rank + rope)
        + rank * (1 + heads * (nope + value))
        + heads * value * hidden
    )
    if config.get("attention_bias"):
        weights += q_rank + rank + rope + hidden
    return weights, rank + rope


def _split_by_head(config: Config, spec: MoeSpec) -> int:
    if not spec.architecture.startswith("Deepseek"):
        return 0
    width = _int(config, "qk_nope_head_dim") + _int(config, "v_head_dim")
    return _int(config, "kv_lora_rank") * _int(config, "num_attention_heads") * width


def _rotary(config: Config, spec: MoeSpec) -> int:
    """Dimensions of a key that carry its position."""
    if spec.architecture.startswith("Deepseek"):
        return _int(config, "qk_rope_head_dim")
    heads = max(_int(config, "num_attention_heads"), 1)
    return _int(config, "head_dim", spec.hidden_size // heads)


def _grouped_attention(config: Config, spec: MoeSpec) -> tuple[int, int]:
    hidden, heads = spec.hidden_size, _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads", heads)
    head_dim = _int(config, "head_dim", hidden // max(heads, 1))
    query_key_value = (heads + 2 * kv_heads) * head_dim
    weights = hidden * (query_key_value + heads * head_dim)
    match spec.architecture:
        case "Qwen2MoeForCausalLM" if config.get("qkv_bias", True):
            weights += query_key_value
        case "Qwen3MoeForCausalLM":
            weights += 2 * head_dim  # norms of query and key
            weights += query_key_value + hidden if config.get("attention_bias") else 0
    return weights, 2 * kv_heads * head_dim


def _dense_mlp(config: Config, spec: MoeSpec) -> int:
    if spec.num_layers == len(spec.moe_layer_ids):
        return 0
    return 3 * spec.hidden_size * _int(config, "intermediate_size")


def _moe_trunk(config: Config, spec: MoeSpec) -> int:
    """Router and shared experts of one MoE layer."""
    hidden = spec.hidden_size
    router = spec.num_experts * (hidden + (config.get("topk_method") == "noaux_tc"))
    if spec.architecture.startswith("Deepseek"):
        width = _int(config, "n_shared_experts", 0) * spec.expert_intermediate_size
        return router + 3 * hidden * width
    if spec.architecture == "Qwen2MoeForCausalLM":
        width = _int(config, "shared_expert_intermediate_size")
        return router + 3 * hidden * width + hidden  # the last: the gate of it
    return router


def _int(config: Config, key: str, default: int | None = None) -> int:
    """A count in the config; `default` where it is missing or null. Zero only if that is 0."""
    value = config.get(key)
    value = default if value is None else value
    minimum = 0 if default == 0 else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UnsupportedModelError(
            f"config.json has {key} = {value!r}, not an integer of at least {minimum}."
        )
    return value
