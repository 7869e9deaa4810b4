"""Table of the load test of the adapters' life: a row a pattern.

bench/results/lifecycle_load.json --> [load_test] --> readme_tables.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.markdown import ratio, table, where

_HEADER = [
    "pattern",
    "requests",
    "failed",
    "wrong",
    "operations",
    "p99 during loads over without",
    "busy over quiet windows",
    "wait: median, p99, longest, s",
    "memory, fds, threads: growth",
]


def load_test(result: Any) -> str:
    """Below it: what twice as many adapters as slots cost in throughput."""
    rows = [_row(row) for row in result["rows"]]
    crowded = result["crowding"]
    note = ""
    if crowded:
        note = (
            f"Tokens a second with {crowded['adapters']} adapters on {result['slots']} slots, over "
            f"{result['slots']} adapters on them: {ratio(crowded['all_over_slots'])}. "
        )
    text = f"{table(_HEADER, rows)}\n\n{note}{where(result)}"
    return text if result["is_complete"] else f"{text} The run was cut short."


def _row(row: Mapping[str, Any]) -> list[str]:
    waits = (row["wait_median_s"], row["wait_p99_s"], max(row["longest_wait_s"].values()))
    growth = [_growth(row["memory"][name]) for name in ("rss_bytes", "num_fds", "num_threads")]
    return [
        row["pattern"].replace("_", " "),
        str(row["requests"]),
        str(row["failed"]),
        str(row["wrong"]),
        str(sum(row["operations"].values())),
        f"{row['loads_over_none']:.2f}",
        ratio(row["busy_over_quiet"]),
        ", ".join(f"{seconds:.2f}" for seconds in waits),
        ", ".join(growth),
    ]


def _growth(found: Mapping[str, float]) -> str:
    return f"{100 * (found['late'] / found['early'] - 1):+.1f}%"
