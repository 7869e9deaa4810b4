"""Which linear layers of a base model a LoRA adapter may change, and their shapes.

    config.json -> [targets_of] -> LoraTargets -> lora_manifest.py: does this adapter fit?
                                               -> the ranks: which layers take LoRA, how large

A checkpoint stores projections apart (q, k, v) that SGLang computes as one layer, so a module here
has parts. The sizes are those of SGLang 0.5.23's model files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import MoeSpec

_QKV: Final = ("q_proj", "k_proj", "v_proj")
# transformers' attribute that only some families' attention follows; others divide.
_OWN_HEAD_DIM: Final = frozenset({"Qwen3MoeForCausalLM"})


@dataclass(frozen=True)
class LoraPart:
    """One projection as checkpoints name it within a layer, such as ``self_attn.q_proj``."""

    name: str
    out_features: int

    @property
    def target(self) -> str:
        """What an adapter_config.json calls it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class LoraModule:
    """One linear layer of SGLang's: its parts' outputs lie behind each other, in this order."""

    layer_id: int
    name: str  # within the layer, such as "self_attn.qkv_proj"
    in_features: int
    parts: tuple[LoraPart, ...]

    @property
    def path(self) -> str:
        """Its name in SGLang's model."""
        return f"model.layers.{self.layer_id}.{self.name}"

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True)
class LoraTargets:
    """All layers of a model that LoRA adapters may change."""

    modules: tuple[LoraModule, ...]

    @cached_property
    def by_projection(self) -> Mapping[str, tuple[LoraModule, int]]:
        """``model.layers.0.self_attn.q_proj`` -> its module, and which part of it."""
        return {
            f"model.layers.{module.layer_id}.{part.name}": (module, place)
            for module in self.modules
            for place, part in enumerate(module.parts)
        }

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What an adapter_config.json may list, sorted."""
        return tuple(sorted({part.target for module in self.modules for part in module.parts}))

    def only(self, names: Collection[str]) -> LoraTargets:
        """The modules with one of these projections. Raises ConfigError for an unknown one."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise ConfigError(
                f"--lora-target-modules {' '.join(unknown)}: this model's are "
                f"{' '.join(self.names)} (experts, router, embeddings and head take no LoRA here)"
            )
        wanted = set(names)
        return LoraTargets(
            tuple(m for m in self.modules if wanted.intersection(p.target for p in m.parts))
        )

    def num_bytes(self, rank: int, item_bytes: int) -> int:
        """Of one adapter's room on the device, all ranks together."""
        values = (rank * (len(m.parts) * m.in_features + m.out_features) for m in self.modules)
        return sum(values) * item_bytes


def targets_of(config: Mapping[str, object]) -> LoraTargets:
    """Of a parsed config.json. Raises UnsupportedModelError."""
    return LoraTargets(tuple(_modules(_Sizes(config), MoeSpec.from_config(config))))


class _Sizes:
    """Whole numbers of a config.json."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def __getitem__(self, key: str) -> int:
        value = self.get(key)
        if not value:
            raise UnsupportedModelError(f"config.json has no {key}, which LoRA's layers depend on")
        return value

    def get(self, key: str) -> int:
        """0 where there is none."""
        value = self._config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _modules(sizes: _Sizes, spec: MoeSpec) -> Iterator[LoraModule]:
    is_mla = bool(sizes.get("kv_lora_rank"))
    for layer in range(spec.num_layers):
        yield from (_mla if is_mla else _gqa)(sizes, spec, layer)
        if layer not in spec.moe_layer_ids:
            yield from _mlp(layer, "mlp", spec.hidden_size, sizes["intermediate_size"])
        elif num_shared := sizes.get("n_shared_experts"):
            width = num_shared * spec.expert_intermediate_size
            yield from _mlp(layer, "mlp.shared_experts", spec.hidden_size, width)
        elif width := sizes.get("shared_expert_intermediate_size"):
            yield from _mlp(layer, "mlp.shared_expert", spec.hidden_size, width)


def _gqa(sizes: _Sizes, spec: MoeSpec, layer: int) -> Iterator[LoraModule]:
    heads, hidden = sizes["num_attention_heads"], spec.hidden_size
    own = sizes.get("head_dim") if spec.architecture in _OWN_HEAD_DIM else 0
    head_dim = own or hidden // heads
    kv_heads = sizes.get("num_key_value_heads") or heads
    outs = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    parts = tuple(LoraPart(f"self_attn.{name}", n) for name, n in zip(_QKV, outs, strict=True))
    yield LoraModule(layer, "self_attn.qkv_proj", hidden, parts)
    yield _single(layer, "self_attn.o_proj", heads * head_dim, hidden)


def _mla(sizes: _Sizes, spec: MoeSpec, layer: int) -> Iterator[LoraModule]:
    heads, hidden = sizes["num_attention_heads"], spec.hidden_size
    nope, rope = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    kv_rank, value = sizes["kv_lora_rank"], sizes["v_head_dim"]
    kv_a = LoraPart("self_attn.kv_a_proj_with_mqa", kv_rank + rope)
    if q_rank := sizes.get("q_lora_rank"):
        parts = (LoraPart("self_attn.q_a_proj", q_rank), kv_a)
        yield LoraModule(layer, "self_attn.fused_qkv_a_proj_with_mqa", hidden, parts)
        yield _single(layer, "self_attn.q_b_proj", q_rank, heads * (nope + rope))
    else:
        yield _single(layer, "self_attn.q_proj", hidden, heads * (nope + rope))
        yield LoraModule(layer, kv_a.name, hidden, (kv_a,))
    yield _single(layer, "self_attn.kv_b_proj", kv_rank, heads * (nope + value))
    yield _single(layer, "self_attn.o_proj", heads * value, hidden)


def _mlp(layer: int, block: str, hidden: int, width: int) -> Iterator[LoraModule]:
    parts = (LoraPart(f"{block}.gate_proj", width), LoraPart(f"{block}.up_proj", width))
    yield LoraModule(layer, f"{block}.gate_up_proj", hidden, parts)
    yield _single(layer, f"{block}.down_proj", width, hidden)


def _single(layer: int, name: str, in_features: int, out_features: int) -> LoraModule:
    return LoraModule(layer, name, in_features, (LoraPart(name, out_features),))
