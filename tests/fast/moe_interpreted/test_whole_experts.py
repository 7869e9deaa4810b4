"""Elastic's layout on SGLang's Triton MoE path: what is elsewhere is not read and adds nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fast.moe_interpreted.test_woven import INTERPRETED
from tests.support.processes import run_module

LAYOUTS = ("one device", "two devices", "three devices, uneven", "nothing on the second")


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """What whole_experts_runs.py found, in a process of its own."""
    return run_module("tests.fast.moe_interpreted.whole_experts_runs", **INTERPRETED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_devices_parts_make_up_the_merged_layer(
    ran: dict[str, Any], layout: str, dtype: str
) -> None:
    assert ran["sums"][f"{layout}, {dtype}"] == "close"


@pytest.mark.parametrize("whose", ["the last adapter", "base"])
def test_all_experts_on_one_device(ran: dict[str, Any], whose: str) -> None:
    assert ran["all here"][whose] == "equal"


def test_a_device_is_sglangs_rank_of_the_same_experts(ran: dict[str, Any]) -> None:
    assert ran["SGLang's ranks"] == ["equal", "equal"]


def test_a_device_without_experts_adds_zero(ran: dict[str, Any]) -> None:
    """SGLang's kernel, told that nothing is elsewhere, reads one expert before the tensor."""
    assert ran["nothing here"] == ["0.0"]
