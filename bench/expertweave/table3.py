"""The paper's table 3 on the demo: two adapters woven, then all six, against base and merged.

    held-out prompts -> merged server of each adapter, woven server of each set -> [rows_of]
    -> bench/results/expertweave_table3.json

The paper serves a math and an intent adapter; here `sum` and `intent` stand for them. Woven must
equal merged in every task, or the bench fails after it has written what it saw. Real servers;
`bench.expertweave.zoo_table` is the same for all six alone.

Rows: `num_adapters` served together, `task`, exact match as shares (`base`, `merged`, `woven`) and
`same`, the share of prompts that woven and merged answered alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.common.record import write_result
from sgl_esft import zoo
from sgl_esft.zoo import serving
from sgl_esft.zoo.evaluate import Row, Woven, agreement, ask_merged, ask_woven, score
from sgl_esft.zoo.taskset import Example

PAIR = ("intent", "sum")

# ExpertWeave, table 3: percent. Another model and other data: only the equality is comparable.
PAPER = {
    "GSM8K": {"base": 56.5, "merged": 62.3, "woven": 62.3},
    "Intent": {"base": 18.6, "merged": 78.8, "woven": 78.8},
}

Examples = Mapping[str, Sequence[Example]]


def rows_of(
    examples: Examples, woven: Mapping[str, Woven], merged: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    """Compare the answers of one woven server with the merged models'; a row a task."""
    return [
        {"num_adapters": len(woven), **asdict(_row(task, examples[task], answers, merged[task]))}
        for task, answers in woven.items()
    ]


def _row(task: str, items: Sequence[Example], woven: Woven, merged: list[str]) -> Row:
    return Row(
        task,
        base=score(woven.base, items),
        woven=score(woven.adapter, items),
        merged=score(merged, items),
        same=agreement(woven.adapter, merged),
    )


def unequal(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tasks whose accuracy differs between woven and merged."""
    return [
        f"{row['task']} with {row['num_adapters']} adapters: woven {row['woven']:.3f}, "
        f"merged {row['merged']:.3f}"
        for row in rows
        if row["woven"] != row["merged"]
    ]


def measure(count: int) -> list[dict[str, Any]]:
    """Ask the servers one after another: `count` held-out prompts of each task."""
    base, adapters = zoo.base_path(), zoo.adapter_paths()
    examples = {name: zoo.held_out(name, count) for name in adapters}
    merged = {}
    for name, folder in adapters.items():
        print(f"merged server: {name}", flush=True)
        merged[name] = ask_merged(base, folder, examples[name])
    rows = []
    for names in (PAIR, tuple(adapters)):
        print(f"woven server: {', '.join(names)}", flush=True)
        chosen = {name: adapters[name] for name in names}
        with serving.server(serving.woven_arguments(base, chosen)) as url:
            woven = ask_woven(url, {name: examples[name] for name in names})
        rows += rows_of(examples, woven, merged)
    return rows


def main() -> int:
    """Evaluate, write bench/results/expertweave_table3.json, fail where woven is not merged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="held-out prompts per task")
    count = parser.parse_args().examples
    rows = measure(count)
    path = write_result(
        "expertweave_table3",
        {
            "what": "exact match on held-out prompts; `same`: woven and merged answered alike",
            "examples_per_task": count,
            "paper_percent": PAPER,
            "rows": rows,
        },
    )
    print(f"wrote {path.name}")
    problems = unequal(rows)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
