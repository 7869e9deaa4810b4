"""SGLang's Triton MoE path gives for a woven layer, bit for bit, what it gives for a merged one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.moe_interpreted.cases import EXPERTS, STYLES
from tests.support.processes import run_module

INTERPRETED = {
    "SGLANG_PLATFORM": "",
    "ESFT_PLATFORM": "native",  # not the CPU platform: its MoE layer is another
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
COMPARISONS = {
    *(f"adapter in slot {slot}" for slot in range(3)),
    "base",
    "each token its own",
    "another adapter in slot 1",
    "base after unloading",
}


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """What woven_runs.py found, in a process of its own."""
    return run_module("tests.fast.moe_interpreted.woven_runs", "fast", **INTERPRETED)


def test_sglangs_kernels_are_interpreted(ran: dict[str, Any]) -> None:
    assert ran["is_interpreted"] is True


@pytest.mark.parametrize("name", EXPERTS)
def test_woven_is_merged(ran: dict[str, Any], name: str) -> None:
    """Each adapter, the base, all of them in one batch, and after adapters have come and gone."""
    assert ran["padded"][name] == dict.fromkeys(COMPARISONS, "equal")


def test_two_ranks_parts_make_up_the_layer(ran: dict[str, Any]) -> None:
    """Of merged layers; each woven rank is its merged one."""
    assert ran["EP2"] == "close"


def test_woven_is_merged_over_pages(ran: dict[str, Any]) -> None:
    """Slots without a page would fault."""
    assert ran["virtual"] == {"one rank, float32": dict.fromkeys(COMPARISONS, "equal")}


@pytest.mark.parametrize("style", STYLES)
def test_every_router(ran: dict[str, Any], style: str) -> None:
    """SGLang's TopK as the models' code makes it, its Triton router interpreted."""
    assert ran["styles"][style] == "equal"


@pytest.mark.parametrize("batch", ["many tokens", "only the adapter's experts"])
def test_batches(ran: dict[str, Any], batch: str) -> None:
    """More rows than slots; all rows in one adapter's experts, all other experts empty."""
    assert ran["one_rank"][batch] == "equal"


def test_the_last_slot_of_all_is_used(ran: dict[str, Any]) -> None:
    assert ran["one_rank"]["last slot"] == ran["one_rank"]["slots"] - 1


def test_a_read_of_what_is_not_there_would_show(ran: dict[str, Any]) -> None:
    assert ran["stray_reads"] == {"unmapped slot": True}


@pytest.mark.parametrize("name", ["one rank, float32", "EP2 rank 1, float32"])
def test_padding_rows_read_nothing(ran: dict[str, Any], name: str) -> None:
    """Id -1, on one rank too, where SGLang itself would not filter it."""
    assert ran["padded_batch"][name] == {"live rows": "equal", "padding rows": ["0.0"]}


def test_tuned_blocks_are_looked_up_by_experts(ran: dict[str, Any]) -> None:
    """As without weaving, whatever the number of slots is."""
    choices = ran["choices"]["tuned blocks"]
    assert choices["plain"]["lookups"] == [8]
    assert choices["woven"] == choices["plain"]


def test_default_blocks_are_chosen_by_experts(ran: dict[str, Any]) -> None:
    """More tokens than experts, fewer than slots."""
    choices = ran["choices"]["default blocks"]
    assert choices["woven"] == choices["plain"]


@pytest.mark.parametrize(
    "backend", ["triton", "flashinfer_cutlass", "flashinfer_trtllm", "deep_gemm", "triton_kernel"]
)
def test_an_adapters_rows_are_in_sglangs_order(ran: dict[str, Any], backend: str) -> None:
    """A base expert as an adapter has the bytes that SGLang's loader gave it, or is refused."""
    found = ran["orders"][backend]
    if backend == "triton":
        assert found == "equal"
    elif backend == "flashinfer_trtllm":  # its kernels pack the weights
        assert found.startswith(("not made here: No module named 'flashinfer", "Unsupported"))
    else:
        assert found == "equal" or found.startswith("Unsupported")
