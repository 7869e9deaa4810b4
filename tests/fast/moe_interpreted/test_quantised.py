"""SGLang's quantised Triton MoE kernels give over slots what they give merged experts, bit for bit.

The merged model was quantised as a whole, base and adapters each apart.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo, TritonRunnerCore

from sgl_esft.config import EXPERT_MEMORY_KINDS
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.plugin import runner_core
from sgl_esft.weave.expert_memory import VirtualMemory
from sgl_esft.weave.slot_layout import SlotLayout
from tests.fast.moe_interpreted.test_woven import INTERPRETED
from tests.support.processes import run_module

SCHEMES = ("int8", "fp8", "fp8-tensor", "int4")
RANKS = ("one rank", "EP2 rank 1")
WRONG = ("of the slot before", "of the base's expert", "missing")
LAYOUT = SlotLayout.plan(num_base=8, num_routed=8, num_adapters=1, max_experts_per_adapter=3)


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """What quantised_runs.py found, in a process of its own."""
    return run_module("tests.fast.moe_interpreted.quantised_runs", "fast", **INTERPRETED)


def test_sglangs_kernels_are_interpreted(ran: dict[str, Any]) -> None:
    assert ran["is_interpreted"] is True


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_over_slots_is_merged(ran: dict[str, Any], scheme: str, rank: str) -> None:
    """The base and three adapters in one batch."""
    assert ran[scheme]["mixed"][rank] == "equal"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_woven_is_merged(ran: dict[str, Any], scheme: str) -> None:
    """The same by everything that a server makes slots with, padded and over pages."""
    expected = {f"{rank}, {memory}" for rank in RANKS for memory in EXPERT_MEMORY_KINDS}
    assert ran[scheme]["woven"] == dict.fromkeys(expected, "equal")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_are_taken_by_slot(ran: dict[str, Any], scheme: str) -> None:
    """And any other scale would show, of either tensor of scales."""
    found = dict(ran[scheme]["scales"])
    assert found.pop("right") == "equal"
    assert len(found) == 2 * len(WRONG)
    for what in WRONG:
        assert [shows for name, shows in found.items() if name.endswith(what)] == [True, True]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_read_of_what_is_not_there_would_show(ran: dict[str, Any], scheme: str) -> None:
    assert ran[scheme]["stray read"] is True


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_rows_read_nothing(ran: dict[str, Any], scheme: str) -> None:
    """Id -1, on one rank too."""
    assert ran[scheme]["padded"] == {"live rows": "equal", "padding rows": ["0.0"]}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_are_chosen_by_experts(ran: dict[str, Any], scheme: str) -> None:
    """Defaults and tuned ones, as without slots, whatever the number of slots is."""
    for found in ran[scheme]["blocks"].values():
        assert found["plain"]["lookups"] == [8]
        assert found["slots"] == found["plain"]
        assert found["output"] == "equal"
    assert {*ran[scheme]["blocks"]} == {"default", "low"}


def test_one_scale_for_a_batch_is_not_of_rows_that_nobody_wrote(ran: dict[str, Any]) -> None:
    """SGLang's own layer of one rank among several takes the largest of those, too; ours not."""
    own = {scheme: ran[scheme]["filtered"] for scheme in SCHEMES}
    assert own.pop("fp8-tensor") == "input: NaN, so rows that nobody has written"
    assert set(own.values()) == {"every row was written"}


def layer_with(hidden: int = 2, width: int = 2, **parts: Any) -> Any:
    """What `over_triton` reads of a layer, its weights being those."""
    w13, w2 = torch.empty(11, 2 * width, hidden), torch.empty(11, hidden, width)
    weights = TritonMoeQuantInfo(w13, w2, **parts)
    method = SimpleNamespace(get_triton_quant_info=lambda _: weights)
    return SimpleNamespace(layer_id=3, quant_method=method)


def over_triton(layer: Any, **config: Any) -> Any:
    core = TritonRunnerCore(MoeRunnerConfig(num_experts=8, num_local_experts=8, **config))
    return runner_core.over_triton(layer, core, LAYOUT)


SCALE = torch.ones(11)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"use_int8_w8a16": True}, r"\(int8_w8a16, a scale for each tensor\)"),
        ({"use_int8_w8a8": True, "block_shape": [128, 128]}, "int8_w8a8, a scale for each 128x128"),
        ({"use_fp8_w8a8": True, "per_channel_quant": True}, "fp8_w8a8, a scale for each channel"),
        ({"use_fp8_w8a8": True, "block_shape": [64, 128]}, "fp8_w8a8, a scale for each 64x128"),
        ({"use_fp8_w8a8": True, "a13_scale": SCALE}, "static scales of activations"),
        ({"use_fp8_w8a8": True, "b2": SCALE}, "biases"),
        ({"use_mxfp8": True}, "mxfp8"),
        ({"use_int4_w4a16": True, "block_shape": [0, 16]}, "int4_w4a16, a scale for each 0x16"),
        ({"use_int4_w4a16": True, "block_shape": [0, 32], "w13_zp": SCALE}, "zero points"),
        ({"fuse_swiglu_interleaved": True}, "interleaved cannot be woven"),
    ],
)
def test_what_was_not_shown_is_refused(parts: dict[str, Any], said: str) -> None:
    """With what serves instead."""
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        over_triton(layer_with(**parts))
    assert str(caught.value).startswith("MoE layer 3: experts ")
    assert str(caught.value).endswith("use --no-esft")


def test_a_method_that_says_nothing_of_its_weights_is_refused() -> None:
    def get_triton_quant_info(layer: Any) -> TritonMoeQuantInfo:
        raise NotImplementedError

    layer = layer_with()
    layer.quant_method.get_triton_quant_info = get_triton_quant_info
    with pytest.raises(UnsupportedModelError, match="experts of SimpleNamespace were not shown"):
        over_triton(layer)


@pytest.fixture
def tuned_k(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has SGLang find a tuned configuration with blocks of so many numbers."""

    def tune(block: int) -> None:
        found = {64: {"BLOCK_SIZE_K": block}}
        monkeypatch.setattr(runner_core, "get_moe_configs", lambda *args, **kwargs: found)

    return tune


INT4 = {"use_int4_w4a16": True, "block_shape": [0, 32]}


@pytest.mark.parametrize(
    ("hidden", "width", "block", "said"),
    [
        (128, 64, 64, None),
        (128, 32 + 64, 64, "64 numbers at a time of rows of 96"),  # the default's alone
        (128 + 32, 64, 32, "64 numbers at a time of rows of 160"),
        (128, 64, 128, "128 numbers at a time of rows of 64"),
    ],
)
def test_int4_is_not_read_past_its_pages(
    tuned_k: Callable[[int], None], hidden: int, width: int, block: int, said: str | None
) -> None:
    """The kernel reads past a row's end; slots without a page would fault there."""
    tuned_k(block)
    layer = layer_with(hidden // 2, width // 2, **INT4)
    over_triton(layer)  # other memory is there for every slot
    layer.esft_memory = VirtualMemory([], 4096, 11)
    if said is None:
        over_triton(layer)
        return
    with pytest.raises(UnsupportedModelError, match=said):
        over_triton(layer)
