"""bench/expertweave/steps.py, sweep.py, figure7.py and figure8.py without servers: turns, ratios,
rows.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.common.sweep import (
    QUICK,
    Place,
    Plan,
    Sweep,
    Traffic,
    check_same_work,
    figures,
    median_interval,
    open_model,
    pooled,
    row,
)
from bench.expertweave import figure7, figure8
from bench.expertweave.steps import (
    Batch,
    Point,
    Server,
    StepError,
    Taken,
    in_turns,
    make_batch,
    with_positions,
)
from sgl_esft import zoo


def point(base: list[float], factor: float, num_equal: int = 4) -> Point:
    """`woven` takes `factor` times the wall clock of `plain`, and twice its processor time."""
    turns = {
        "plain": [Taken(seconds, 1.0) for seconds in base],
        "woven": [Taken(factor * seconds, 2.0) for seconds in base],
    }
    return Point(turns, num_equal, 4)


def test_a_ratio_is_of_neighbours_so_drift_cancels() -> None:
    found = row([point([1.0, 10.0, 100.0], 1.25)], "woven", "plain")
    wall, cpu = found["wall"], found["cpu"]
    assert isinstance(wall, dict)
    assert isinstance(cpu, dict)
    assert [wall[key] for key in ("min", "median", "max", "low", "high")] == [1.25] * 5
    assert (cpu["median"], cpu["num_turns"]) == (2.0, 3)
    assert found["same_tokens"] == 1.0


def test_fleets_are_told_apart_and_pooled() -> None:
    axis = [[point([1.0, 2.0], 1.0), point([1.0, 2.0], 2.0)], [point([3.0, 4.0], 1.0, num_equal=2)]]
    found = pooled(axis, "woven", "plain")
    wall = found["wall"]
    assert isinstance(wall, dict)
    assert wall["by_fleet"] == [1.0, 2.0]
    assert wall["num_turns"] == 6
    assert found["same_tokens"] == 10 / 12


def test_interval_of_the_median_covers_it_and_narrows() -> None:
    draw = random.Random(3)
    many = [draw.gauss(1.01, 0.05) for _ in range(400)]
    low, high = median_interval(many)
    assert low < statistics.median(many) < high
    assert low < 1.01 < high
    few_low, few_high = median_interval(many[:20])
    assert few_high - few_low > 2 * (high - low)
    assert median_interval(many) == (low, high)


def test_interval_of_the_median_holds_what_it_says() -> None:
    draw = random.Random(5)
    runs = [[draw.gauss(0, 1) for _ in range(40)] for _ in range(100)]
    held = sum(low <= 0 <= high for low, high in map(median_interval, runs))
    assert 85 <= held <= 100


def test_one_disturbed_turn_moves_no_median() -> None:
    calm = figures([[1.0, 1.01, 0.99, 1.0, 1.0]])
    disturbed = figures([[1.0, 1.01, 0.99, 1.0, 9.0]])
    assert (calm["median"], disturbed["median"]) == (1.0, 1.0)


def test_order_of_turns_alternates() -> None:
    assert "".join(name for number in range(3) for name in in_turns("abc", number)) == "cbaabccba"


def test_only_the_first_request_tells_of_every_token() -> None:
    batch = make_batch(3, 5, 7, 98, seed=1)
    body = batch.body(None)
    assert "lora_path" not in body
    sampling = body["sampling_params"]
    assert isinstance(sampling, list)
    assert [s["stream_interval"] == 1 for s in sampling] == [True, False, False]
    assert all(s["ignore_eos"] and s["max_new_tokens"] == 7 for s in sampling)
    assert batch.body("reverse")["lora_path"] == ["reverse"] * 3


def test_prompts_are_the_same_for_a_seed_and_have_no_special_tokens() -> None:
    batch = make_batch(4, 64, 1, 98, seed=1)
    assert batch == make_batch(4, 64, 1, 98, seed=1)
    assert batch != make_batch(4, 64, 1, 98, seed=2)
    assert [len(prompt) for prompt in batch.prompts] == [64] * 4
    assert {token for prompt in batch.prompts for token in prompt} <= set(range(3, 98))


@pytest.fixture
def busy() -> Iterator[Server]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield Server("busy", "", process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_scheduler_runs_in_its_turn_only(busy: Server) -> None:
    with busy.turn():
        start = busy.cpu_seconds()
        while busy.cpu_seconds() < start + 0.02:
            time.sleep(0.001)
    deadline = time.monotonic() + 10
    while psutil.Process(busy.scheduler).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    used = busy.cpu_seconds()
    time.sleep(0.05)
    assert busy.cpu_seconds() == used


def test_long_prompts_fit_into_a_copy_that_links_the_weights(tmp_path: Path) -> None:
    base = zoo.base_path()
    before = (base / "config.json").read_bytes()
    copy = with_positions(base, tmp_path / "long", 4096)
    config = json.loads((copy / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096
    assert config["n_routed_experts"] == json.loads(before)["n_routed_experts"]
    assert (copy / "model.safetensors").resolve() == base / "model.safetensors"
    assert (base / "config.json").read_bytes() == before


def test_unequal_work_is_not_compared() -> None:
    place = Place("adapter", "tpot", 8)
    check_same_work(place, point([1.0], 1.0, num_equal=2))
    with pytest.raises(StepError, match="only 1 of 4 requests got the same tokens from plain, wov"):
        check_same_work(place, point([1.0], 1.0, num_equal=1))


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


def test_plan_has_the_papers_axes() -> None:
    places = list(Plan().places())
    assert [v for metric, v in places if metric == "ttft"] == [128, 256, 512, 1024, 2048]
    assert [v for metric, v in places if metric == "tpot"] == [1, 2, 4, 8, 16, 32, 64]
    assert len(list(QUICK.places())) == 2


def test_figures_compare_the_same_requests_on_servers_that_there_are() -> None:
    with open_model("demo") as model:
        adapter, base = figure7.traffics(model)
        memory = figure8.traffic(model)
        assert model.spec.num_experts == 16
        assert (model.merged / "config.json").read_bytes() == (
            model.base / "config.json"
        ).read_bytes()
    assert adapter.compared == ["merged again", "fused", "unfused"]
    assert base.compared == ["off again", "fused", "unfused"]
    assert memory.compared == ["padded again", "virtual"]
    assert {lane[1] for lane in base.lanes.values()} == {None}
    assert adapter.lanes["fused"] == ("fused", model.adapter)
    assert not model.base.exists()


def test_a_pass_has_one_token_a_request_in_decode_and_one_request_in_prefill() -> None:
    decode = figure7.Pass.at(Place("base", "tpot", 8))
    prefill = figure7.Pass.at(Place("base", "ttft", 512))
    assert (len(decode.num_tokens_per_request), decode.num_tokens) == (8, 8)
    assert (len(prefill.num_tokens_per_request), prefill.num_tokens) == (1, 512)


def test_estimate_is_a_share_of_the_step_and_only_of_woven_systems() -> None:
    place = Place("adapter", "tpot", 8)
    with open_model("demo") as model:
        estimates = figure7.Estimates(model)
        assert estimates(place, "merged again", 1.0) == {}
        share = estimates(place, "unfused", 0.5)["estimate"]
        half = estimates(place, "unfused", 1.0)["estimate"]
    assert isinstance(share, dict)
    assert isinstance(half, dict)
    assert set(share) == {"rerouting", "tagging"}
    assert all(0 < 2 * half[part] == share[part] < 1 for part in share)


def test_batch_is_as_long_as_its_prompts() -> None:
    assert len(Batch(((3, 4), (5, 6)), 1)) == 2
