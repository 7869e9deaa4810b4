"""What the base checkpoint's config.json says about its routed experts.

    config.json -> [MoeSpec] -> manifest.py (does this adapter fit?)
                             -> merge, extract (which tensors are routed experts?)
                             -> expert tensor (how many, how large?)
      how they are quantised: expert_scheme.py

Pure: reads one JSON file, imports neither torch nor transformers nor SGLang. The rules are those
of SGLang 0.5.23's model files, not those of transformers, where the two differ: SGLang builds
every layer of a Qwen MoE as an MoE layer whatever `decoder_sparse_step` and `mlp_only_layers`
say, so a config that asks for a dense layer would be served with untouched random experts. Such
a config is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.expert_scheme import (
    DTYPE_BYTES,
    PROJS,
    ExpertPart,
    ExpertScheme,
    Proj,
    read_scheme,
)
from sgl_esft.formats.strict_json import read_object

__all__ = [
    "DTYPE_BYTES",
    "PROJS",
    "SUPPORTED",
    "ExpertTensorKey",
    "MoeSpec",
    "Proj",
    "SharedTensorKey",
    "expert_keys",
    "read_moe_spec",
    "refuse_quantised",
]

ExpertTensorKey: TypeAlias = tuple[int, int, Proj]
"""Layer id, expert id, projection."""

SharedTensorKey: TypeAlias = tuple[int, Proj]
"""Layer id, projection: of the layer's shared experts."""


@dataclass(frozen=True)
class _TensorNames:
    """How one family of checkpoints names a routed expert's three tensors."""

    block: str
    gate: str
    up: str
    down: str


_WEIGHT: Final = "weight"
_MLP_NAMES = _TensorNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = _TensorNames("block_sparse_moe", "w1", "w3", "w2")


@dataclass(frozen=True)
class MoeSpec:
    """Shape of a base model's routed experts, as its checkpoint stores them.

    `num_layers` counts all decoder layers; `moe_layer_ids` (ascending) are those with routed
    experts, each with `num_experts` of them. `dtype` is that of the weights that are not quantised
    ("float32", "bfloat16" or "float16"), which a server may still cast when it loads. `scheme` is
    how the routed experts are quantised; None: they are in `dtype` as well. A layer's shared
    experts are one MLP, `shared_intermediate_size` wide; 0: there are none.
    """

    architecture: str
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    hidden_size: int
    expert_intermediate_size: int
    dtype: str
    scheme: ExpertScheme | None = None
    shared_intermediate_size: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> MoeSpec:
        """Read a parsed config.json. Raises UnsupportedModelError, naming what is supported."""
        architecture = _architecture(config)
        scheme = read_scheme(config)
        family = _FAMILIES[architecture]
        num_layers = _positive_int(config, "num_hidden_layers")
        spec = cls(
            architecture=architecture,
            num_layers=num_layers,
            moe_layer_ids=family.moe_layer_ids(config, num_layers),
            num_experts=_positive_int(config, *family.num_experts_keys),
            hidden_size=_positive_int(config, "hidden_size"),
            expert_intermediate_size=_positive_int(config, family.intermediate_size_key),
            dtype=_dtype(config),
            scheme=scheme,
            shared_intermediate_size=family.shared_width(config),
        )
        _check_widths(spec)
        return spec

    def expert_tensor_name(self, layer_id: int, expert_id: int, proj: Proj) -> str:
        """Checkpoint name, e.g. ``model.layers.1.mlp.experts.0.gate_proj.weight``.

        Ids are not range-checked: validation asks for names of ids it has already checked.
        """
        names = _FAMILIES[self.architecture].names
        leaf: str = getattr(names, proj)
        return f"model.layers.{layer_id}.{names.block}.experts.{expert_id}.{leaf}.weight"

    def expert_tensor_shape(self, proj: Proj) -> tuple[int, int]:
        """``(I, H)`` for gate and up, ``(H, I)`` for down: [out, in], whole, not TP-sliced."""
        return self._shape(self.expert_intermediate_size, proj)

    def shared_tensor_name(self, layer_id: int, proj: Proj) -> str:
        """Checkpoint name, e.g. ``model.layers.1.mlp.shared_experts.gate_proj.weight``."""
        family = _FAMILIES[self.architecture]
        leaf: str = getattr(family.names, proj)
        return f"model.layers.{layer_id}.{family.names.block}.{family.shared_name}.{leaf}.weight"

    def shared_part(self, proj: Proj) -> ExpertPart:
        """What a projection of a layer's shared experts is stored as, where none is quantised."""
        return ExpertPart(_WEIGHT, self.dtype, self._shape(self.shared_intermediate_size, proj))

    def _shape(self, width: int, proj: Proj) -> tuple[int, int]:
        if proj == "down":
            return (self.hidden_size, width)
        return (width, self.hidden_size)

    def expert_parts(self, proj: Proj) -> tuple[ExpertPart, ...]:
        """What a projection is stored as: its weight or, quantised, numbers and then scales."""
        shape = self.expert_tensor_shape(proj)
        if self.scheme is None:
            return (ExpertPart(_WEIGHT, self.dtype, shape),)
        return self.scheme.parts(shape)

    def expert_part_name(self, key: ExpertTensorKey, part: ExpertPart) -> str:
        """Checkpoint name, e.g. ``model.layers.1.mlp.experts.0.gate_proj.weight_scale``."""
        return self.expert_tensor_name(*key).removesuffix(_WEIGHT) + part.suffix

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as the checkpoint stores it: gate, up and down, and scales."""
        return sum(part.num_bytes for proj in PROJS for part in self.expert_parts(proj))


def expert_keys(experts: Mapping[int, Collection[int]]) -> Iterator[ExpertTensorKey]:
    """The tensors of these experts (layer id -> expert ids), in the order of a file to write."""
    for layer, ids in experts.items():
        for expert in ids:
            for proj in PROJS:
                yield layer, expert, proj


def read_moe_spec(model_dir: Path) -> MoeSpec:
    """Read ``model_dir/config.json``. Raises UnsupportedModelError, also for an unreadable one."""
    if not (model_dir / "config.json").exists():
        raise UnsupportedModelError(
            f"{model_dir} holds no config.json. Name the folder of a Hugging Face checkpoint."
        )
    if (model_dir / "hf_quant_config.json").exists():
        raise UnsupportedModelError(
            f"{model_dir} holds hf_quant_config.json: it is quantised (modelopt). "
            "Use its unquantised weights, or a base that `sgl-esft quantise` made of them."
        )
    return MoeSpec.from_config(read_object(model_dir / "config.json", UnsupportedModelError))


def refuse_quantised(spec: MoeSpec, what: str, but: Collection[str] = ()) -> None:
    """Raises UnsupportedModelError for a base whose experts are quantised.

    what: what was not shown for it, as the subject of a sentence. but: schemes that it was shown
    for, by their names.
    """
    if spec.scheme is not None and spec.scheme.name not in but:
        others = f", or one in {', '.join(sorted(but))}" if but else ""
        raise UnsupportedModelError(
            f"{what} cannot be used with a quantised base, whose routed experts are in "
            f"{spec.scheme.label}: name the unquantised base that it was made of{others}."
        )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in _FAMILIES:
        raise UnsupportedModelError(
            f"architecture {name!r} cannot be woven. Supported: {', '.join(SUPPORTED)}."
        )
    return name


def _check_widths(spec: MoeSpec) -> None:
    """Scales of blocks that are cut at an edge: SGLang loads none."""
    block = max(spec.scheme.rows, spec.scheme.columns) if spec.scheme else 0
    widths = (spec.hidden_size, spec.expert_intermediate_size)
    if block and any(width % block for width in widths):
        raise UnsupportedModelError(
            f"config.json has experts in blocks of {block}, of which their widths, {widths[0]} and "
            f"{widths[1]}, are no multiples: SGLang cannot load them."
        )


def _dtype(config: Mapping[str, object]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype")
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
        if dtype in DTYPE_BYTES:
            return dtype
    raise UnsupportedModelError(
        f"config.json has dtype {dtype!r}. "
        f"Set `dtype` to the checkpoint's own, one of {', '.join(DTYPE_BYTES)}."
    )


def _positive_int(config: Mapping[str, object], *keys: str) -> int:
    """The first of `keys` that is there; several keys are names of one thing."""
    return _int_at_least(config, 1, *keys)


def _int_at_least(config: Mapping[str, object], minimum: int, *keys: str) -> int:
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UnsupportedModelError(
            f"config.json has {key} = {value!r}, not an integer of at least {minimum}."
        )
    return value


def _deepseek_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    first = _int_at_least(config, 0, "first_k_dense_replace")
    # Absent from configs that transformers wrote; it has no such setting and means 1.
    step = _positive_int({"moe_layer_freq": 1, **config}, "moe_layer_freq")
    layers = tuple(layer for layer in range(first, num_layers) if layer % step == 0)
    if not layers:
        raise UnsupportedModelError(
            f"config.json leaves no MoE layer: num_hidden_layers {num_layers}, "
            f"first_k_dense_replace {first}, moe_layer_freq {step}."
        )
    return layers


def _qwen_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    step = _positive_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise UnsupportedModelError(
            f"config.json makes some layers dense (decoder_sparse_step {step}, mlp_only_layers "
            f"{dense}), but SGLang gives every layer of this architecture routed experts. "
            "Only decoder_sparse_step 1 with empty mlp_only_layers is supported."
        )
    return tuple(range(num_layers))


def _deepseek_shared_width(config: Mapping[str, object]) -> int:
    if config.get("n_shared_experts") is None:
        return 0
    number = _int_at_least(config, 0, "n_shared_experts")
    return number * _positive_int(config, "moe_intermediate_size")


def _qwen2_shared_width(config: Mapping[str, object]) -> int:
    if config.get("shared_expert_intermediate_size") is None:
        return 0
    return _int_at_least(config, 0, "shared_expert_intermediate_size")


@dataclass(frozen=True)
class _Family:
    """Where one architecture's config.json keeps what `MoeSpec` needs."""

    names: _TensorNames
    num_experts_keys: tuple[str, ...]
    intermediate_size_key: str
    moe_layer_ids: Callable[[Mapping[str, object], int], tuple[int, ...]]
    shared_name: str = "shared_experts"
    shared_width: Callable[[Mapping[str, object]], int] = lambda _: 0


_DEEPSEEK = _Family(
    _MLP_NAMES,
    ("n_routed_experts",),
    "moe_intermediate_size",
    _deepseek_layers,
    shared_width=_deepseek_shared_width,
)
# transformers 5 saves a Qwen3-MoE's `num_experts` as `num_local_experts`.
_QWEN = _Family(
    _MLP_NAMES, ("num_experts", "num_local_experts"), "moe_intermediate_size", _qwen_layers
)
_QWEN2 = replace(_QWEN, shared_name="shared_expert", shared_width=_qwen2_shared_width)
_MIXTRAL = _Family(
    _MIXTRAL_NAMES, ("num_local_experts",), "intermediate_size", lambda _, n: tuple(range(n))
)

_FAMILIES: Final[Mapping[str, _Family]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Qwen3MoeForCausalLM": _QWEN,
    "Qwen2MoeForCausalLM": _QWEN2,
    "MixtralForCausalLM": _MIXTRAL,
}
SUPPORTED: Final[tuple[str, ...]] = tuple(_FAMILIES)
