"""Picture of the load test of the adapters' life; registered in plots.py.

bench/results/lifecycle_load.json --> [load_test] --> plots.DRAWERS
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from bench.report.plot_style import (
    COLOURS,
    MARKERS,
    base_line,
    goal_line,
    legend_below,
    panels,
    quartile_line,
)


def load_test(result: Mapping[str, Any]) -> Figure:
    """Pace of running streams by pattern, and the longest wait of each adapter."""
    rows = result["rows"]
    figure, ((pace, waits),) = panels(2, width=3.9, height=2.7)
    base_line(pace, "no operations")
    goal_line(pace, 2.0, "goal: 2", at="left")
    for place, row in enumerate(rows):
        label = row["pattern"].replace("_", " ")
        quartile_line(pace, [place], [row["busy_over_quiet"]], place, label)
        adapters = list(row["longest_wait_s"])
        waits.plot(
            list(row["longest_wait_s"].values()),
            range(len(adapters)),
            color=COLOURS[place],
            marker=MARKERS[place],
            linestyle="",
            label=label,
        )
        waits.set_yticks(range(len(adapters)), adapters)
    pace.set_xticks([])
    pace.set_xlim(-0.5, len(rows) - 0.5)
    pace.set_ylim(bottom=0)
    pace.set_ylabel("p99 between two tokens [ratio]")
    waits.set_xlim(left=0)
    waits.set_xlabel("longest wait [s]")
    legend_below(figure)
    return figure
