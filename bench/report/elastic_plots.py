"""Pictures of elastic scaling's results; registered in plots.py.

bench/results/elasticmoe_*.json --> [latency, gap, figure8, .., day] --> plots.DRAWERS
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.plot_style import (
    BLACK,
    COLOURS,
    MARKERS,
    base_line,
    goal_line,
    legend_below,
    panels,
    quartile_line,
)

Result = Mapping[str, Any]

LABELS = {
    "elastic": "elastic",
    "cold_restart": "cold restart",
    "extravagant": "extravagant",
    "colocated": "colocated",
    "horizontal": "horizontal",
}


def latency(result: Result) -> Figure:
    """Figures 7 and 12: time until ready and time without service, over cold restart's."""
    figure, ((ready, gap),) = panels(2, width=3.9, height=2.7)
    for axes, metric in ((ready, "ready_over_cold"), (gap, "gap_over_cold")):
        _by_step(axes, result["rows"], metric)
        axes.set_xlabel("devices")
    ready.set_ylabel("until it serves [ratio]")
    gap.set_ylabel("requests held [ratio]")
    legend_below(figure)
    return figure


def gap(result: Result) -> Figure:
    """The longest gap between two tokens of any stream, over what is allowed."""
    figure, ((axes,),) = panels(1, width=4.8, height=2.7)
    rows = result["rows"]
    found = [row["longest_over_allowed"] for row in rows]
    base_line(axes, "allowed")
    quartile_line(axes, range(len(rows)), found, 0, "elastic")
    axes.set_xticks(range(len(rows)), [row["step"].replace("->", "→") for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("longest gap [ratio]")
    legend_below(figure)
    return figure


def figure8(result: Result) -> Figure:
    """Peak memory of all devices over cold restart's."""
    figure, ((axes,),) = panels(1, width=4.8, height=2.7)
    _by_step(axes, result["rows"], "peak_over_cold", log=False)
    axes.set_ylabel("peak memory [ratio]")
    axes.set_xlabel("devices")
    legend_below(figure)
    return figure


def _by_step(axes: Axes, rows: Sequence[Result], metric: str, *, log: bool = True) -> None:
    """A line a strategy over the steps; cold restart is the line at 1."""
    steps = list(dict.fromkeys(row["step"] for row in rows))
    base_line(axes, LABELS["cold_restart"])
    strategies = [name for name in LABELS if name != "cold_restart"]
    for place, strategy in enumerate(strategies):
        chosen = {row["step"]: row[metric] for row in rows if row["strategy"] == strategy}
        if chosen:
            x = [steps.index(step) + 0.06 * (place - 1) for step in chosen]
            quartile_line(axes, x, list(chosen.values()), place, LABELS[strategy])
    axes.set_xticks(range(len(steps)), [step.replace("->", "→") for step in steps])
    if log:
        axes.set_yscale("log")


def figure9(result: Result) -> Figure:
    """Share of requests in time around a load step; down also for each device that is held."""
    wanted = [("up", "share"), ("down", "share"), ("down", "share_per_device")]
    found = {row["step"] for row in result["rows"]}
    shown = [each for each in wanted if each[0] in found]
    figure, (line,) = panels(len(shown), width=3.4, height=2.7)
    for axes, (step, metric) in zip(line, shown, strict=True):
        rows = [row for row in result["rows"] if row["step"] == step]
        _lines(axes, rows, "at_s", metric)
        axes.axvline(0, color="#222222", linewidth=0.8, linestyle=":")
        axes.set_title(f"scale {step}")
        axes.set_xlabel("since the command [s]")
        axes.set_ylabel("in time" if metric == "share" else "in time, a device")
        if metric == "share":
            goal_line(axes, result["goal"], f"goal: {result['goal']:g}", at="right")
    legend_below(figure)
    return figure


def figure10(result: Result) -> Figure:
    """Share of requests in time by rate, a scale among them."""
    figure, ((axes,),) = panels(1, width=4.8, height=2.9)
    _lines(axes, result["rows"], "rate", "share")
    goal_line(axes, result["goal"], f"goal: {result['goal']:g}", at="right")
    axes.set_xlabel("request rate [of what one device serves]")
    axes.set_ylabel("requests in time [share]")
    legend_below(figure)
    return figure


def _lines(axes: Axes, rows: Sequence[Result], x: str, y: str) -> None:
    """A line a strategy through the median of all rounds."""
    for place, (strategy, label) in enumerate(LABELS.items()):
        found: dict[float, list[float]] = {}
        for row in rows:
            if row["strategy"] == strategy:
                found.setdefault(row[x], []).append(row[y])
        if found:
            places = sorted(found)
            axes.plot(
                places,
                [median(found[each]) for each in places],
                color=COLOURS[place],
                marker=MARKERS[place],
                label=label,
            )
    axes.set_ylim(-0.03, 1.06)


def figure11(result: Result) -> Figure:
    """Elastic's own time: its phases as parts of a bar, a bar a step."""
    rows = result["rows"]
    figure, ((axes,),) = panels(1, width=5.4, height=2.9)
    phases = list(dict.fromkeys(name for row in rows for name in row["phases"]))
    below = [0.0] * len(rows)
    for place, phase in enumerate(phases):
        shares = [row["phases"].get(phase, {"median": 0.0})["median"] for row in rows]
        axes.bar(
            range(len(rows)), shares, 0.6, below, color=COLOURS[place % len(COLOURS)], label=phase
        )
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_xticks(range(len(rows)), [row["step"].replace("->", "→") for row in rows])
    axes.set_xlabel("devices")
    axes.set_ylabel("time until it serves [share]")
    legend_below(figure)
    return figure


def table1(result: Result) -> Figure:
    """Requests a second before, during and after a scale, over elastic's before; ours beside the
    paper's."""
    figure, ((ours, theirs),) = panels(2, width=3.9, height=2.7)
    windows = ("before", "during", "after")
    rows = result["rows"]
    base = next(row["paper"][0] for row in rows if row["strategy"] == "elastic")
    for place, row in enumerate(rows):
        look = {"color": COLOURS[place], "marker": MARKERS[place]}
        label = LABELS[row["strategy"]]
        ours.plot(windows, [row[window]["median"] for window in windows], label=label, **look)
        if row["paper"]:
            theirs.plot(windows, [value / base for value in row["paper"]], **look)
    for axes, title in ((ours, "here"), (theirs, "the paper")):
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    ours.set_ylabel("requests a second [ratio]")
    legend_below(figure)
    return figure


def ablation(result: Result) -> Figure:
    """Time until ready and time for which requests are held, a bar for each set of parts."""
    figure, (line,) = panels(2, width=3.9, height=2.7)
    rows = result["rows"]
    names = ("ready_s", "gap_s")
    for axes, name, words in zip(line, names, ("until it serves", "requests held"), strict=True):
        axes.barh(range(len(rows)), [row[name]["median"] for row in rows], color=COLOURS[0])
        axes.set_yticks(range(len(rows)), [row["parts"].replace("_", " ") for row in rows])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"{words} [s]")
    line[1].set_yticks([])
    return figure


def day(result: Result) -> Figure:
    """Offered load, devices held and requests in time over a day; a column a seed."""
    days = result["days"]
    figure, lines = panels(len(days), 3, width=3.4, height=1.8)
    for place, each in enumerate(days):
        rows = [row for row in result["rows"] if row["seed"] == each["seed"]]
        load, devices, in_time = (line[place] for line in lines)
        at_s = _middles(result["seconds"], len(each["rate"]))
        load.plot(at_s, [rate / result["requests_per_s"] for rate in each["rate"]], color=BLACK)
        load.set_title(f"seed {each['seed']}")
        in_time.set_xlabel("since midnight [s]")
        for colour, row in zip(COLOURS, rows, strict=False):
            _devices_line(devices, row, result["seconds"], colour)
            _in_time_line(in_time, row, each["windows_sent"], at_s, colour)
        _day_limits(load, devices, in_time)
    words = ("load [of the smallest's]", "devices", "in time [share]")
    for line, label in zip(lines, words, strict=True):
        line[0].set_ylabel(label)
    legend_below(figure)
    return figure


def _middles(seconds: float, count: int) -> list[float]:
    return [(number + 0.5) * seconds / count for number in range(count)]


def _devices_line(axes: Axes, row: Result, seconds: float, colour: str) -> None:
    steps = [*row["devices"], (seconds, row["devices"][-1][1])]
    x, y = [at_s for at_s, _ in steps], [count for _, count in steps]
    axes.step(x, y, where="post", color=colour, label=row["run"])


def _in_time_line(
    axes: Axes, row: Result, sent: Sequence[int], at_s: Sequence[float], colour: str
) -> None:
    """A window in which nothing was sent has no point."""
    counts = zip(at_s, row["windows_met"], sent, strict=True)
    points = [(at, found / all_of_it) for at, found, all_of_it in counts if all_of_it]
    axes.plot(*zip(*points, strict=True), color=colour, label=row["run"], linewidth=1)


def _day_limits(load: Axes, devices: Axes, in_time: Axes) -> None:
    for axes in (load, devices):
        axes.set_ylim(bottom=0)
    in_time.set_ylim(-0.03, 1.06)
