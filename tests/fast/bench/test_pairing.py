"""bench/common/pairing.py and record.py: turns, ratios, what a result says of its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.common import record
from bench.common.pairing import Taken, interleave, ratios, timed


def test_every_run_takes_its_turn_and_the_order_alternates() -> None:
    turns: list[str] = []

    def run(name: str) -> Taken:
        turns.append(name)
        return Taken(float(len(turns)), 1.0)

    taken = interleave({"a": lambda: run("a"), "b": lambda: run("b")}, 3, warm_up=1)
    assert "".join(turns) == "abbaabba"
    assert {name: len(runs) for name, runs in taken.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_taken_within_its_round() -> None:
    runs = [Taken(2.0, 1.0), Taken(20.0, 1.0), Taken(200.0, 1.0)]
    base = [Taken(1.0, 2.0), Taken(10.0, 2.0), Taken(100.0, 2.0)]
    found = ratios(runs, base)
    assert found["wall"] == {"runs": 3, "min": 2.0, "q1": 2.0, "median": 2.0, "q3": 2.0, "max": 2.0}
    assert found["cpu"]["median"] == 0.5


def test_the_device_is_waited_for_before_and_after() -> None:
    events: list[str] = []
    timed(lambda: events.append("work"), lambda: events.append("wait"))
    assert events == ["wait", "work", "wait"]


def test_a_result_names_device_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: str) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(record, "_git", no_git)
    monkeypatch.setenv("BENCH_COMMIT", "0123abc")
    path = record.write_result("x", {"figure": 1}, device="Some GPU", folder=tmp_path / "new")
    found = json.loads(path.read_text())
    seen = (found["commit"], found["machine"]["device"], found["figure"])
    assert seen == ("0123abc", "Some GPU", 1)
    assert found["versions"]["torch"]
    assert record._version("no-such-package") == "not installed"


def test_a_result_names_no_folder_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path / "out"), "--minutes", "2.0"])
    path = record.write_result("x", {}, device="none", folder=tmp_path)
    assert json.loads(path.read_text())["command"].endswith(" --out out --minutes 2.0")
