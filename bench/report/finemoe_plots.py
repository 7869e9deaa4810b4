"""Pictures of experts in tiers.

bench/results/finemoe_*.json --> [a function each] --> plots.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.plot_style import (
    COLOURS,
    MARKERS,
    goal_line,
    legend_below,
    log_ticks,
    panels,
    quartile_line,
    same_height,
)

Result = Mapping[str, Any]
Row = Mapping[str, Any]
_PREDICTED = {
    "fine": "maps",
    "coarse": "counts of requests",
    "popularity": "popularity",
    "previous_token": "previous token",
}
HIDDEN_GOALS = {0.3: 0.5, 1.0: 1 / 3}  # by r


def figure4(result: Result) -> Figure:
    """A panel a task, a line a way to predict."""
    figure, tasks = _by_task(result)
    for axes, rows in tasks:
        for place, (name, words) in enumerate(_PREDICTED.items()):
            values = [row[name] for row in rows]
            shares = [v["recall"] if isinstance(v, Mapping) else v for v in values]
            _line(axes, [row["distance"] for row in rows], shares, place, words)
        axes.set_ylim(0, 1)
        axes.set_xlabel("layers ahead")
        axes.set_ylabel("recall")
    legend_below(figure)
    return figure


def figure12(result: Result) -> Figure:
    """A panel a task, a line a policy."""
    figure, tasks = _by_task(result)
    for axes, rows in tasks:
        for place, way in enumerate(_values(rows, "way")):
            chosen = [row for row in rows if row["way"] == way]
            shares = [row["hit_rate"] for row in chosen]
            _line(axes, [row["num_rows"] for row in chosen], shares, place, way)
        axes.set_ylim(0, 1)
        axes.set_xlabel("rows of a layer")
        axes.set_ylabel("hits")
    legend_below(figure)
    return figure


def timeline(result: Result) -> Figure:
    """At one request: a panel a task, a line a policy; stall in a layer's computing times."""
    figure, tasks = _by_task(result)
    for axes, all_rows in tasks:
        rows = [row for row in all_rows if row["batch"] == 1]
        speeds = _values(rows, "load_time")
        for place, way in enumerate(_values(rows, "way")):
            chosen = [row for row in rows if row["way"] == way]
            stalls = [row["stall_per_layer"] for row in chosen]
            _line(axes, [speeds.index(row["load_time"]) for row in chosen], stalls, place, way)
        axes.set_yscale("log")
        axes.set_xticks(range(len(speeds)), [f"{r:g}" for r in speeds])
        axes.set_xlabel("r: a load's time in a layer's")
        axes.set_ylabel("stall of a layer [layers]")
    same_height([axes for axes, _ in tasks])
    legend_below(figure)
    return figure


def shift(result: Result) -> Figure:
    """A panel a task: recall while a store learns that was another task's, or empty."""
    figure, tasks = _by_task(result)
    for axes, rows in tasks:
        learning = [row for row in rows if "while_learning" in row]
        for place, row in enumerate(learning):
            of = "another task's store" if row["store_of"] else "an empty store"
            steps = row["while_learning"]
            at = [step["tokens_learned_before"] for step in steps]
            _line(axes, at, [step["recall"] for step in steps], place, of)
        axes.set_ylim(0, 1)
        axes.set_xlabel("tokens learned before")
        axes.set_ylabel("recall")
    legend_below(figure)
    return figure


def regimes(result: Result) -> Figure:
    """A panel a number of requests, a line a policy."""
    rows = result["rows"]
    batches = _values(rows, "batch")
    figure: Figure
    figure, (line,) = panels(len(batches), width=3.0)
    for axes, batch in zip(line, batches, strict=True):
        chosen = [row for row in rows if row["batch"] == batch]
        at = [10 * row["r"] for row in chosen]
        for place, way in enumerate(("finemoe", "regression")):
            quartile_line(axes, at, [row["hidden_by"][way] for row in chosen], place, way)
        log_ticks(axes, at)
        axes.set_xticks(at, [f"{row['r']:g}" for row in chosen])
        axes.set_title(f"{batch} requests")
        axes.set_xlabel("r: a load's time in a layer's")
        axes.set_ylabel("share of the stall that is hidden")
    for r, goal in HIDDEN_GOALS.items():
        goal_line(line[0], goal, f"goal at r {r:g}", at="right")
    same_height(line)
    legend_below(figure)
    return figure


def _by_task(result: Result) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    names = _values(result["rows"], "task")
    figure, (line,) = panels(len(names), width=3.9)
    found = []
    for axes, name in zip(line, names, strict=True):
        axes.set_title(name)
        found.append((axes, [row for row in result["rows"] if row["task"] == name]))
    return figure, found


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], place: int, label: str) -> None:
    """Counted, so without quartiles."""
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    style = "-" if place < len(COLOURS) else "--"
    axes.plot(x, y, color=colour, marker=marker, linestyle=style, label=label)


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


DRAWERS = {
    "finemoe_figure4": figure4,
    "finemoe_figure12": figure12,
    "finemoe_timeline": timeline,
    "finemoe_shift": shift,
    "finemoe_regimes": regimes,
}
