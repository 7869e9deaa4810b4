"""bench/gpu/run.py: its parts over the contract simulator, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import build, elastic, run, self_check, serve
from bench.gpu.steps import STEPS
from sgl_esft.plugin.hook_table import WEAVE_HOOKS
from tests.support.servers import ROOT


def run_simulated(folder: Path, part: str, missing: set[str]) -> dict[str, Any]:
    """`missing`: what only a GPU can run, which keeps the result from being complete."""
    command = [sys.executable, "-m", "bench.gpu", "--simulate", "--parts", part]
    command += ["--out", str(folder), "--minutes", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if missing else 0), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{run.PARTS[part].file}.json").read_text())
    assert found["evidence"] == run.SIMULATED
    assert found["machine"]["device"] == "none (contract simulator of cuda)"
    assert set(found["missing"]) == missing
    assert found["status"] == (run.INCOMPLETE if missing else run.COMPLETE)
    assert {"torch", "triton", "sglang", "sglang-kernel"} <= set(found["versions"])
    assert list(found["steps"]) == [run.BUILD, *run.PARTS[part].steps]
    return found["steps"]


@pytest.mark.full
def test_the_check_over_the_simulator(tmp_path: Path) -> None:
    """SGLang's launch path, the hooks and a layer: what a lent machine is asked first."""
    steps = run_simulated(tmp_path, "check", set())
    assert steps["self-check"]["hooks"] == len(WEAVE_HOOKS)
    assert steps["self-check"]["layer"]["off"] < self_check.ROUNDING


@pytest.mark.full
def test_memory_over_the_simulator(tmp_path: Path) -> None:
    steps = run_simulated(tmp_path, "memory", {"moe: sglang fused_experts"})
    assert "unmapping_one_slot_keeps_its_neighbours_half_page" in steps["device tests"]["passed"]
    assert "random_loads_and_unloads_on_the_device" in steps["device tests"]["passed"]
    assert {row["page_bytes"] for row in steps["vmm"]["rows"]} == {2 << 20, 4 << 20}
    assert steps["share"]["contents"] == "equal"
    assert steps["moe: sglang fused_experts"]["not_run"]
    assert "GPU" in steps["moe: sglang fused_experts"]["reason"]
    # Nothing absolute but how long the steps took.
    assert "seconds" not in steps["load"]
    assert "microseconds" not in steps["share"]
    assert all("over_memcpy" in row for row in steps["vmm"]["rows"])


@pytest.mark.full
def test_rerouting_over_the_simulator(tmp_path: Path) -> None:
    steps = run_simulated(tmp_path, "reroute", set())
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


def test_every_step_has_limits() -> None:
    limits = {name: each for part in run.PARTS.values() for name, each in part.steps.items()}
    assert sorted(limits) == sorted([run.DEVICE_TESTS, *STEPS])
    assert all(0 < each.least <= each.most < 600 for each in limits.values())
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
    run.run_all(report, run.Clock(600), [], lambda _: "", tiny=False)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["status"] == run.INCOMPLETE
    assert "no memory" in found["missing"]["load"]
    assert not found["steps"]["load"]["ok"]
    assert "no memory" in found["steps"]["load"]["reason"]
    assert found["steps"]["share"]["figure"] == 7
    assert "load: FAILED: exit status 1: RuntimeError: no memory" in capsys.readouterr().out


def test_figures_that_are_no_result_are_kept() -> None:
    found = run.outcome_of(lambda: {"off": 0.3, "failed": "off by 0.3"})
    assert (found["ok"], found["reason"], found["off"]) == (False, "off by 0.3", 0.3)
    assert "failed" not in found


def test_resuming_runs_what_has_no_figures_and_keeps_the_rest(
    machine: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "commit", lambda *_: "earlier")
    early = report_in(tmp_path)
    early.add("vmm", {"ok": True, "took_seconds": 1.0, "figure": 6})
    early.add("load", {"ok": False, "took_seconds": 1.0, "reason": "no memory"})
    monkeypatch.setattr(run, "commit", lambda *_: "later")
    report = report_in(tmp_path)
    report.resume()
    run.run_call([report], run.Clock(600), simulate=False)
    begun = [name for name, _ in machine]
    assert "vmm" not in begun
    assert "load" in begun
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert (steps["vmm"]["figure"], steps["vmm"]["commit"]) == (6, "earlier")
    assert (steps["load"]["figure"], steps["load"]["commit"]) == (7, "later")
    assert report.is_complete


@pytest.mark.parametrize("name", ["woven", "plain", "elastic"])
def test_a_gpu_servers_flags_are_those_of_this_sglang(name: str, tmp_path: Path) -> None:
    """As its parser takes them, abbreviations that name two flags too."""
    from sglang.srt.server_args import ServerArgs

    from sgl_elastic.options import parse as parse_elastic
    from sgl_esft_launch import flags

    files = serve.Files({}, tmp_path, {"a00": tmp_path})
    model = elastic.Model(tmp_path, tmp_path, {"a00": tmp_path})
    size = replace(elastic.FULL, device_memory="1GiB")
    arguments = {
        "woven": lambda: serve.woven_arguments(files, "cuda", 8),
        "plain": lambda: serve.plain_arguments(files, "cuda", 8),
        "elastic": lambda: elastic.arguments(model, size, "cuda"),
    }[name]()
    if name == "elastic":
        arguments = parse_elastic(arguments)[1]
    parser = flags.Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    _, rest = flags.parse(arguments)
    parsed = parser.parse_args(["--model-path", str(tmp_path), *rest])
    assert parsed.cuda_graph_max_bs_decode == 8


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, float]]:
    """No GPU: (step, its seconds) of each that is begun, which all answer at once."""
    begun: list[tuple[str, float]] = []

    def step(name: str, _folder: Path, _env: object, _tiny: bool, seconds: float) -> dict[str, int]:
        if name == "self-check" and (tmp_path / "broken").exists():
            raise run.StepError("hooks: HookError: sglang 9")
        begun.append((name, seconds))
        return {"figure": 7}

    monkeypatch.setattr(build, "build", lambda: tmp_path)
    monkeypatch.setattr(run, "_step", step)
    monkeypatch.setattr(run, "why_skipped", lambda *_, **__: None)
    return begun


def reports_in(folder: Path, *names: str) -> list[run.Report]:
    return [run.Report(run.PARTS[name], folder, "a test", {"name": "none"}) for name in names]


def test_a_part_that_has_no_time_is_incomplete_and_says_so(
    machine: list[tuple[str, float]], tmp_path: Path
) -> None:
    reports = reports_in(tmp_path, "check", "answers")
    run.run_call(reports, run.Clock(240), simulate=False)
    assert [name for name, _ in machine] == ["self-check", "serve: equality", "tiers: equality"]
    assert reports[0].is_complete
    found = json.loads((tmp_path / "gpu_answers.json").read_text())
    assert found["status"] == run.INCOMPLETE
    assert "needs 120 s" in found["missing"]["quantised: equality"]


def test_a_part_leaves_later_ones_their_time(
    machine: list[tuple[str, float]], tmp_path: Path
) -> None:
    run.run_call(reports_in(tmp_path, "serve", "elastic"), run.Clock(500), simulate=False)
    seconds = dict(machine)
    assert 130 < seconds["serve"] <= 330
    assert 170 < seconds["elastic"] <= 500


def test_what_is_skipped_is_missing(
    machine: list[tuple[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "why_skipped", lambda *_, **__: "SGLang is not installed")
    (report,) = reports_in(tmp_path, "serve")
    run.run_call([report], run.Clock(600), simulate=False)
    assert report.missing == dict.fromkeys(report.part.steps, "SGLang is not installed")
    assert not machine


def test_no_server_is_started_where_the_check_fails(
    machine: list[tuple[str, float]], tmp_path: Path
) -> None:
    (tmp_path / "broken").touch()
    reports = reports_in(tmp_path, "check", "reroute", "elastic")
    run.run_call(reports, run.Clock(900), simulate=False)
    assert "hooks: HookError: sglang 9" in reports[0].missing["self-check"]
    assert reports[1].is_complete
    assert reports[2].missing == dict.fromkeys((run.BUILD, "elastic"), "the self-check failed")


def test_a_result_names_the_bundle_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"sglang": "0.5.23", "unproved": ["all of it"]}')
    monkeypatch.setenv(run.MANIFEST_VARIABLE, str(manifest))
    report = report_in(tmp_path)
    found = json.loads(report.write().read_text())
    assert found["bundle"]["unproved"] == ["all of it"]
    assert set(found["missing"]) == {run.BUILD, *report.part.steps}


def test_reason_is_the_last_exception() -> None:
    text = "Traceback\n  File x\nsgl_vmm.VmmError: cuda said no\nsome note\n"
    assert run.reason_in(text) == "sgl_vmm.VmmError: cuda said no"
    assert run.reason_in("a\nb\n") == "a | b"
