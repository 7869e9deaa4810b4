"""How a base's routed experts are quantised, and how its config.json says so.

    config.json -> [read_scheme] -> ExpertScheme -> quant/rounding.py (an adapter's experts),
                                                    expert tensor (which parts, how large)
    --to NAME -> [choose_scheme] -> ExpertScheme -> quant/write.py -> [settings_of] -> config.json

Pure: imports neither torch nor SGLang. Each scheme is one that SGLang 0.5.23 reads with a method of
its own, and that leaves every other linear layer as it is. Projections are [out, in], whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.model_spec import DTYPE_BYTES, MoeSpec, Proj
from sgl_esft.formats.strict_json import JsonObject, shown

SchemeName = Literal["int8", "fp8", "fp8-tensor", "int4"]
SCHEME_NAMES: Final[tuple[SchemeName, ...]] = get_args(SchemeName)
SUPPORTED_SCHEMES: Final = (
    "w8a8_int8; fp8 with dynamic activations, per tensor or in blocks; gptq of 4 bits, symmetric, "
    "without desc_act"
)

BLOCK: Final = 128  # DeepSeek's, in both directions
GROUP_SIZES: Final = (128, 64, 32)
"""Of int4, best first: SGLang's MoeWNA16Method takes none below 32."""
NIBBLES: Final = 8
"""Int4 values in one int32 of `qweight`."""

# moe_wna16 takes AWQ and GPTQ. Symmetric GPTQ has the cleaner experts: two tensors a projection, no
# zero points (AWQ's lie two outputs to a byte, so that no row stands alone), packed along the input
# in order, so that SGLang's loader only transposes. Its config can also be made without a GPU: that
# of AWQ compares a compute capability, and raises where there is none.
_GPTQ: Final = "gptq"
# It leaves modules out by `dynamic` alone, and asks it of linear layers alone: everything is left
# out but what holds routed experts, for readers that ask it of experts too. By re.match.
_ALL_BUT_EXPERTS: Final = r"-:(?!.*\.experts(\.|$)).*"

_IGNORE_KEYS: Final = ("ignore", "ignored_layers", "modules_to_not_convert")
# Of a decoder layer, as a checkpoint names them: the joined layer that SGLang makes of them. Its
# fp8 asks for the parts, its int8 sometimes for the one and sometimes for the others.
_JOINED: Final = {
    "q_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
}


@dataclass(frozen=True)
class ExpertPart:
    """One tensor of a quantised projection: `suffix` is in the place of ``weight`` in its name.

    `dtype` in torch's words, as in `TensorInfo`; the shape () is one number.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ExpertScheme:
    """What values of a projection [out, in] become.

    Those of `rows` by `columns` share a scale; 0 means all rows, or all columns. Value = number
    times scale, for int4 (number - 8) times scale. `scale_dtype` is the scales' in a checkpoint
    that `sgl-esft quantise` wrote; int4's are there in the base's, so that none is rounded twice.
    """

    name: SchemeName
    rows: int
    columns: int
    scale_dtype: str = "float32"

    def parts(self, shape: tuple[int, int]) -> tuple[ExpertPart, ExpertPart]:
        """Numbers and scales of a projection of this shape [out, in], in this order."""
        num_out, num_in = shape
        grid = (-(-num_out // (self.rows or num_out)), -(-num_in // (self.columns or num_in)))
        if self.name == "int4":  # transposed, eight along the input in one word
            numbers = ExpertPart("qweight", "int32", (num_in // NIBBLES, num_out))
            return numbers, ExpertPart("scales", self.scale_dtype, grid[::-1])
        dtype = "int8" if self.name == "int8" else "float8_e4m3fn"
        suffix = "weight_scale_inv" if self.name == "fp8" else "weight_scale"
        scale_shape = () if self.name == "fp8-tensor" else grid
        return ExpertPart("weight", dtype, shape), ExpertPart(suffix, self.scale_dtype, scale_shape)

    def partner(self, proj: Proj) -> Proj | None:
        """The projection of the same expert that has the same scale, if one has.

        SGLang's Fp8MoEMethod keeps one scale for gate and up: with two, it would round them anew.
        """
        pairs: dict[Proj, Proj] = {"gate": "up", "up": "gate"}
        return pairs.get(proj) if self.name == "fp8-tensor" else None


def choose_scheme(name: str, spec: MoeSpec, config: Mapping[str, object]) -> ExpertScheme:
    """The scheme of this name for an unquantised base.

    Raises ConfigError for an unknown name, UnsupportedModelError if SGLang could not read the
    base's experts in it.
    """
    _refuse_by_model(name, config)
    if name == "int8":
        return ExpertScheme("int8", 1, 0)
    if name == "fp8-tensor":
        return ExpertScheme("fp8-tensor", 0, 0)
    if name == "fp8":
        _divisor(name, spec, (BLOCK,))
        return ExpertScheme("fp8", BLOCK, BLOCK)
    if name == "int4":
        return ExpertScheme("int4", 1, _divisor(name, spec, GROUP_SIZES), spec.dtype)
    raise ConfigError(f"there is no scheme {name!r}: name one of {', '.join(SCHEME_NAMES)}.")


def _divisor(name: str, spec: MoeSpec, sizes: Collection[int]) -> int:
    """The first of `sizes` that divides both widths of an expert."""
    widths = (spec.hidden_size, spec.expert_intermediate_size)
    for size in sizes:
        if not any(width % size for width in widths):
            return size
    raise UnsupportedModelError(
        f"{name} needs both widths of an expert to be multiples of {' or '.join(map(str, sizes))}; "
        f"they are {widths[0]} and {widths[1]}. Choose int8 or fp8-tensor."
    )


def _refuse_by_model(name: str, config: Mapping[str, object]) -> None:
    """What SGLang has no woven layer for, or cannot load."""
    architectures = config.get("architectures")
    if name in ("int8", "int4") and architectures == ["MixtralForCausalLM"]:
        # get_model_architecture in model_loader/utils.py, by a list that has fp8 on it.
        raise UnsupportedModelError(
            f"SGLang serves a Mixtral in {name} by another class, QuantMixtralForCausalLM, whose "
            "experts are separate layers that cannot be woven. Choose fp8 or fp8-tensor."
        )
    if name == "int4" and config.get("q_lora_rank") is not None:
        # Under moe_wna16, DeepSeek's loader joins q_a_proj and kv_a_proj_with_mqa along the second
        # dimension, as AWQ's lie, which fails for weights; GPTQ's would fail in fused_a_gemm.py.
        raise UnsupportedModelError(
            f"the base has q_lora_rank {config['q_lora_rank']}, whose projections SGLang's "
            "moe_wna16 cannot load beside int4 experts. Choose int8, fp8 or fp8-tensor."
        )


def settings_of(scheme: ExpertScheme, linears: Collection[str] = ()) -> JsonObject:
    """The `quantization_config` that SGLang reads as this scheme for the routed experts alone.

    `linears`: every other linear layer, as `unquantised_linears` names them.
    """
    if scheme.name == "int4":
        return {
            "quant_method": _GPTQ,
            "bits": 4,
            "group_size": scheme.columns,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "dynamic": {_ALL_BUT_EXPERTS: {}},
        }
    settings: JsonObject = {"activation_scheme": "dynamic"}
    if scheme.name == "int8":
        return {"quant_method": "w8a8_int8", **settings, "bits": 8, "ignore": list(linears)}
    if scheme.name == "fp8":
        settings["weight_block_size"] = [scheme.rows, scheme.columns]
    return {"quant_method": "fp8", **settings, "modules_to_not_convert": list(linears)}


def unquantised_linears(modules: Collection[str]) -> list[str]:
    """What stands in an ignore list: modules within a decoder layer, and what SGLang joins them to.

    `modules`: such as ``self_attn.q_proj``, without the layer. SGLang compares whole parts of a
    dotted name, from its end (int8) or anywhere (fp8), so these match in every layer, and no
    embedding, attention kernel or routed expert.
    """
    joined = set()
    for module in modules:
        block, dot, leaf = module.rpartition(".")
        joined.add(f"{block}{dot}{_JOINED.get(leaf, leaf)}")
    return sorted({*modules, *joined})


def read_scheme(config: Mapping[str, object]) -> ExpertScheme | None:
    """How the experts of a base with this config.json are quantised; None: they are not.

    Raises UnsupportedModelError, naming what is supported, for everything else.
    """
    settings = config.get("quantization_config")
    if settings is None:
        if config.get("compression_config") is not None:
            raise _unsupported("config.json has compression_config")
        return None
    if not isinstance(settings, dict):
        raise _unsupported(f"config.json has quantization_config {shown(settings)}")
    method = settings.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _unsupported(f"config.json has quant_method {shown(method)}")
    _refuse_mixed_experts(settings)
    scheme = reader(settings, config)
    _refuse_by_model(scheme.name, config)
    return scheme


def _read_int8(settings: JsonObject, _: Mapping[str, object]) -> ExpertScheme:
    _require(settings, activation_scheme=(None, "dynamic"), bits=(None, 8))
    return ExpertScheme("int8", 1, 0)


def _read_fp8(settings: JsonObject, _: Mapping[str, object]) -> ExpertScheme:
    # ue8m0: scales that are powers of two, which an adapter's would have to be as well.
    _require(settings, activation_scheme=("dynamic",), scale_fmt=(None,))
    block = settings.get("weight_block_size")
    if block is None:
        return ExpertScheme("fp8-tensor", 0, 0)
    if block != [BLOCK, BLOCK]:
        raise _unsupported(f"config.json has weight_block_size {shown(block)}")
    return ExpertScheme("fp8", BLOCK, BLOCK)


def _read_gptq(settings: JsonObject, config: Mapping[str, object]) -> ExpertScheme:
    _require(
        settings,
        bits=(4,),
        sym=(True,),
        desc_act=(False,),
        group_size=GROUP_SIZES,
        checkpoint_format=(None, "", "gptq"),
    )
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(key.startswith("-:") for key in dynamic):
        raise _unsupported(f"config.json has dynamic {shown(dynamic)}")
    group = next(size for size in GROUP_SIZES if size == settings["group_size"])
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(
            f"config.json has dtype {dtype!r}, not one of {', '.join(DTYPE_BYTES)}."
        )
    return ExpertScheme("int4", 1, group, dtype)


_Reader = Callable[[JsonObject, Mapping[str, object]], ExpertScheme]
_READERS: Final[Mapping[str, _Reader]] = {
    "w8a8_int8": _read_int8,
    "fp8": _read_fp8,
    _GPTQ: _read_gptq,
}


def _require(settings: JsonObject, **allowed: tuple[object, ...]) -> None:
    for key, values in allowed.items():
        seen = settings.get(key)
        # By type too: to Python, 1 is True and 4.0 is 4.
        if not any(type(seen) is type(value) and seen == value for value in values):
            raise _unsupported(f"config.json has {key} {shown(seen)}")


def _refuse_mixed_experts(settings: JsonObject) -> None:
    """One scheme is for all routed experts: a list that leaves some of them out is refused."""
    for key in _IGNORE_KEYS:
        modules = settings.get(key) or []
        if not isinstance(modules, list):
            raise _unsupported(f"config.json has {key} {shown(modules)}")
        for module in modules:
            if "experts" in str(module).split("."):
                raise _unsupported(f"config.json leaves experts unquantised, {shown(module)}")


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what}. Supported are bases without quantisation, and {SUPPORTED_SCHEMES}."
    )
