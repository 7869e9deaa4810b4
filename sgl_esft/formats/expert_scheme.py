"""How a base's routed experts are quantised, and how its config.json says so.

    config.json -> [read_scheme] -> ExpertScheme -> model_spec.py, manifest.py (which tensors),
                                                    quant/rounding.py (an adapter's experts),
                                                    expert tensor (which parts, how large)

Pure: imports neither torch nor SGLang. Each scheme is one that SGLang 0.5.23 reads with a method of
its own, and that leaves every other linear layer as it is. Projections are [out, in], whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.safetensors_header import ITEM_BYTES
from sgl_esft.formats.strict_json import JsonObject, shown

Proj = Literal["gate", "up", "down"]
PROJS: Final[tuple[Proj, ...]] = get_args(Proj)
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of weights that are not quantised."""

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
GPTQ: Final = "gptq"

_IGNORE_KEYS: Final = ("ignore", "ignored_layers", "modules_to_not_convert")


@dataclass(frozen=True)
class ExpertPart:
    """One tensor of a quantised projection: `suffix` is in the place of ``weight`` in its name.

    `dtype` in torch's words, as in `TensorInfo`; the shape () is one number.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


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

    @property
    def label(self) -> str:
        """Name and numbers, for a file's name and for messages: two that differ differ in it."""
        numbers = {
            "fp8": f"-{self.rows}x{self.columns}",
            "int4": f"-{self.columns}-{self.scale_dtype}",
        }
        return self.name + numbers.get(self.name, "")

    def partner(self, proj: Proj) -> Proj | None:
        """The projection of the same expert that has the same scale, if one has.

        SGLang's Fp8MoEMethod keeps one scale for gate and up: with two, it would round them anew.
        """
        pairs: dict[Proj, Proj] = {"gate": "up", "up": "gate"}
        return pairs.get(proj) if self.name == "fp8-tensor" else None


def refuse_by_model(name: str, config: Mapping[str, object]) -> None:
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
    refuse_by_model(scheme.name, config)
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
    GPTQ: _read_gptq,
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
