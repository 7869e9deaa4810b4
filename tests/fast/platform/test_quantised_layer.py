"""SGLang's MoE layer over quantised checkpoints, on the CPU platform, against float64.

`quantised_layer.py` builds and runs the layers, in a process of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sgl_esft.formats.expert_scheme import SCHEME_NAMES
from sgl_esft.quant.write import quantise_checkpoint
from tests.support.base_factory import write_random_base
from tests.support.processes import run_module

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, WIDTH, EXPERTS = 128, 256, 4
METHODS = {
    "int8": "W8A8Int8MoEMethod",
    "fp8": "Fp8MoEMethod",
    "fp8-tensor": "Fp8MoEMethod",
    "int4": "MoeWNA16Method",
}
SHAPES = {
    "int8": {"w13_weight_scale": [EXPERTS, 2 * WIDTH, 1], "w2_weight_scale": [EXPERTS, HIDDEN, 1]},
    "fp8": {"w13_weight_scale_inv": [EXPERTS, 4, 1], "w2_weight_scale_inv": [EXPERTS, 1, 2]},
    "fp8-tensor": {"w13_weight_scale": [EXPERTS], "w2_weight_scale": [EXPERTS]},
    "int4": {"w13_scales": [EXPERTS, 2 * WIDTH, 1], "w2_scales": [EXPERTS, HIDDEN, 2]},
}
# Of a token's output, relative; what dtypes round is 2^-9 and 2^-12 each time.
BOUNDS = {"bfloat16": 2**-7, "float16": 2**-10}
each_layer = pytest.mark.parametrize(
    ("scheme", "dtype"), [(scheme, dtype) for scheme in SCHEME_NAMES for dtype in BOUNDS]
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("layers")
    quantised: list[Path] = []
    for dtype in BOUNDS:
        base = write_random_base(
            folder / dtype / "base",
            "DeepseekV2ForCausalLM",
            seed=1,
            dtype=dtype,
            hidden_size=HIDDEN,
            moe_intermediate_size=WIDTH,
            n_routed_experts=EXPERTS,
            num_hidden_layers=2,
        )
        for scheme in SCHEME_NAMES:
            quantised.append(folder / dtype / scheme)
            quantise_checkpoint(base, scheme, quantised[-1])
    answer = run_module("tests.fast.platform.quantised_layer", *map(str, quantised))
    layers = {Path(name).parts[-2:]: layer for name, layer in answer["layers"].items()}
    return {"layers": layers, "refusals": answer["refusals"]}


@each_layer
def test_the_layer_is_that_of_its_dequantised_weights(found: Any, scheme: str, dtype: str) -> None:
    layer = found["layers"][dtype, scheme]
    assert layer["method"] == METHODS[scheme]
    assert layer["output"] == f"torch.{dtype}"
    assert 0 < layer["error"] <= BOUNDS[dtype]


@each_layer
def test_weights_stay_where_they_are(found: Any, scheme: str, dtype: str) -> None:
    """Virtual memory lies behind them, and behind the base's rows there may be none."""
    layer = found["layers"][dtype, scheme]
    assert layer["moved"] == (["w13_weight_scale"] if scheme == "fp8-tensor" else [])
    assert layer["rest is left alone"]
    assert layer["same with room"]
    assert {name: layer["shapes"][name] for name in SHAPES[scheme]} == SHAPES[scheme]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_gate_and_up_with_two_scales_are_rounded_to_one(found: Any, dtype: str) -> None:
    """As SGLang does it, in float16 and then to three digits of fp8."""
    error = found["layers"][dtype, "fp8-tensor"]["rounded anew"]
    assert 2**-6 < error <= 2**-4 + 2**-10


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_tokens_output_does_not_depend_on_others(found: Any, scheme: str) -> None:
    assert found["layers"]["bfloat16", scheme]["same alone"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fp8 linear", "model.layers.1.q is quantised as SGLang's Fp8LinearMethod"),
        ("int8 linear", "W8A8Int8LinearMethod"),
        ("fp8 as it loads", "Fp8MoEMethod"),
        ("fp8 static", "Fp8MoEMethod"),
        ("8 bits", "MoeWNA16Method"),
        ("with zero points", "MoeWNA16Method"),
        ("--quantization gptq", "quantised by gptq; .* --quantization moe_wna16"),
        ("--quantization awq", "quantised by awq"),
        ("--quantization compressed-tensors", "quantised by compressed-tensors"),
    ],
)
def test_other_quantisations_are_refused_by_name(found: Any, case: str, message: str) -> None:
    refusal = found["refusals"][case]
    assert refusal.startswith("UnsupportedModelError: ")
    assert re.search(message, refusal), refusal
    assert "sgl-esft quantise" in refusal


def test_what_is_computed_is_not_refused(found: Any) -> None:
    for case in ("--quantization None", "--quantization fp8", "fp8 experts"):
        assert found["refusals"][case] == "not refused"


def test_a_method_whose_runner_is_not_asked_is_refused(found: Any) -> None:
    assert "adapters would be ignored" in found["refusals"]["another forward"]
