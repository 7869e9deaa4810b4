"""How the pictures of results look, and how they become the same bytes each time.

    panels, lines with quartiles, goals, legends -> a figure of bench/report/plots.py -> [to_svg]
    -> text

Text stays text. The background is opaque, so that a picture reads on a light page and on a dark
one; the colours are told apart by the colour-blind, and every line has a marker of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette.
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#222222",
)
HASHED_ID = re.compile(r'(?<=[#"])[mp][0-9a-f]{10}(?=[")])')
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = "osD^vP"
STYLE = {
    "svg.hashsalt": "sgl-esft",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
}

Spread = Mapping[str, float]


def panels(columns: int, rows: int = 1, *, width: float = 3.4, height: float = 2.7) -> Any:
    """A figure and its ``[rows, columns]`` axes; sizes in inches a panel."""
    figure = Figure(figsize=(width * columns, height * rows))
    return figure, figure.subplots(rows, columns, squeeze=False)


def quartile_line(
    axes: Axes, x: Sequence[float], spreads: Sequence[Spread], place: int, label: str
) -> None:
    """Medians as a line, quartiles as bars; `place` chooses colour and marker."""
    medians = [s["median"] for s in spreads]
    below = [s["median"] - s["q1"] for s in spreads]
    above = [s["q3"] - s["median"] for s in spreads]
    colour = COLOURS[place % len(COLOURS)]
    axes.errorbar(
        x,
        medians,
        yerr=[below, above],
        color=colour,
        marker=MARKERS[place % len(MARKERS)],
        capsize=2,
        elinewidth=0.9,
        label=label,
    )


def goal_line(axes: Axes, value: float, words: str, *, at: Literal["left", "right"]) -> None:
    """A thin line at the goal, named at its left or right end."""
    axes.axhline(value, color=BLACK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        words,
        (at == "right", value),
        xycoords=("axes fraction", "data"),
        xytext=(-2 if at == "right" else 2, 2),
        textcoords="offset points",
        ha=at,
        fontsize=7.5,
    )


def log_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Powers of two and the like: a logarithmic axis with these numbers written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [str(value) for value in values])
    axes.minorticks_off()
    axes.tick_params("x", labelsize=8)


def base_line(axes: Axes, words: str) -> None:
    """What the ratios are to, at 1."""
    axes.axhline(1, color=BLACK, linewidth=1, zorder=1, label=words)


def same_height(line: Sequence[Axes]) -> None:
    """Panels of one metric share their limits, so that they can be compared."""
    low = min(axes.get_ylim()[0] for axes in line)
    high = max(axes.get_ylim()[1] for axes in line)
    for axes in line:
        axes.set_ylim(low, high)


def legend_below(figure: Figure, columns: int = 4) -> None:
    """One legend of all panels, under them."""
    found = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    places = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
    figure.legend(list(found.values()), list(found), **places)


def to_svg(draw: Callable[[], Figure], **metadata: str) -> str:
    """The drawn figure as SVG text: no date, no random ids, nothing of the machine's own style."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        target = io.StringIO()
        draw().savefig(target, format="svg", metadata={"Date": None, "Creator": None, **metadata})
    text = with_plain_ids(target.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def with_plain_ids(svg: str) -> str:
    """Matplotlib's ids are hashes of unrounded positions, whose last bit is the processor's."""
    plain: dict[str, str] = {}
    return HASHED_ID.sub(lambda found: plain.setdefault(found[0], f"id{len(plain)}"), svg)
