"""`sgl-esft plan --speed`: what a trace and calibrated windows come to, and each bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.speed import SpeedPoint, StepCosts, fit, write_speed
from sgl_esft.offload.step_work import requests_of, work_of
from sgl_esft.offload.trace import (
    SlotChange,
    TraceHeader,
    TraceStep,
    TraceWriter,
    read_header_of,
    read_trace,
)
from sgl_esft.tools.cli import main
from tests.fast.tools.test_cli import fails

HEADER = TraceHeader(
    num_layers=3, num_experts=8, top_k=2, num_slots=12, num_base=8, embedding_size=4
)
COSTS = StepCosts(10e-3, 0.5e-3, 0.2e-3, 0.1e-3, 0.5e-3, 1 / 20e6, 50e3, 60e3)

Capture = pytest.CaptureFixture[str]


def _write_trace(folder: Path, header: TraceHeader, *, has_adapters: bool = True) -> Path:
    """Six requests of ten tokens, two at a time, every second one of an adapter."""
    rng = np.random.default_rng(5)
    writer = TraceWriter(folder, header, 1 << 30)
    base = np.arange(header.num_experts)
    maps = np.stack([np.where(base < 4, 8 + base, base), base])
    writer.add(SlotChange(np.stack([maps] * header.num_layers)))
    for number in range(30):
        ids = np.stack([rng.permutation(8)[:4].reshape(2, 2) for _ in range(header.num_layers)])
        slots = np.array([0 if has_adapters else -1, -1])
        first = 2 * (number // 10)
        writer.add(
            TraceStep(
                (first, first + 1),
                slots,
                ids,
                np.zeros((header.num_layers, 2, 8), np.float32),
                np.zeros((2, 4), np.float32),
            )
        )
    writer.flush()
    return folder


def _points(num_rows: int = 5) -> list[SpeedPoint]:
    found = []
    for size in (1, 2, 4):
        for with_adapters in (False, True):
            needed = 3 * 8 * (1 - 0.75**size) * (1.2 if with_adapters else 1.0)
            loads = needed * (1 - num_rows / 12)
            num_bytes = 60e3 if with_adapters else 50e3
            point = SpeedPoint(
                size, num_rows, 3, with_adapters, 1.0, 0.0, needed, loads, loads * num_bytes
            )
            stall_s = COSTS.stall_s(point.work(), num_bytes)
            step_s = COSTS.compute_s(point.work()) + stall_s
            found.append(replace(point, step_s=step_s, stall_s=stall_s))
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return _write_trace(tmp_path / "trace", HEADER)


@pytest.fixture
def speed(tmp_path: Path) -> Path:
    write_speed(tmp_path / "speed.json", [*_points(5), *_points(12)], {"name": "here"})
    return tmp_path / "speed.json"


@pytest.fixture
def plan(root: Path) -> list[str]:
    """Of a base of three layers of eight experts, with a small memory."""
    argv = ["plan", "--model-config", str(root / "base"), "--adapters", str(root / "math")]
    return [*argv, "--device-memory", "64MiB", "--counts", "1", "--page-size", "4KiB"]


def _json(capsys: Capture, argv: list[str]) -> Any:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_speed_is_that_of_the_trace(
    plan: list[str], trace: Path, speed: Path, capsys: Capture
) -> None:
    flags = ["--speed", str(speed), "--trace", str(trace)]
    found = _json(capsys, [*plan, *flags, "--batch-sizes", "1", "3", "--expert-cache", "4", "12"])
    rows = {(row["batch_size"], row["num_rows"]): row for row in found["speed"]}
    assert list(rows) == [(1, 4), (1, 12), (3, 4), (3, 12)]
    traced = requests_of(read_header_of(trace), read_trace(trace))
    costs = fit([*_points(5), *_points(12)])
    for (size, num_rows), row in rows.items():
        work = work_of(traced, size, num_rows, POLICIES["lfu"])
        expected = costs.speed(work, with_adapters=True)
        assert row["with_adapters"] == pytest.approx(vars(expected))
        work = work_of(traced.of_base(size), size, num_rows, POLICIES["lfu"])
        assert row["base_only"] == pytest.approx(vars(costs.speed(work, with_adapters=False)))
        assert row["base_only"]["low"] <= row["base_only"]["expected"] <= row["base_only"]["high"]
    assert rows[3, 4]["with_adapters"]["expected"] < rows[3, 4]["base_only"]["expected"]
    assert rows[3, 4]["base_only"]["expected"] < rows[3, 12]["base_only"]["expected"]


def test_speed_of_a_slower_link_and_another_policy(
    plan: list[str], trace: Path, speed: Path, capsys: Capture
) -> None:
    flags = ["--speed", str(speed), "--trace", str(trace), "--batch-sizes", "2"]
    argv = [*plan, *flags, "--expert-cache", "5"]
    (measured,) = _json(capsys, argv)["speed"]
    (slow,) = _json(capsys, [*argv, "--expert-read-bandwidth", "5MB"])["speed"]
    assert slow["base_only"]["expected"] < 0.6 * measured["base_only"]["expected"]
    (other,) = _json(capsys, [*argv, "--expert-policy", "lru"])["speed"]
    assert other["base_only"] != measured["base_only"]


def test_the_table_stands_below_the_plan(
    plan: list[str], trace: Path, speed: Path, capsys: Capture
) -> None:
    """Rows are those of the file, and one for every slot, where none are given."""
    assert main(plan) == 0
    memory = capsys.readouterr().out
    assert (
        main([*plan, "--speed", str(speed), "--trace", str(trace), "--batch-sizes", "1", "5"]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith(memory)
    lines = out.removeprefix(memory).splitlines()
    assert lines[0] == ""
    table = [line.split() for line in lines if line[:5].strip().isdecimal()]
    assert [row[:2] for row in table] == [["1", "5"], ["1", "12"], ["5", "5"], ["5", "12"]]
    assert "(" in table[0][3]
    assert lines[-1] == "batches of 1 to 4 were measured, others follow from them"


def test_a_trace_of_the_base_has_one_column(
    plan: list[str], tmp_path: Path, speed: Path, capsys: Capture
) -> None:
    trace = _write_trace(tmp_path / "of-base", HEADER, has_adapters=False)
    argv = [*plan, "--speed", str(speed), "--trace", str(trace), "--batch-sizes", "2"]
    assert all(row["with_adapters"] is None for row in _json(capsys, argv)["speed"])
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("-")


def test_without_speed_nothing_changes(plan: list[str], capsys: Capture) -> None:
    assert "speed" not in _json(capsys, plan)
    assert main(plan) == 0
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-sizes", "2", "--trace", "x"], "--trace, --batch-sizes without --speed"),
        (["--expert-cache", "4"], "--expert-cache without --speed"),
        (["--expert-policy", "lfu"], "--expert-policy without --speed"),
        (["--speed", "SPEED"], "--speed without --trace"),
        (["--speed", "none.json", "--trace", "TRACE"], "cannot read none.json"),
        (["--speed", "TRACE/header.json", "--trace", "TRACE"], "header.json is no sgl-esft speed"),
        (["--speed", "SPEED", "--trace", "none"], "cannot read header.json"),
        (["--speed", "SPEED", "--trace", "TRACE", "--expert-cache", "1"], "needs 2 experts"),
        (["--speed", "SPEED", "--trace", "TRACE", "--batch-sizes", "7"], "the trace has 6"),
        (["--speed", "SPEED", "--trace", "TRACE", "--batch-sizes", "0"], "0 requests together"),
        (["--speed", "SPEED", "--trace", "TRACE", "--expert-policy", "finemoe"], "fetches ahead"),
        (["--speed", "SPEED", "--trace", "TRACE", "--expert-policy", "best"], "'best'"),
        (
            ["--speed", "SPEED", "--trace", "TRACE", "--expert-read-bandwidth", "5M"],
            "--expert-read-bandwidth is '5M'",
        ),
    ],
)
def test_speeds_that_cannot_be(
    flags: list[str], words: str, plan: list[str], trace: Path, speed: Path, capsys: Capture
) -> None:
    given = [f.replace("SPEED", str(speed)).replace("TRACE", str(trace)) for f in flags]
    assert words in fails(capsys, 2, *plan, *given)


def test_another_models_trace_or_file_is_named(
    plan: list[str], trace: Path, speed: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = _write_trace(tmp_path / "other", replace(HEADER, num_layers=4))
    error = fails(capsys, 2, *plan, "--speed", str(speed), "--trace", str(other))
    assert "--trace is of 4 MoE layers with 8 experts, the base has 3 with 8" in error
    deep = tmp_path / "deep.json"
    write_speed(deep, [replace(point, num_layers=12) for point in _points()], {})
    error = fails(capsys, 2, *plan, "--speed", str(deep), "--trace", str(trace))
    assert "measured on 12 MoE layers, the trace is of 3" in error
