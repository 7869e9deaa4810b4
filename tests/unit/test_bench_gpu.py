"""bench/gpu.py: its whole flow over the contract simulator, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu, gpu_build
from bench.gpu_steps import STEPS
from tests.servers import ROOT


@pytest.mark.slow
def test_whole_flow_over_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--simulate", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["evidence"] == gpu.SIMULATED
    assert found["machine"]["device"] == "none (contract simulator of cuda)"
    assert found["complete"]
    steps = found["steps"]
    assert list(steps) == ["build", "device tests", *gpu.STEP_SECONDS]
    assert "unmapping_one_slot_keeps_its_neighbours_half_page" in steps["device tests"]["passed"]
    assert "random_loads_and_unloads_on_the_device" in steps["device tests"]["passed"]
    assert {row["page_bytes"] for row in steps["vmm"]["rows"]} == {2 << 20, 4 << 20}
    assert steps["share"]["contents"] == "equal"
    assert "GPU" in steps["moe: sglang fused_experts"]["skipped"]
    # Nothing absolute but how long the steps took.
    assert "seconds" not in steps["load"]
    assert "microseconds" not in steps["share"]
    assert all("over_memcpy" in row for row in steps["vmm"]["rows"])


def test_every_step_has_a_limit_and_all_end_inside_ten_minutes() -> None:
    assert set(gpu.STEP_SECONDS) == set(STEPS)
    assert gpu.TOTAL_SECONDS < 600
    clock = gpu.Clock(20)
    assert clock.left(60) <= 20
    assert gpu.Clock(-5).left(60) == 1.0


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(gpu.StepError, match="sees no CUDA device; --simulate needs none"):
        gpu.describe_gpu()


def report_in(folder: Path) -> gpu.Report:
    return gpu.Report(folder, "a test", {"name": "none"})


def test_a_failing_step_is_kept_with_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_build, "build", lambda: tmp_path)
    monkeypatch.setattr(gpu, "run_device_tests", lambda *_: {"passed": []})

    def run_step(name: str, *_: object) -> dict[str, int]:
        if name == "load":
            raise gpu.StepError("exit status 1: RuntimeError: no memory")
        return {"figure": 7}

    monkeypatch.setattr(gpu, "run_step", run_step)
    report = report_in(tmp_path)
    gpu.run_all(report, lambda _: "a simulator", tiny=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not found["complete"]
    assert not found["steps"]["load"]["ok"]
    assert "no memory" in found["steps"]["load"]["reason"]
    assert found["steps"]["share"]["figure"] == 7
    assert "load: FAILED: exit status 1: RuntimeError: no memory" in capsys.readouterr().out


def test_without_a_compiler_nothing_else_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(gpu_build.CannotBuildError, match="install g\\+\\+, or name one with CXX="):
        gpu_build.find_compiler()

    def fail() -> Path:
        raise gpu_build.CannotBuildError("no compiler")

    monkeypatch.setattr(gpu_build, "build", fail)
    report = report_in(tmp_path)
    gpu.run_all(report, lambda _: "", tiny=True)
    assert list(report.steps) == ["build"]
    assert report.steps["build"]["reason"] == "no compiler"


def test_a_step_that_takes_too_long_has_failed() -> None:
    def work() -> dict[str, object]:
        raise subprocess.TimeoutExpired(["step"], 5)

    found = gpu.outcome_of(work)
    assert not found["ok"]
    assert "timed out after 5 seconds" in found["reason"]


def test_a_step_process_that_fails_shows_its_exception() -> None:
    with pytest.raises(gpu.StepError, match=r"exit status 1: .*UnsupportedDeviceError: "):
        gpu.run_step("share", ["--tiny", "--library", "/nowhere/libcuda.so"], {}, 60)


def test_figures_may_be_named_as_they_like() -> None:
    found = gpu.outcome_of(lambda: {"seconds": {"warm": 1.0}})
    assert found["seconds"] == {"warm": 1.0}
    assert found["took_seconds"] < 60


def test_reason_is_the_last_exception() -> None:
    text = "Traceback\n  File x\nsgl_vmm.VmmError: cuda said no\nsome note\n"
    assert gpu.reason_in(text) == "sgl_vmm.VmmError: cuda said no"
    assert gpu.reason_in("a\nb\n") == "a | b"


def test_sglangs_kernel_is_skipped_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "moe: sglang fused_experts"
    assert gpu.why_skipped("moe: by slot", simulated=True) is None
    assert gpu.why_skipped(name, simulated=False) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert gpu.why_skipped(name, simulated=False) == "SGLang is not installed"
