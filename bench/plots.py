"""Pictures of the results: `python -m bench.plots` writes docs/pictures/*.svg.

    bench/results/<name>.json -> [DRAWERS] -> docs/pictures/<name>.svg

A result that is not there is named and skipped. The same result gives the same bytes: no date, no
random ids, and the pinned matplotlib. Text stays text. The background is opaque, so that a picture
reads on a light page and on a dark one; the colours are told apart by the colour-blind.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.record import RESULTS

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

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
Result = Mapping[str, Any]


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


def base_line(axes: Axes, words: str) -> None:
    """What the ratios are to, at 1."""
    axes.axhline(1, color=BLACK, linewidth=1, zorder=1, label=words)


def figure5(result: Result) -> Figure:
    """Served load, woven over base-only: a row a metric, a column an alpha, a line a number."""
    rows = result["rows"]
    alphas, counts = _values(rows, "alpha"), _values(rows, "adapters")
    figure, grid = panels(len(alphas), len(SERVED), width=2.9, height=2.1)
    for line, (metric, words) in zip(grid, SERVED.items(), strict=True):
        for axes, alpha in zip(line, reversed(alphas), strict=True):
            base_line(axes, "base-only")
            for place, count in enumerate(counts):
                chosen = [r for r in rows if (r["alpha"], r["adapters"]) == (alpha, count)]
                _load_line(axes, chosen, metric, place, f"{count} adapters")
            axes.set_xlim(0, 1.15 * max(row["rate"] for row in rows))
        line[0].set_ylabel(words)
        _same_height(line)
    for axes, alpha in zip(grid[0], reversed(alphas), strict=True):
        axes.set_title(f"alpha {alpha:g}")
    for axes in grid[-1]:
        axes.set_xlabel("arrival rate [share of saturation]")
    legend_below(figure)
    return figure


def figure6(result: Result) -> Figure:
    """Woven over merged servers by skew: a panel a metric, a line a setting."""
    rows = result["rows"]
    figure, grid = panels(2, 2, width=3.8, height=2.3)
    hot = {row["alpha"]: row["hot_share"] for row in rows}
    alphas = sorted(hot, reverse=True)
    for axes, (metric, words) in zip(grid.flat, SERVED.items(), strict=True):
        base_line(axes, "merged, a core each")
        for place, (setting, label) in enumerate(SETTINGS.items()):
            chosen = {row["alpha"]: row[metric] for row in rows if row["setting"] == setting}
            x = [alphas.index(alpha) + 0.08 * place for alpha in chosen]
            quartile_line(axes, x, list(chosen.values()), place, label)
        ticks = [f"{alpha:g}\n{100 * hot[alpha]:.0f}%" for alpha in alphas]
        axes.set_xticks(range(len(alphas)), ticks)
        axes.set_ylabel(words)
        axes.set_xlabel("alpha, share of the hot adapter")
    legend_below(figure)
    return figure


SETTINGS = {"half": "woven on one core", "equal": "woven on two cores"}
SERVED = {
    "ttft": "TTFT [ratio]",
    "tpot": "TPOT [ratio]",
    "prefill_throughput": "prefill tokens/s [ratio]",
    "decode_throughput": "decode tokens/s [ratio]",
}


def _load_line(axes: Axes, rows: Sequence[Result], metric: str, place: int, label: str) -> None:
    """One number of adapters by rate, moved aside a little; for TPOT its floor is dotted."""
    x = [row["rate"] + 0.015 * (place - 1) for row in rows]
    quartile_line(axes, x, [row[metric] for row in rows], place, label)
    if metric == "tpot":
        floors = [row["tpot_floor"] for row in rows]
        axes.plot(x, floors, ":", color=COLOURS[place], linewidth=1.1, label=f"floor of {label}")


def _values(rows: Sequence[Result], key: str) -> list[Any]:
    return sorted({row[key] for row in rows})


def _same_height(line: Sequence[Axes]) -> None:
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


def sweep(result: Result) -> Figure:
    """Figures 7 and 8: TTFT by prompt length, TPOT by batch size; a row of panels a traffic."""
    rows = result["rows"]
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    figure, grid = panels(2, len(traffics), width=3.9, height=2.5)
    for line, traffic in zip(grid, traffics, strict=True):
        for axes, (metric, words) in zip(line, SWEPT.items(), strict=True):
            chosen = [r for r in rows if (r["traffic"], r["metric"]) == (traffic, metric)]
            _sweep_panel(axes, chosen)
            axes.set_title(f"{TRAFFICS.get(traffic, traffic)}: {metric.upper()}")
            axes.set_xlabel(words)
    legend_below(figure)
    return figure


SWEPT = {"ttft": "prompt [tokens]", "tpot": "batch [requests]"}
TRAFFICS = {"adapter": "one adapter", "base": "no adapter"}
AGAIN = " again"  # a second process of what the others are compared with: the noise


def _sweep_panel(axes: Axes, rows: Sequence[Result]) -> None:
    """Ratios by the wall clock, a line a system; the noise as a grey band."""
    if not rows:
        axes.set_axis_off()
        return
    axes.set_ylabel(f"over {rows[0]['over']} [ratio]")
    base_line(axes, str(rows[0]["over"]))
    goal_line(axes, 1.01, "1%", at="right")
    systems = list(dict.fromkeys(row["system"] for row in rows))
    place = 0
    for system in systems:
        chosen = [row for row in rows if row["system"] == system]
        x, spreads = [row["value"] for row in chosen], [row["wall"] for row in chosen]
        if system.endswith(AGAIN):
            low, high = ([s[end] for s in spreads] for end in ("q1", "q3"))
            axes.fill_between(x, low, high, color="#9ca3af", alpha=0.35, linewidth=0, label=system)
        else:
            quartile_line(axes, [v * 1.03**place for v in x], spreads, place, system)
            place += 1
    log_ticks(axes, sorted({row["value"] for row in rows}))


def figure9(result: Result) -> Figure:
    """Weights and KV cache by number of adapters: merged, padded, virtual; the paper's as marks."""
    figure, ((weights, cache),) = panels(2)
    for place, way in enumerate(("merged", "padded", "virtual")):
        rows = result["rows"]
        x = [row["num_adapters"] + (place - 1) * 0.27 for row in rows]
        gib = [row[way]["weight_bytes"] / (1 << 30) for row in rows]
        _bars(weights, x, gib, [row["paper"][way]["weight_gib"] for row in rows], place, way)
        tokens = [_thousands(row[way]["kv_tokens"]) for row in rows]
        theirs = [_thousands(row["paper"][way]["kv_tokens"]) for row in rows]
        _bars(cache, x, tokens, theirs, place, way)
    device = result["planned_device"]["memory_bytes"] / (1 << 30)
    goal_line(weights, device, f"the device: {device:.0f} GiB", at="left")
    weights.set_ylabel("model weights [GiB]")
    cache.set_ylabel("KV cache [thousand tokens]")
    for axes in (weights, cache):
        axes.set_xticks([row["num_adapters"] for row in result["rows"]])
        axes.set_xlabel("adapters")
        axes.grid(visible=False, axis="x")
    cache.plot([], [], "k_", markersize=9, label="the paper's")
    cache.legend(loc="upper right", fontsize=8)
    return figure


def _thousands(tokens: float | None) -> float | None:
    return None if tokens is None else tokens / 1e3


def _bars(
    axes: Axes,
    x: Sequence[float],
    ours: Sequence[float | None],
    theirs: Sequence[float | None],
    place: int,
    label: str,
) -> None:
    """Our values as bars (a cross where there is none), the paper's as dashes over them."""
    colour = COLOURS[place]
    axes.bar(x, [value or 0 for value in ours], 0.25, color=colour, label=label)
    for at, value in zip(x, ours, strict=True):
        if value is None:
            axes.text(at, 20, "no room", rotation=90, ha="center", va="bottom", fontsize=7.5)
    given = [(at, value) for at, value in zip(x, theirs, strict=True) if value is not None]
    axes.plot([at for at, _ in given], [value for _, value in given], "k_", markersize=9)


DRAWERS: dict[str, Callable[[Result], Figure]] = {
    "figure5": figure5,
    "figure6": figure6,
    "figure7": sweep,
    "figure8": sweep,
    "figure9": figure9,
}


def svg(name: str, result: Result) -> str:
    """The picture of a result as SVG text. Raises KeyError for a result without a picture."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = DRAWERS[name](result)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def draw(results: Path = RESULTS, pictures: Path = PICTURES) -> list[str]:
    """Draw what there are results for, and return the names of the others."""
    missing = []
    for name in DRAWERS:
        path = results / f"{name}.json"
        if path.exists():
            (pictures / f"{name}.svg").write_text(svg(name, json.loads(path.read_text())))
        else:
            missing.append(name)
    return missing


def main() -> None:
    """Draw all pictures whose results are there."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    missing = draw()
    print(f"drew {len(DRAWERS) - len(missing)} of {len(DRAWERS)} pictures into {PICTURES.name}/")
    if missing:
        print(f"no results, so not drawn: {', '.join(missing)}")


if __name__ == "__main__":
    main()
