"""The GPU script's engine swap, for real: the demo on one device of the CPU platform."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import elastic

pytestmark = pytest.mark.server


def test_an_engine_is_swapped_over_the_same_memory(tmp_path: Path) -> None:
    found = elastic.measure(replace(elastic.TINY, rounds=1), tmp_path)
    assert (found["rounds"], found["rounds_left_out"]) == (1, 0)
    assert found["checkpoint_bytes"] > 6e6
    assert found["weight_bytes_within_reach"] == 0
    assert {"notice", "prepare", "switch", "retire", "tokens again"} <= set(found["phase_s"])
    # About an eightieth on this platform, where starting is mostly importing.
    assert found["swap_over_cold_start"]["median"] < 0.5
    assert found["streams_met"] > 0
    for of, count in found["different"].items():
        assert count["streams"] > 0
        assert count["different"] == 0, of
