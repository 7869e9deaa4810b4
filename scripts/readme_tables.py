"""The README's result tables, from bench/results: `python -m scripts.readme_tables`.

    bench/results/*.json -> [filled] -> README.md, between its table markers

A result that is not there yet reads "not yet measured". A test holds the README to the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """The text with every marked table made anew. Raises KeyError for an unknown table."""

    def made(found: re.Match[str]) -> str:
        title, table = TABLES[found[2]]
        path = results / f"{found[2]}.json"
        body = table(json.loads(path.read_text())) if path.exists() else "Not yet measured."
        return f"{found[1]}{title}\n\n{body}\n{found[3]}"

    return _TABLE.sub(made, text)


def _zoo(result: Any) -> str:
    """Rows as `python -m sgl_esft.zoo evaluate --json` writes them, bare or in a result file."""
    is_bare = isinstance(result, list)
    rows = [
        [row["task"], *(_percent(row[column]) for column in ("base", "merged", "woven", "same"))]
        for row in (result if is_bare else result["rows"])
    ]
    where = "`python -m sgl_esft.zoo evaluate`" if is_bare else _where(result)
    header = ["task", "base", "merged", "woven", "same answer"]
    return f"{_table(header, rows)}\n\n{where}"


def _overhead(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        wall, cpu = row["woven_over_plain"], row["woven_over_plain_cpu"]
        rows.append([str(row["num_requests"]), *map(_ratio, (wall, cpu)), str(row["pairs"])])
    header = ["requests in the batch", "by the wall clock", "by processor time", "pairs of runs"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['q1']:.3f} to {spread['q3']:.3f})"


def _where(result: Mapping[str, Any]) -> str:
    """Machine, commit and command of a result file."""
    machine = result["machine"]
    return (
        f"`{result['command']}`, commit {result['commit'][:7]}, {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['device']}."
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "zoo": (
        "The demo, exact match on held-out prompts in percent; the last column says how often\n"
        "woven and merged gave the same answer:",
        _zoo,
    ),
    "overhead": (
        "Throughput of requests without an adapter, weaving on over weaving off, median and\n"
        "quartiles; above 0.97 is the goal:",
        _overhead,
    ),
}


def main() -> None:
    """Write the README's tables."""
    README.write_text(filled(README.read_text()))


if __name__ == "__main__":
    main()
