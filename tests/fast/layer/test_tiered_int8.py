"""An int8 layer with its experts in tiers is bit for bit the one with all of them in memory.

    base, adapters --files--> rows, as they are routed to -> tiered rank -> seen
    base, adapters --merge, quantise--> SGLang's loader -> plain rank -> expected

From as many rows as one token needs, in every part of a grid of ranks; and what a wrong scale would
do.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from sgl_esft.offload.link import THREAD_COUNTS
from tests.fast.layer.test_quantised_layer import (
    HIDDEN,
    MAX_ADAPTERS,
    RANKS,
    TOP_K,
    TUNED,
    WIDTHS,
)
from tests.support.processes import run_module

# As many as one token needs, some, as many as there are experts of the base, and all slots.
NUM_ROWS: Final = (TOP_K, 6, 8, 20)
STORED: Final = 2  # the adapter that is stored quantised


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What `tests/fast/layer/tiered_fused_moe.py` finds, in a process of its own."""
    alone = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return run_module("tests.fast.layer.tiered_fused_moe", **alone)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_bit_is_as_with_all_experts_in_memory(
    seen: dict[str, Any], ranks: str, num_rows: int
) -> None:
    for rank in RANKS[ranks]:
        found = dict(seen["comparisons"][str(rank)][str(num_rows)])
        assert found.pop("loads") > 0
        assert set(found) == {
            *(f"adapter {number}" for number in range(-1, MAX_ADAPTERS)),
            *("mixed batch", "each token alone", "another adapter", "base alone"),
        }
        assert {name: how for name, how in found.items() if how != "equal"} == {}
    assert seen["differ"] == len(TUNED) + 1, "adapters that change nothing would prove nothing"


def test_fewer_rows_are_waves(seen: dict[str, Any]) -> None:
    """Experts that do not fit are read again and again."""
    loads = [
        seen["comparisons"][str(RANKS["one rank"][0])][str(num_rows)]["loads"]
        for num_rows in NUM_ROWS
    ]
    assert loads[0] == max(loads)
    assert loads[0] > 3 * loads[-1]


def test_a_wrong_scale_is_seen(seen: dict[str, Any]) -> None:
    """The comparisons would find another expert's, and one that was not read."""
    found = seen["wrong scales"]
    assert found.pop("right") == ", ".join(["equal"] * (MAX_ADAPTERS + 1))
    assert set(found) == {"another's", "none"}
    for fault, how in found.items():
        assert how.count("rows differ") == MAX_ADAPTERS + 1, (fault, how)


def test_rows_are_counted_with_scales(seen: dict[str, Any]) -> None:
    found = seen["counted"]
    width = WIDTHS["int8"]
    row_bytes = 3 * width * HIDDEN + 4 * (2 * width + HIDDEN)
    assert found["row_bytes"] == found["of tensors"] == row_bytes
    assert found["mapped"] == 5 * row_bytes


def test_only_unquantised_adapters_have_copies(seen: dict[str, Any]) -> None:
    assert seen["counted"]["copies"] == len(TUNED) - 1


def test_experts_are_read_as_many_at_a_time_as_is_said(seen: dict[str, Any]) -> None:
    assert seen["read by"]["3"] == 3
    assert seen["read by"]["None"] in THREAD_COUNTS, "whichever was about as fast as more"


def test_prefetches_give_way(seen: dict[str, Any]) -> None:
    assert seen["read by"]["asks"] == "Loader.give_way"


def test_other_schemes_are_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"].startswith(
        "UnsupportedModelError: --expert-cache: experts in fp8-tensor were not shown in tiers"
    )
