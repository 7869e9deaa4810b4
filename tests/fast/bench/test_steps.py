"""bench/expertweave/steps.py, sweep.py, figure7.py and figure8.py without servers: turns, ratios,
rows.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench.common import sweep as subject
from bench.common.sweep import Place, Plan, Sweep, Traffic
from bench.expertweave import figure7
from bench.expertweave.steps import Point, StepError, Taken, in_turns


def point(base: list[float], factor: float, num_equal: int = 4) -> Point:
    """`woven` takes `factor` times the wall clock of `plain`, and twice its processor time."""
    turns = {
        "plain": [Taken(seconds, 1.0) for seconds in base],
        "woven": [Taken(factor * seconds, 2.0) for seconds in base],
    }
    return Point(turns, num_equal, 4)


def test_a_ratio_is_of_neighbours_so_drift_cancels() -> None:
    found = subject.row([point([1.0, 10.0, 100.0], 1.25)], "woven", "plain")
    wall, cpu = found["wall"], found["cpu"]
    assert isinstance(wall, dict)
    assert isinstance(cpu, dict)
    assert [wall[key] for key in ("min", "median", "max", "low", "high")] == [1.25] * 5
    assert (cpu["median"], cpu["num_turns"]) == (2.0, 3)
    assert found["same_tokens"] == 1.0


def test_fleets_are_told_apart_and_pooled() -> None:
    axis = [[point([1.0, 2.0], 1.0), point([1.0, 2.0], 2.0)], [point([3.0, 4.0], 1.0, num_equal=2)]]
    found = subject.pooled(axis, "woven", "plain")
    wall = found["wall"]
    assert isinstance(wall, dict)
    assert wall["by_fleet"] == [1.0, 2.0]
    assert wall["num_turns"] == 6
    assert found["same_tokens"] == 10 / 12


def test_interval_of_the_median_holds_what_it_says() -> None:
    draw = random.Random(5)
    runs = [[draw.gauss(0, 1) for _ in range(40)] for _ in range(100)]
    held = sum(low <= 0 <= high for low, high in map(subject.median_interval, runs))
    assert 85 <= held <= 100


def test_order_of_turns_alternates() -> None:
    assert "".join(name for number in range(3) for name in in_turns("abc", number)) == "cbaabccba"


def test_unequal_work_is_not_compared() -> None:
    place = Place("adapter", "tpot", 8)
    subject.check_same_work(place, point([1.0], 1.0, num_equal=2))
    with pytest.raises(StepError, match="only 1 of 4 requests got the same tokens from plain, wov"):
        subject.check_same_work(place, point([1.0], 1.0, num_equal=1))


def test_partial_results_say_so_and_have_what_is_there(tmp_path: Path) -> None:
    lanes = {"plain": ("plain", None), "woven": ("woven", None)}
    sweep = Sweep(
        "x", Plan(), [Traffic("base", "plain", lanes)], {"model": "demo"}, folder=tmp_path
    )
    sweep.points[Place("base", "tpot", 4)] = [point([1.0, 2.0], 1.5)]
    found = json.loads(sweep.write(complete=False).read_text())
    assert (found["complete"], found["model"], len(found["summary"])) == (False, "demo", 1)
    [only] = found["rows"]
    assert [only[key] for key in ("traffic", "metric", "axis", "value", "system", "over")] == [
        *("base", "tpot", "batch_size", 4),
        *("woven", "plain"),
    ]
    assert only["wall"]["median"] == 1.5


def test_estimate_is_a_share_of_the_step_and_only_of_woven_systems() -> None:
    place = Place("adapter", "tpot", 8)
    with subject.open_model("demo") as model:
        estimates = figure7.Estimates(model)
        assert estimates(place, "merged again", 1.0) == {}
        share = estimates(place, "unfused", 0.5)["estimate"]
        half = estimates(place, "unfused", 1.0)["estimate"]
    assert isinstance(share, dict)
    assert isinstance(half, dict)
    assert set(share) == {"rerouting", "tagging"}
    assert all(0 < 2 * half[part] == share[part] < 1 for part in share)
