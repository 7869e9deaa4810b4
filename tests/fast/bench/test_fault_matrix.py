"""The matrix of faults in parts: each cell is in one of them, and how it ended is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.report import fault_tables
from bench.report.fault_tables import standing
from bench.soak.fault_matrix import Choice, chosen, merged, part_of
from tests.repo.tree import ROOT
from tests.server.fault_cells import CELLS, PHASES

ROWS = [asdict(cell) for cell in CELLS]
RUN = {
    "machine": {"cores": 2, "cpu": "Some CPU", "device": "none"},
    "outcome": "passed",
    "seconds": 30.0,
    "commit": "a" * 40,
    "time": "2026-01-02T03:04:05+00:00",
}
# Two cells, of which the second fails as carry_out does, and one that has no server.
TESTS = """
import pytest
from tests.server.fault_cells import CELLS

def check():
    placement = "between"
    assert placement == "old", "a page is lost"

@pytest.fixture
def server(cell):
    if cell == CELLS[2]:
        raise RuntimeError("server not ready")

@pytest.mark.soak
@pytest.mark.parametrize("cell", CELLS[:3], ids=str)
def test_a_cell(cell, server, record_property):
    record_property("hit", "switch")
    if cell == CELLS[1]:
        try:
            check()
        except AssertionError as error:
            raise AssertionError("the server's log") from error
"""


@pytest.mark.parametrize("count", [1, 2, 5, 6, 72, 144])
def test_parts_are_all_cells_once(count: int) -> None:
    parts = [part_of(CELLS, Choice(number, count)) for number in range(1, count + 1)]
    assert [cell for part in parts for cell in part] == CELLS
    assert len(set(CELLS)) == 144
    assert len(Counter(map(len, parts))) <= 2
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_cell_that_is_run_again_is_replaced_and_others_stay() -> None:
    first = {**ROWS[0], **RUN, "outcome": "failed"}
    second = {**ROWS[1], **RUN}
    again = {**ROWS[0], **RUN}
    gone = {**ROWS[2], **RUN, "moment": 2.0}  # aimed elsewhere: the same cell no more
    found = merged(ROWS, [first, second, gone], [again])
    assert found == [again, second, *ROWS[2:]]


def run_tests(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Status and rows of a run of TESTS, in a process of its own."""
    tests = folder / "test_cells.py"
    tests.write_text(TESTS)
    code = (
        "import sys; from pathlib import Path; from bench.soak.fault_matrix import Choice, run; "
        f"sys.exit(run(Choice(), Path({str(folder)!r}), Path({str(tests)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    path = folder / "fault_matrix.json"
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text())["rows"]


def test_a_run_writes_what_became_of_each_cell(tmp_path: Path) -> None:
    status, rows = run_tests(tmp_path)
    assert status == 1
    passed, failed, not_begun = rows
    assert (passed["outcome"], passed["hit"]) == ("passed", "switch")
    assert {"seconds", "commit", "time", "machine"} < passed.keys()
    assert "reason" not in passed
    assert failed["outcome"] == "failed"
    assert failed["reason"].startswith("AssertionError: a page is lost")
    assert "check()" in failed["reason"]
    assert standing(not_begun) == "not run"


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rows": rows}


@pytest.fixture
def _old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit b is other code."""
    changed = {"a" * 40: (), "b" * 40: ("sgl_elastic",), "c" * 40: None}
    monkeypatch.setattr(fault_tables, "changed_since", lambda r: changed[r["commit"][:40]])


@pytest.mark.usefixtures("_old")
@pytest.mark.parametrize(
    ("commit", "expected"),
    [
        ("a" * 40, "passed"),
        ("b" * 40, "passed (old)"),
        ("c" * 40, "passed (old)"),
        ("a" * 40 + "+changes", "passed (old)"),
    ],
)
def test_a_cell_of_other_code_is_old(commit: str, expected: str) -> None:
    assert standing({**ROWS[0], **RUN, "commit": commit}) == expected


@pytest.mark.usefixtures("_old")
def test_what_passed_on_this_code_is_not_left() -> None:
    """Parts stay what they are; what failed, is old or was not run is run."""
    failed = {**ROWS[1], **RUN, "outcome": "failed"}
    old = {**ROWS[2], **RUN, "commit": "b" * 40}
    rows = merged(ROWS, [{**ROWS[0], **RUN}, failed, old])
    assert chosen(rows, Choice(1, 36, is_left=True)) == rows[1:4]
    assert chosen(rows, Choice(1, 36)) == rows[:4]


@pytest.mark.usefixtures("_old")
def test_the_table_counts_and_says_when() -> None:
    run = [{**row, **RUN, "hit": row["phase"]} for row in ROWS]
    text = fault_tables.fault_matrix(result(run))
    assert text.count("2 passed") == 72
    assert "Run whole on this code: of 144 cells 144 passed. 2026-01-02 03:04 UTC" in text
    assert text.endswith("`python -m bench.soak.fault_matrix`, 2 cores of Some CPU.")
    assert "commit aaaaaaa, 30 s a cell. 144 of 144 hit the phase" in text


@pytest.mark.usefixtures("_old")
def test_the_table_says_what_failed_is_old_and_was_not_run() -> None:
    failed = {"outcome": "failed", "reason": "AssertionError: lost", "time": "2026-01-03T00:00:00"}
    rows = [
        {**ROWS[0], **RUN, **failed},
        {**ROWS[1], **RUN, "commit": "b" * 40},
        *ROWS[2:],
    ]
    text = fault_tables.fault_matrix(result(rows))
    assert "Not run whole on this code: of 144 cells 1 failed, 1 passed (old), 142 not run." in text
    assert "2026-01-02 03:04 to 2026-01-03 00:00 UTC, commits bbbbbbb to aaaaaaa" in text
    assert "- down, rank, SIGSTOP, plan: `AssertionError: lost`" in text
    assert "1 failed, 1 not run" in text
    nothing = fault_tables.fault_matrix(result(ROWS))
    assert nothing.endswith("of 144 cells 144 not run. `python -m bench.soak.fault_matrix`.")


def test_the_table_has_each_phase() -> None:
    assert fault_tables.PHASES == PHASES
