"""SGLang's NPU MoE code, plain and woven, on simulated operators; `npu_layers.py` made the figures.

Ran against a contract simulator: what SGLang and we ask of the operators is what their documents
allow, and the result is right if the operators do what those say. Nothing ran on an NPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.layer.test_woven_layer import MAX_ADAPTERS, RANKS
from tests.support.processes import run_module

DTYPES = {"torch.bfloat16": 2e-2, "torch.float16": 2e-3}  # and how far sums and roundings may be


@pytest.fixture(scope="module", params=["virtual", pytest.param("padded", marks=pytest.mark.full)])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    alone = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    native = {"SGLANG_PLATFORM": "", "ESFT_PLATFORM": "native"}
    return run_module("tests.fast.ascend.npu_layers", request.param, **alone, **native)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_base_layer_is_sglangs_own_code(seen: dict[str, Any], dtype: str) -> None:
    """And gives what plain SwiGLU experts give, from weights that it has cast."""
    plain = seen["plain"][dtype]
    assert plain["classes"] == ["AscendTPDispatcher", "AscendRunnerCore", "NPUUnquantMoEMethod"]
    assert (plain["format"], plain["moved"]) == (29, True)
    assert plain["one rank"] < DTYPES[dtype]
    assert plain["TP2"] < DTYPES[dtype]


def test_sglang_alone_has_no_expert_parallelism_here(seen: dict[str, Any]) -> None:
    assert seen["plain EP2"] == "npu_grouped_matmul: groupList 16 should be weight dim 0 8"


def test_sglangs_router_calls_are_within_the_contract(seen: dict[str, Any]) -> None:
    assert seen["routing"] == {
        "softmax": True,
        "softmax, renormalised": True,
        "sigmoid in groups": True,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_woven_is_merged_bit_for_bit(seen: dict[str, Any], ranks: str, dtype: str) -> None:
    for rank in RANKS[ranks]:
        found = seen["woven"][f"{rank} {dtype}"]
        assert set(found) == {
            "weights",
            *(f"adapter in slot {slot}" for slot in range(MAX_ADAPTERS)),
            "base",
            "all in one batch",
            "rows without experts",
            "another adapter in slot 1",
            "base after unloading",
            "prepared again",
        }
        assert {name: what for name, what in found.items() if what != "equal"} == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ranks_parts_make_up_the_plain_layer(seen: dict[str, Any], dtype: str) -> None:
    sums = seen["sums"][dtype]
    assert set(sums) == set(RANKS)
    assert max(sums.values()) < DTYPES[dtype]


def test_the_adapters_are_seen(seen: dict[str, Any]) -> None:
    assert seen["adapters change the output"] is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("slots", "MoE layer 3 on Ascend: 1616 slots, its grouped matmul takes 1024"),
        ("float32", "MoE layer 3 on Ascend: experts of torch.float32"),
        ("dp", "MoE layer 3 on Ascend: --attn-dp-size"),
        ("elastic", "MoE layer 3 on Ascend: --elastic"),
        ("another core", "MoE layer 3 on Ascend: SGLang did not ask for our runner core"),
    ],
)
def test_what_was_not_shown_is_refused(seen: dict[str, Any], given: str, said: str) -> None:
    assert seen["refused"][given].startswith(f"UnsupportedModelError: {said}")
