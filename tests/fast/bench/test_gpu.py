"""bench/gpu/run.py: its parts over the contract simulator, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import build, run
from bench.gpu.steps import STEPS
from tests.support.servers import ROOT


def run_simulated(folder: Path, part: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu", "--simulate", "--parts", part]
    command += ["--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{run.PARTS[part].file}.json").read_text())
    assert found["evidence"] == run.SIMULATED
    assert found["machine"]["device"] == "none (contract simulator of cuda)"
    assert found["complete"]
    assert list(found["steps"]) == ["build", *run.PARTS[part].step_seconds]
    return found["steps"]


@pytest.mark.full
def test_memory_over_the_simulator(tmp_path: Path) -> None:
    steps = run_simulated(tmp_path, "memory")
    assert "unmapping_one_slot_keeps_its_neighbours_half_page" in steps["device tests"]["passed"]
    assert "random_loads_and_unloads_on_the_device" in steps["device tests"]["passed"]
    assert {row["page_bytes"] for row in steps["vmm"]["rows"]} == {2 << 20, 4 << 20}
    assert steps["share"]["contents"] == "equal"
    assert "GPU" in steps["moe: sglang fused_experts"]["skipped"]
    # Nothing absolute but how long the steps took.
    assert "seconds" not in steps["load"]
    assert "microseconds" not in steps["share"]
    assert all("over_memcpy" in row for row in steps["vmm"]["rows"])


@pytest.mark.full
def test_rerouting_over_the_simulator(tmp_path: Path) -> None:
    steps = run_simulated(tmp_path, "reroute")
    assert steps["reroute: check"]["equal"]
    followed = steps["reroute: graph safety"]["replayed_as_eager"]
    assert set(followed) == {"unfused chain", "standalone", "fused router"}
    assert all("another adapter loaded" in changes for changes in followed.values())
    # What only a GPU can say is not there, or null.
    assert set(steps["reroute: launches"]["nodes_a_layer"].values()) == {None}
    assert "microseconds" not in json.dumps(steps["reroute: time"]["rows"])
    rows = steps["model step"]["rows"]
    assert "microseconds" not in json.dumps(rows)
    assert [(row["num_tokens"], row["num_adapters"]) for row in rows] == [(5, 1), (5, 3)]
    assert rows[0]["touched_woven"] == rows[0]["touched_merged"]
    assert set(rows[0]["logits_off"].values()) == {0.0}
    assert rows[1]["floor"] > 1


def test_every_step_has_a_limit_and_all_end_inside_ten_minutes() -> None:
    limits = [name for part in run.PARTS.values() for name in part.step_seconds]
    assert sorted(limits) == sorted([run.DEVICE_TESTS, *STEPS])
    assert run.TOTAL_SECONDS < 600
    clock = run.Clock(20)
    assert clock.left(60) <= 20
    assert run.Clock(-5).left(60) == 1.0


def report_in(folder: Path) -> run.Report:
    return run.Report(run.PARTS["memory"], folder, "a test", {"name": "none"})


def test_a_failing_step_is_kept_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "build", lambda: tmp_path)
    monkeypatch.setattr(run, "run_device_tests", lambda *_: {"passed": []})

    def run_step(name: str, *_: object) -> dict[str, int]:
        if name == "load":
            raise run.StepError("exit status 1: RuntimeError: no memory")
        return {"figure": 7}

    monkeypatch.setattr(run, "run_step", run_step)
    report = report_in(tmp_path)
    run.run_all(report, lambda _: "a simulator", tiny=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not found["complete"]
    assert not found["steps"]["load"]["ok"]
    assert "no memory" in found["steps"]["load"]["reason"]
    assert found["steps"]["share"]["figure"] == 7
    assert "load: FAILED: exit status 1: RuntimeError: no memory" in capsys.readouterr().out


def test_reason_is_the_last_exception() -> None:
    text = "Traceback\n  File x\nsgl_vmm.VmmError: cuda said no\nsome note\n"
    assert run.reason_in(text) == "sgl_vmm.VmmError: cuda said no"
    assert run.reason_in("a\nb\n") == "a | b"
