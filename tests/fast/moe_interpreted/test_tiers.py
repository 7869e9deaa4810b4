"""SGLang's Triton MoE path over rows that a copy stream fills gives what the merged layer gives."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.moe_interpreted.test_woven import COMPARISONS, INTERPRETED
from tests.support.processes import run_module

SEEN = COMPARISONS - {"base after unloading"}


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """What tier_runs.py found, in a process of its own."""
    return run_module("tests.fast.moe_interpreted.tier_runs", **INTERPRETED)


@pytest.mark.parametrize("rank", ["one rank, float32", "EP2 rank 1, float32"])
def test_with_rows_for_all_it_is_merged_bit_for_bit(ran: dict[str, Any], rank: str) -> None:
    assert ran[rank]["17"] == dict.fromkeys(SEEN, "equal")


@pytest.mark.parametrize("rank", ["one rank, float32", "EP2 rank 1, float32"])
@pytest.mark.parametrize("rows", ["3", "8"])
def test_with_fewer_rows_sums_are_rounded_once_more(
    ran: dict[str, Any], rank: str, rows: str
) -> None:
    assert set(ran[rank][rows]) == SEEN
    assert set(ran[rank][rows].values()) <= {"equal", "close"}


def test_a_token_whose_expert_cannot_be_read_is_no_answer(ran: dict[str, Any]) -> None:
    lost = ran["lost"]
    assert (lost["lost"], lost["others"], lost["again"]) == (True, "equal", "equal")
    assert "ExpertReadError" in lost["failure"]
