"""More ranks and memories of tests/fast/moe_interpreted: TP, EP with TP, all of them over pages.

Quantised experts, besides: more blocks and batches, float16, adapters that come and go.
"""

from __future__ import annotations

from typing import Any

import pytest

from sgl_esft.config import EXPERT_MEMORY_KINDS
from tests.fast.moe_interpreted.cases import EXPERTS, MORE_EXPERTS
from tests.fast.moe_interpreted.test_quantised import SCHEMES
from tests.fast.moe_interpreted.test_woven import COMPARISONS, INTERPRETED
from tests.support.processes import run_module


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    return run_module("tests.fast.moe_interpreted.woven_runs", "full", **INTERPRETED)


@pytest.mark.parametrize("memory", EXPERT_MEMORY_KINDS)
@pytest.mark.parametrize("name", [*EXPERTS, *MORE_EXPERTS])
def test_woven_is_merged(ran: dict[str, Any], name: str, memory: str) -> None:
    assert ran[memory][name] == dict.fromkeys(COMPARISONS, "equal")


QUANTISED_RANKS = ("float16", "EP2 rank 0", "TP2 rank 1", "EP2 rank 1 x TP2 rank 0")
CHANGES = COMPARISONS - {"each token its own"}
PADDED = {"live rows": "equal", "padding rows": ["0.0"]}


@pytest.fixture(scope="module")
def quantised() -> dict[str, Any]:
    return run_module("tests.fast.moe_interpreted.quantised_runs", "full", **INTERPRETED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_over_slots_is_merged(quantised: dict[str, Any], scheme: str) -> None:
    """Each rank's mixed batch and padding rows; on one rank chunks, and adapters come and go."""
    found = quantised[scheme]
    assert found["mixed"] == dict.fromkeys(QUANTISED_RANKS, "equal")
    assert found["padded"] == dict.fromkeys(QUANTISED_RANKS, PADDED)
    assert found["changes"] == dict.fromkeys(CHANGES, "equal")
    chunks = ("many tokens", "chunk of 1", "chunk of 10", "chunk of 29")
    assert found["batches"] == dict.fromkeys(chunks, "equal")
    assert found["scales"].pop("right") == "equal"
    assert {*found["scales"].values()} == {True}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_blocks_are_chosen_by_experts(quantised: dict[str, Any], scheme: str) -> None:
    """Of float8 in blocks, sorted rows and descriptors too."""
    kinds = {"default", "low", "narrow"} | ({"sorted"} if scheme == "fp8" else set())
    assert {*quantised[scheme]["blocks"]} == kinds
    for found in quantised[scheme]["blocks"].values():
        assert found["plain"]["lookups"] == [8]
        assert found["slots"] == found["plain"]
        assert found["output"] == "equal"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_woven_is_merged(quantised: dict[str, Any], scheme: str) -> None:
    """By everything that a server makes slots with."""
    labels = {f"{rank}, {memory}" for rank in QUANTISED_RANKS for memory in EXPERT_MEMORY_KINDS}
    changes = {f"changes, {memory}" for memory in EXPERT_MEMORY_KINDS}
    assert quantised[scheme]["woven"] == {
        **dict.fromkeys(labels, "equal"),
        **dict.fromkeys(changes, dict.fromkeys(CHANGES, "equal")),
    }
