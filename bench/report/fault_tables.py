"""The table of the live matrix of faults: kinds of faults by phases of a scale.

bench/results/fault_matrix.json --[standing] of each cell--> counts, when, what failed

A cell that was not run says so, and one that was run on other code than the tree's is `old`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from bench.report.age import changed_since
from bench.report.markdown import table

COMMAND: Final = "python -m bench.soak.fault_matrix"
PHASES: Final = ("plan", "memory", "prepare", "switch", "retire", "after")
NOT_RUN: Final = "not run"
_ORDER: Final = ("passed", "failed", "passed (old)", "failed (old)", NOT_RUN)

Row = Mapping[str, Any]


def standing(row: Row) -> str:
    """`passed` or `failed`, `(old)` behind it where that was other code; `not run`."""
    if "outcome" not in row:
        return NOT_RUN
    return f"{row['outcome']}{' (old)' if _is_old(row) else ''}"


def _is_old(row: Row) -> bool:
    """Code that is in no commit is not this tree's either, as far as anybody can tell."""
    commit = str(row["commit"])
    is_changed = changed_since({"command": COMMAND, "commit": commit}) != ()
    return commit.endswith("+changes") or is_changed


def fault_matrix(result: Mapping[str, Any]) -> str:
    """A row a process and signal; below it how many in all, when, and what failed."""
    rows = result["rows"]
    faults = sorted({(row["process"], row["signal"]) for row in rows})
    cells = [
        [
            f"{process}, {signal}",
            *(_counts(r for r in rows if _place(r) == (process, signal, p)) for p in PHASES),
        ]
        for process, signal in faults
    ]
    parts = [table(["fault", *PHASES], cells), _summary(result), _failures(rows)]
    return "\n\n".join(part for part in parts if part)


def _place(row: Row) -> tuple[str, str, str]:
    return row["process"], row["signal"], row["phase"]


def _counts(rows: Iterable[Row]) -> str:
    """`1 passed, 1 not run`."""
    found = Counter(map(standing, rows))
    return ", ".join(f"{found[name]} {name}" for name in _ORDER if found[name]) or "-"


def _summary(result: Mapping[str, Any]) -> str:
    rows = result["rows"]
    found = {standing(row) for row in rows}
    is_whole = found <= {"passed", "failed"}
    lead = "Run whole on this code" if is_whole else "Not run whole on this code"
    run = [row for row in rows if "outcome" in row]
    return f"{lead}: of {len(rows)} cells {_counts(rows)}. {_when(run)}`{COMMAND}`{_machines(run)}."


def _machines(run: Sequence[Row]) -> str:
    """Of every cell; a matrix in parts may have several."""
    found = [f"{row['machine']['cores']} cores of {row['machine']['cpu']}" for row in run]
    return "".join(f", {name}" for name in dict.fromkeys(found))


def _when(run: Sequence[Row]) -> str:
    """From the first to the last, in time and in commits."""
    if not run:
        return ""
    ordered = sorted(run, key=lambda row: row["time"])
    times = list(dict.fromkeys(row["time"][:16].replace("T", " ") for row in ordered))
    commits = list(dict.fromkeys(_short(row["commit"]) for row in ordered))
    hits = sum(row.get("hit") == row["phase"] for row in run)
    median_s = statistics.median(row["seconds"] for row in run)
    return (
        f"{_range(times)} UTC, {'commits' if len(commits) > 1 else 'commit'} {_range(commits)}, "
        f"{median_s:.0f} s a cell. {hits} of {len(run)} hit the phase they were aimed at. "
    )


def _short(commit: str) -> str:
    head, plus, _ = commit.partition("+")
    return f"{head[:7]}{' with changes' if plus else ''}"


def _range(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _failures(rows: Sequence[Row]) -> str:
    """A line for each cell that failed."""
    return "\n".join(
        f"- {'up' if row['target'] == 2 else 'down'}, {', '.join(_place(row))}: {_code(row)}"
        for row in rows
        if row.get("outcome") == "failed"
    )


def _code(row: Row) -> str:
    return f"`{row['reason'].replace('`', '')}`"


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fault_matrix": (
        "Each process of a live server is killed or stopped in each phase of a scale between one\n"
        "and two devices, up and down, under load. No stream may break or change, and what serves\n"
        "then is the old placement or the new one:",
        fault_matrix,
    ),
}
