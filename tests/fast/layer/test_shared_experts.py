"""Shared experts of adapters: what SGLang's own module gives with the adapter's weights in it.

The comparisons are made by real_shared_mlp.py in a process of their own, bit by bit, for SGLang's
modules of both kinds, alone and as each rank of two.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.layer.real_shared_mlp import ARCHITECTURES, RANKS, TUNED
from tests.support.processes import run_module


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    alone = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return run_module("tests.fast.layer.real_shared_mlp", **alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_is_its_merged_models(
    real: dict[str, Any], architecture: str, ranks: str, dtype: str
) -> None:
    for rank in RANKS[ranks]:
        seen = real["comparisons"][f"{architecture} {dtype} {rank}"]
        assert set(seen) == {
            "before any",
            *(f"all of {name}" for name in TUNED),
            "all of the base",
            "mixed",
            "an empty slot",
            "its neighbour",
            "another in the slot",
            "after all have left",
            "nothing hooked then",
            "adapters change the output",
        }
        assert {name: found for name, found in seen.items() if found != "equal"} == {}


def test_weights_of_another_shape_are_refused(real: dict[str, Any]) -> None:
    assert real["shapes_are_checked"] is True


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "fused",
            "fuses into the routed ones: use --disable-shared-experts-fusion, or write false",
        ),
        ("other device", "not shown on meta: serve it merged"),
        ("another layer", "keeps no shared experts of their own (layers [2]): serve it merged"),
        ("packed", "shared experts have bias, weight, not gate_up_proj.weight and down_proj"),
        ("other width", "SGLang made shared experts 64 wide 128 wide"),
        ("elastic", "with experts that move: leave --elastic out"),
    ],
)
def test_where_they_are_not_woven_an_adapter_is_told(
    real: dict[str, Any], given: str, said: str
) -> None:
    found = real["refusals"][given]
    assert found.startswith("UnsupportedAdapterError: adapter 'math' has shared_experts = true")
    assert said in found
    assert real["refusals"]["fine"] == "not refused"
