"""On SGLang's CUDA path a woven layer filters id -1, keeps tuned kernels, and knows w13's order.

    woven_triton.py (SGLang's own path on CPU tensors) -> how the kernels are called -> here

`sglang` is the same layer, with its slots, in SGLang's own runner: what would happen without ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.layer.woven_triton import (
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    TUNED_BLOCK,
)
from tests.support.processes import run_module

BACKENDS = ("triton", "flashinfer_cutlass", "deep_gemm")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("tuned"))
    native = {"SGLANG_PLATFORM": "", "ESFT_PLATFORM": "native"}
    on_cuda = {**native, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return run_module("tests.fast.layer.woven_triton", folder, *BACKENDS, **on_cuda)


@pytest.mark.parametrize("layout", ["one rank", "EP2", "whole experts"])
def test_id_minus_one_is_filtered(seen: dict[str, Any], layout: str) -> None:
    assert seen[layout]["woven"]["filters"] is True


def test_sglang_would_read_before_the_tensor_in_elastics_layout(seen: dict[str, Any]) -> None:
    calls = seen["whole experts"]
    assert calls["sglang"]["filters"] is False
    assert calls["woven"]["ids"] == [[0, 1], [-1, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(("layout", "num_base"), [("one rank", NUM_EXPERTS), ("EP2", 4)])
def test_tuned_kernels_are_those_without_slots(
    seen: dict[str, Any], layout: str, num_base: int
) -> None:
    """The lookup has the base's experts; the alignment and the weights have all slots."""
    num_slots = num_base + MAX_ADAPTERS * MAX_EXPERTS
    calls = seen[layout]
    assert calls["woven"]["block"] == TUNED_BLOCK
    assert calls["sglang"]["block"] != TUNED_BLOCK
    for each in calls.values():
        assert each["groups"] == num_slots
        assert each["rows"] == [num_slots, num_slots]


@pytest.mark.parametrize(("num_tokens", "block"), [(NUM_EXPERTS, 16), (NUM_EXPERTS + 1, 64)])
def test_the_switch_to_larger_blocks_stays(
    seen: dict[str, Any], num_tokens: int, block: int
) -> None:
    """Without a tuned configuration SGLang takes small blocks for as many tokens as experts."""
    calls = seen[f"untuned, {num_tokens} tokens"]
    assert calls["woven"]["block"] == block
    assert calls["sglang"]["block"] == 16


def test_ids_reach_the_core_as_the_models_and_leave_it_as_slots(seen: dict[str, Any]) -> None:
    """Expert 1 is the adapter's, in its first slot; the other rank's experts are nobody's here."""
    assert seen["one rank"]["woven"]["ids"][:2] == [[0, NUM_EXPERTS], [2, 3]]
    assert seen["EP2"]["woven"]["ids"][:4] == [[0, 4], [2, 3], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapters_rows_lie_as_sglang_loads_the_bases(seen: dict[str, Any], backend: str) -> None:
    """flashinfer_cutlass has up rows first."""
    assert seen["rows"][backend]["w13"]
    assert seen["rows"][backend]["w2"]


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "deep_gemm"])
def test_a_backend_that_was_not_shown_is_refused(seen: dict[str, Any], backend: str) -> None:
    said = seen["rows"][backend]["refusal"]
    assert said.startswith("UnsupportedModelError: layer 1 on cpu computes its experts by the MoE ")
    assert said.endswith(
        f"{backend}, and weaving was not shown with it: use --moe-runner-backend triton"
    )
    assert seen["rows"]["triton"]["refusal"] == "not refused"
