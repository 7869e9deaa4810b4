"""bench/gpu/run.py: its parts over the contract simulator, and how they fail."""

from __future__ import annotations

import json
import os
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


def test_serving_is_skipped_over_the_simulator() -> None:
    assert run.why_skipped("serve", simulated=True) == "a test of its own serves the tiny model"


def test_every_step_has_a_limit_and_all_end_inside_ten_minutes() -> None:
    limits = [name for part in run.PARTS.values() for name in part.step_seconds]
    assert sorted(limits) == sorted([run.DEVICE_TESTS, *STEPS])
    assert run.TOTAL_SECONDS < 600
    clock = run.Clock(20)
    assert clock.left(60) <= 20
    assert run.Clock(-5).left(60) == 1.0


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(run.StepError, match="sees no CUDA device; --simulate needs none"):
        run.describe_gpu()


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


def test_without_a_compiler_nothing_else_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CannotBuildError, match="install g\\+\\+, or name one with CXX="):
        build.find_compiler()

    def fail() -> Path:
        raise build.CannotBuildError("no compiler")

    monkeypatch.setattr(build, "build", fail)
    report = report_in(tmp_path)
    run.run_all(report, lambda _: "", tiny=True)
    assert list(report.steps) == ["build"]
    assert report.steps["build"]["reason"] == "no compiler"


def test_a_step_that_takes_too_long_has_failed() -> None:
    def work() -> dict[str, object]:
        raise subprocess.TimeoutExpired(["step"], 5)

    found = run.outcome_of(work)
    assert not found["ok"]
    assert "timed out after 5 seconds" in found["reason"]


def test_a_step_process_that_fails_shows_its_exception() -> None:
    with pytest.raises(run.StepError, match=r"exit status 1: .*UnsupportedDeviceError: "):
        run.run_step("share", ["--tiny", "--library", "/nowhere/libcuda.so"], {}, 60)


def test_figures_may_be_named_as_they_like() -> None:
    found = run.outcome_of(lambda: {"seconds": {"warm": 1.0}})
    assert found["seconds"] == {"warm": 1.0}
    assert found["took_seconds"] < 60


def test_reason_is_the_last_exception() -> None:
    text = "Traceback\n  File x\nsgl_vmm.VmmError: cuda said no\nsome note\n"
    assert run.reason_in(text) == "sgl_vmm.VmmError: cuda said no"
    assert run.reason_in("a\nb\n") == "a | b"


def test_sglangs_kernel_is_skipped_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "moe: sglang fused_experts"
    assert run.why_skipped("moe: by slot", simulated=True) is None
    assert run.why_skipped(name, simulated=False) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run.why_skipped(name, simulated=False) == "SGLang is not installed"


def test_without_installation_the_plugin_has_its_doors(tmp_path: Path) -> None:
    build.link_kernels(tmp_path)
    build.write_doors(tmp_path)
    code = (
        "from importlib.metadata import entry_points\n"
        "for group in ('sglang.srt.platforms', 'sglang.srt.plugins'):\n"
        "    print([door.value for door in entry_points(group=group)])\n"
        "import sgl_esft_kernels\n"
        "print(sgl_esft_kernels.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    platforms, plugins, kernels = done.stdout.splitlines()
    assert "'sgl_esft.platform:activate'" in platforms
    assert plugins.count("'sgl_esft.plugin.register:register'") == 1
    assert Path(kernels).parent == tmp_path / "sgl_esft_kernels"


def test_what_is_not_compiled_there_leaves_the_build_as_it_is() -> None:
    names = {path.name for path in build._sources()}
    assert {"bindings.cpp", "cuda.cpp", "cuda_abi.h", "test_stress.cpp", "simulator.h"} <= names
    assert not any("reroute" in str(path) for path in build._sources())
