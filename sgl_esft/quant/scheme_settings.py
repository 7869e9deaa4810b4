"""Which scheme a base gets that is to be quantised, and what its config.json then says.

    --to NAME -> [choose_scheme] -> ExpertScheme -> write.py -> [settings_of] -> config.json

The other way, from a config.json to its scheme, is formats/expert_scheme.py's. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.expert_scheme import (
    BLOCK,
    GPTQ,
    GROUP_SIZES,
    SCHEME_NAMES,
    ExpertScheme,
    refuse_by_model,
)
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.formats.strict_json import JsonObject

# It leaves modules out by `dynamic` alone, and asks it of linear layers alone: everything is left
# out but what holds routed experts, for readers that ask it of experts too. By re.match.
_ALL_BUT_EXPERTS: Final = r"-:(?!.*\.experts(\.|$)).*"

# Of a decoder layer, as a checkpoint names them: the joined layer that SGLang makes of them. Its
# fp8 asks for the parts, its int8 sometimes for the one and sometimes for the others.
_JOINED: Final = {
    "q_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
}


def choose_scheme(name: str, spec: MoeSpec, config: Mapping[str, object]) -> ExpertScheme:
    """The scheme of this name for an unquantised base.

    Raises ConfigError for an unknown name, UnsupportedModelError if SGLang could not read the
    base's experts in it.
    """
    refuse_by_model(name, config)
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


def settings_of(scheme: ExpertScheme, linears: Collection[str] = ()) -> JsonObject:
    """The `quantization_config` that SGLang reads as this scheme for the routed experts alone.

    `linears`: every other linear layer, as `unquantised_linears` names them.
    """
    if scheme.name == "int4":
        return {
            "quant_method": GPTQ,
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
