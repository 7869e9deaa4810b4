"""Which schemes there are, what each makes of a projection, and what config.json says of it."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.formats.expert_scheme import (
    SCHEME_NAMES,
    ExpertPart,
    ExpertScheme,
    read_scheme,
)
from sgl_esft.formats.model_spec import MoeSpec, Proj
from sgl_esft.quant.scheme_settings import choose_scheme, settings_of, unquantised_linears

INT8 = ExpertScheme("int8", 1, 0)
FP8 = ExpertScheme("fp8", 128, 128)
FP8_TENSOR = ExpertScheme("fp8-tensor", 0, 0)
INT4 = ExpertScheme("int4", 1, 64, "bfloat16")
INT4_OF_128 = ExpertScheme("int4", 1, 128, "bfloat16")
SCHEMES = (INT8, FP8, FP8_TENSOR, INT4)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def spec(hidden: int = 256, width: int = 384, dtype: str = "bfloat16") -> MoeSpec:
    return MoeSpec("Qwen3MoeForCausalLM", 2, (0, 1), 4, hidden, width, dtype)


def config(settings: object, **more: Any) -> dict[str, Any]:
    return {"dtype": "bfloat16", "quantization_config": settings, **more}


@pytest.mark.parametrize(
    ("scheme", "numbers", "scales"),
    [
        (INT8, ("weight", "int8", (192, 256)), ("weight_scale", "float32", (192, 1))),
        (FP8, ("weight", "float8_e4m3fn", (192, 256)), ("weight_scale_inv", "float32", (2, 2))),
        (FP8_TENSOR, ("weight", "float8_e4m3fn", (192, 256)), ("weight_scale", "float32", ())),
        (INT4, ("qweight", "int32", (32, 192)), ("scales", "bfloat16", (4, 192))),
    ],
)
def test_parts_of_a_projection(scheme: ExpertScheme, numbers: Any, scales: Any) -> None:
    assert scheme.parts((192, 256)) == (ExpertPart(*numbers), ExpertPart(*scales))


def test_only_gate_and_up_of_one_scale_share_it() -> None:
    shared = {proj: FP8_TENSOR.partner(proj) for proj in get_args(Proj)}
    assert shared == {"gate": "up", "up": "gate", "down": None}
    assert not any(s.partner(p) for s in (INT8, FP8, INT4) for p in get_args(Proj))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_what_is_written_is_read(scheme: ExpertScheme) -> None:
    settings = json.loads(json.dumps(settings_of(scheme, ["self_attn.o_proj", "mlp.gate"])))
    assert read_scheme(config(settings)) == scheme


def test_a_base_without_quantisation() -> None:
    assert read_scheme({"dtype": "bfloat16"}) is None
    assert read_scheme(config(None)) is None


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (DEEPSEEK_V3, FP8),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, FP8_TENSOR),
        (
            {**GPTQ, "damp_percent": 0.01, "true_sequential": True},
            ExpertScheme("int4", 1, 128, "bfloat16"),
        ),
        ({"quant_method": "w8a8_int8", "activation_scheme": "dynamic"}, INT8),
    ],
)
def test_what_others_publish(settings: dict[str, Any], scheme: ExpertScheme) -> None:
    assert read_scheme(config(settings)) == scheme


def test_the_scales_of_int4_are_in_the_bases_type() -> None:
    found = read_scheme({"torch_dtype": "torch.float16", "quantization_config": GPTQ})
    assert found is not None
    assert found.scale_dtype == "float16"
    with pytest.raises(UnsupportedModelError, match="dtype 'float64', not one of float32"):
        read_scheme({"dtype": "float64", "quantization_config": GPTQ})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("fp8", "quantization_config 'fp8'"),
        ({}, "quant_method None"),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({"quant_method": "w8a8_int8", "bits": 4}, "bits 4"),
        (
            {"quant_method": "w8a8_int8", "activation_scheme": "static"},
            "activation_scheme 'static'",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "fp8"}, "activation_scheme None"),
        ({**DEEPSEEK_V3, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({**DEEPSEEK_V3, "weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        ({**GPTQ, "bits": 8}, "bits 8"),
        ({**GPTQ, "bits": 4.0}, "bits 4.0"),
        ({**GPTQ, "sym": False}, "sym False"),
        ({**GPTQ, "sym": 1}, "sym 1"),
        ({**GPTQ, "desc_act": True}, "desc_act True"),
        ({**GPTQ, "group_size": -1}, "group_size -1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "dynamic": "-:.*"}, "dynamic '-:"),
        ({**DEEPSEEK_V3, "modules_to_not_convert": ["model.layers.0.mlp.experts"]}, "experts unq"),
        ({**DEEPSEEK_V3, "ignored_layers": "mlp"}, "ignored_layers 'mlp'"),
        ({"quant_method": "w8a8_int8", "ignore": ["mlp.experts.0.up_proj"]}, "experts unq"),
    ],
)
def test_what_is_not_known_is_named_with_what_is(settings: object, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_scheme(config(settings))
    assert "Supported are" in str(caught.value)


def test_another_key_of_quantisation() -> None:
    with pytest.raises(UnsupportedModelError, match="compression_config"):
        read_scheme({"compression_config": {"format": "int-quantized"}})


@pytest.mark.parametrize(
    ("hidden", "width", "group"),
    [(256, 384, 128), (128, 192, 64), (160, 96, 32), (2048, 1408, 128)],
)
def test_int4_takes_the_largest_group_that_divides_both_widths(
    hidden: int, width: int, group: int
) -> None:
    found = choose_scheme("int4", spec(hidden, width, "float16"), {})
    assert found == ExpertScheme("int4", 1, group, "float16")


def test_the_other_schemes() -> None:
    assert [choose_scheme(name, spec(), {}) for name in SCHEME_NAMES[:3]] == [INT8, FP8, FP8_TENSOR]


@pytest.mark.parametrize(
    ("name", "hidden", "width", "message"),
    [
        ("int4", 128, 200, "multiples of 128 or 64 or 32; they are 128 and 200"),
        ("int4", 48, 128, "they are 48 and 128"),
        ("fp8", 128, 192, "multiples of 128; they are 128 and 192"),
        ("fp8", 192, 128, "they are 192 and 128"),
    ],
)
def test_widths_that_no_group_divides(name: str, hidden: int, width: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} needs .*{message}"):
        choose_scheme(name, spec(hidden, width), {})
    assert choose_scheme("int8", spec(hidden, width), {}) == INT8


MIXTRAL = {"architectures": ["MixtralForCausalLM"]}


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("int4", {"q_lora_rank": 1536}, "q_lora_rank 1536"),
        ("int8", MIXTRAL, "QuantMixtralForCausalLM"),
        ("int4", MIXTRAL, "QuantMixtralForCausalLM"),
    ],
)
def test_models_that_sglang_cannot_weave_in_a_scheme(
    name: str, model: dict[str, Any], message: str
) -> None:
    """Neither is such a base written, nor read where somebody else wrote it."""
    with pytest.raises(UnsupportedModelError, match=message):
        choose_scheme(name, spec(), model)
    scheme = choose_scheme(name, spec(), {})
    with pytest.raises(UnsupportedModelError, match=message):
        read_scheme(config(settings_of(scheme), **model))
    assert choose_scheme("fp8", spec(), model) == read_scheme(config(DEEPSEEK_V3, **model)) == FP8


def test_deepseek_v2_lite_has_no_rank() -> None:
    assert choose_scheme("int4", spec(), {"q_lora_rank": None}).name == "int4"


def test_a_scheme_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="no scheme 'int3': name one of int8, fp8, fp8-tensor"):
        choose_scheme("int3", spec(), {})


def test_ignore_lists_name_parts_and_what_they_are_joined_to() -> None:
    found = unquantised_linears(["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "fc"])
    assert found == [
        "fc",
        "mlp.gate_proj",
        "mlp.gate_up_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.qkv_proj",
    ]
