"""More ranks and memories of tests/fast/moe_interpreted: TP, EP with TP, all of them over pages."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_esft.config import EXPERT_MEMORY_KINDS
from tests.fast.moe_interpreted.cases import EXPERTS, MORE_EXPERTS
from tests.fast.moe_interpreted.test_woven import COMPARISONS, INTERPRETED
from tests.support.processes import run_module


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    return run_module("tests.fast.moe_interpreted.woven_runs", "full", **INTERPRETED)


@pytest.mark.parametrize("memory", EXPERT_MEMORY_KINDS)
@pytest.mark.parametrize("name", [*EXPERTS, *MORE_EXPERTS])
def test_woven_is_merged(ran: dict[str, Any], name: str, memory: str) -> None:
    assert ran[memory][name] == dict.fromkeys(COMPARISONS, "equal")
