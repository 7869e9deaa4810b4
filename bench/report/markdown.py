"""Cells and tables of Markdown, as the documents' generated parts write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report.age import age, commits_of


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratio(spread: Mapping[str, float] | None) -> str:
    """Median and quartiles; of one run its value; a dash where nothing was measured."""
    if spread is None:
        return "-"
    if spread.get("runs") == 1:
        return f"{spread['median']:.3f} (one run)"
    return f"{spread['median']:.3f} ({spread['q1']:.3f} to {spread['q3']:.3f})"


def percent(share: float | None) -> str:
    """A share as percent without its sign; a dash where nothing was measured."""
    return "-" if share is None else f"{100 * share:.1f}"


def where(result: Mapping[str, Any]) -> str:
    """Machine, commit and command of a result file, and whether its run came to its end."""
    machine = result["machine"]
    is_complete = result.get("complete", result.get("is_complete", True))
    commits = ", ".join(commit[:7] for commit in commits_of(result))
    return (
        f"`{result['command']}`, commit {commits}, {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['device']}.{'' if is_complete else ' The run was cut short.'}"
        f"{age(result)}"
    )


def result_table(
    result: Mapping[str, Any], header: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> str:
    """A table, and under it the note and where its result is from."""
    return f"{table(header, rows)}\n\n{note}{where(result)}"
