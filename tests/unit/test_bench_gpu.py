"""bench/gpu.py: its parts over the contract simulator, and how they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, gpu_build
from bench.gpu_steps import STEPS
from tests.servers import ROOT


def run_simulated(folder: Path, part: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu", "--simulate", "--parts", part]
    command += ["--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{gpu.PARTS[part].file}.json").read_text())
    assert found["evidence"] == gpu.SIMULATED
    assert found["machine"]["device"] == "none (contract simulator of cuda)"
    assert found["complete"]
    assert list(found["steps"]) == ["build", *gpu.PARTS[part].step_seconds]
    return found["steps"]


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert gpu.why_skipped("serve", simulated=True) == "a test of its own serves the tiny model"


def test_every_step_has_a_limit_and_all_end_inside_ten_minutes() -> None:
    limits = [name for part in gpu.PARTS.values() for name in part.step_seconds]
    assert sorted(limits) == sorted([gpu.DEVICE_TESTS, *STEPS])
    assert gpu.TOTAL_SECONDS < 600
    clock = gpu.Clock(20)
    assert clock.left(60) <= 20
    assert gpu.Clock(-5).left(60) == 1.0


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(gpu.StepError, match="sees no CUDA device; --simulate needs none"):
        gpu.describe_gpu()


def report_in(folder: Path) -> gpu.Report:
    return gpu.Report(gpu.PARTS["memory"], folder, "a test", {"name": "none"})


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


def test_without_installation_the_plugin_has_its_doors(tmp_path: Path) -> None:
    gpu_build.link_kernels(tmp_path)
    gpu_build.write_doors(tmp_path)
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
    assert plugins.count("'sgl_esft.plugin:register'") == 1
    assert Path(kernels).parent == tmp_path / "sgl_esft_kernels"


def test_what_is_not_compiled_there_leaves_the_build_as_it_is() -> None:
    names = {path.name for path in gpu_build._sources()}
    assert {"bindings.cpp", "cuda.cpp", "cuda_abi.h", "test_stress.cpp", "simulator.h"} <= names
    assert not any("reroute" in str(path) for path in gpu_build._sources())
