"""bench/expertweave/steps.py and sweep.py on two real servers: a plain and a woven one, in
turns.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.common.sweep import QUICK, VOCABULARY, Model, Sweep, Traffic, open_model
from bench.expertweave.steps import ENVIRONMENT, Lane, StepError, Stream, fleet, make_batch

pytestmark = pytest.mark.server

PLAN = replace(QUICK, seconds=0.1)


def sweep_of(model: Model, folder: Path) -> Sweep:
    lanes = {"merged": ("plain", None), "unfused": ("unfused", model.adapter)}
    traffic = Traffic("adapter", "merged", lanes, {"plain": model.merged})
    return Sweep("steps", PLAN, [traffic], {"model": model.name}, folder)


def test_merged_and_woven_take_turns_over_the_same_tokens(tmp_path: Path) -> None:
    with open_model("demo") as model:
        sweep = sweep_of(model, tmp_path)
        path = sweep.run([model.plain("plain"), model.woven("unfused", "--reroute", "unfused")])
    found = json.loads(path.read_text())
    assert found["complete"]
    assert [(r["metric"], r["value"], r["system"]) for r in found["rows"]] == [
        ("ttft", 128, "unfused"),
        ("tpot", 2, "unfused"),
    ]
    assert all(r["same_tokens"] == 1.0 for r in found["rows"])
    assert all(0.1 < r[clock]["median"] < 10 for r in found["rows"] for clock in ("wall", "cpu"))
    assert found["rows"][1]["wall"]["num_turns"] >= 3


def wait_until_stopped(process: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_schedulers_stand_still_and_refusals_are_errors() -> None:
    with open_model("demo") as model:
        with fleet([model.plain("plain")]) as servers:
            server = servers["plain"]
            scheduler = psutil.Process(server.scheduler)
            wait_until_stopped(scheduler)
            launcher = scheduler.parent()
            assert launcher is not None
            assert launcher.environ().items() >= ENVIRONMENT.items()
            assert len(scheduler.cpu_affinity()) == 1
            with server.turn(), pytest.raises(StepError, match=r"plain: .*nobody"):
                Stream(Lane(server, "nobody"), make_batch(1, 4, 1, VOCABULARY, seed=0)).start()
        assert not scheduler.is_running()
    assert not ENVIRONMENT.keys() & os.environ.keys()
