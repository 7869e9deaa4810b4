"""Pictures of the results: `python -m bench.report.plots` writes docs/pictures/*.svg.

    bench/results/<name>.json -> [DRAWERS] -> docs/pictures/<name>.svg

A result that is not there is named and skipped. The same result gives the same bytes, with the
pinned matplotlib (bench/report/plot_style.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.record import RESULTS
from bench.report import elastic_plots, finemoe_plots
from bench.report.plot_style import (
    COLOURS,
    MARKERS,
    Spread,
    base_line,
    goal_line,
    legend_below,
    log_ticks,
    panels,
    quartile_line,
    same_height,
    to_svg,
)

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
Result = Mapping[str, Any]


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
        same_height(line)
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


def sweep(result: Result) -> Figure:
    """Figures 7 and 8: TTFT by prompt length, TPOT by batch size; a row of panels a traffic."""
    rows = result["rows"]
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    figure, grid = panels(2, len(traffics), width=3.9, height=2.5)
    for line, traffic in zip(grid, traffics, strict=True):
        for axes, (metric, words) in zip(line, SWEPT.items(), strict=True):
            chosen = [r for r in rows if (r["traffic"], r["metric"]) == (traffic, metric)]
            _sweep_panel(axes, chosen, _goal(result.get("goals", {}), metric))
            axes.set_title(f"{TRAFFICS.get(traffic, traffic)}: {metric.upper()}")
            axes.set_xlabel(words)
    legend_below(figure)
    return figure


SWEPT = {"ttft": "prompt [tokens]", "tpot": "batch [requests]"}
TRAFFICS = {"adapter": "one adapter", "base": "no adapter"}
AGAIN = " again"  # a second process of what the others are compared with: the noise


def _goal(goals: Mapping[str, float], metric: str) -> float | None:
    """The goal of this metric where it has one of its own, else the first: of both metrics."""
    own = [value for words, value in goals.items() if words.endswith(metric.upper())]
    return next(iter([*own, *goals.values()]), None)


def _sweep_panel(axes: Axes, rows: Sequence[Result], goal: float | None) -> None:
    """Ratios by the wall clock, a line a system; the noise as a grey band."""
    if not rows:
        axes.set_axis_off()
        return
    axes.set_ylabel(f"over {rows[0]['over']} [ratio]")
    base_line(axes, str(rows[0]["over"]))
    if goal is not None:
        goal_line(axes, goal, f"goal: {goal:g}", at="right")
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


def batching(result: Result) -> Figure:
    """Distinct experts and late admissions by bound, over first come, first served."""
    # "any running" is another rule, kept in the results to show why it was not taken.
    rows = [row for row in result["rows"] if row["preference"] == "most running"]
    loads = [row["load"] for row in rows]
    figure, (line,) = panels(3, width=3.1, height=3.4)
    by_size = _of(rows, "published", "uniform", load=max(loads))
    by_popularity = _of(rows, load=max(loads), max_running=64)
    _bound_lines(line[0], by_size, "experts_over_fcfs", "max_running", "{} running")
    _bound_lines(line[1], by_popularity, "experts_over_fcfs", ("experts", "popularity"), "{}, {}")
    _bound_lines(line[2], by_size, "delay_p99_over_fcfs", "max_running", "{} running")
    for axes, setting in zip(line, ("uniform", "64 running", "uniform"), strict=True):
        axes.set_title(f"{setting}, load {max(loads):g}")
    line[0].set_ylabel("distinct experts [ratio]")
    line[1].set_ylabel("distinct experts [ratio]")
    line[2].set_ylabel("p99 of steps waited [ratio]")
    return figure


def reroute(result: Result) -> Figure:
    """Fused over unfused and over SGLang's gather, and as a share of a MoE layer; by tokens."""
    figure, ((chains, layer),) = panels(2, width=4.4, height=3.3)
    _ratio_lines(chains, result["rows"], CHAINS)
    _ratio_lines(layer, result["layer_rows"], LAYER_SHARES)
    goals = result["goals"]
    base_line(chains, "equal")
    goal_line(chains, goals["fused_over_unfused"], "goal: fused / unfused", at="right")
    goal_line(layer, goals["fused_over_layer"], "goal: fused / layer", at="right")
    chains.set_ylabel("time of a call [ratio]")
    layer.set_ylabel("time of a call over a MoE layer [ratio]")
    return figure


CHAINS = {
    "fused_over_unfused": "fused / unfused",
    "fused_over_unfused_bare": "fused / unfused without checks",
    "fused_over_gather": "fused / SGLang's gather, under EP",
}
LAYER_SHARES = {"fused_over_layer": "fused / layer", "unfused_over_layer": "unfused / layer"}


def _ratio_lines(axes: Axes, rows: Sequence[Result], names: Mapping[str, str]) -> None:
    """Ratios by the wall clock on two logarithmic axes."""
    x = [row["num_tokens"] for row in rows]
    for place, (name, words) in enumerate(names.items()):
        quartile_line(axes, x, [row[name]["wall"] for row in rows], place, words)
    axes.set_yscale("log")
    log_ticks(axes, x)
    axes.set_xlabel("batch [tokens]")
    axes.legend(fontsize=7)


def gpu_reroute(result: Result) -> Figure:
    """Microseconds of a call by kind of rerouting; a model's step over merged, and its floor."""
    figure, ((calls, step),) = panels(2, width=4.4, height=3.1)
    rows = _step_rows(result, "reroute: time")
    has_times = bool(rows) and "microseconds_a_call" in rows[0]["warm_l2"]
    unit = "microseconds_a_call" if has_times else "over_unfused_chain"
    # A difference may be below zero, which a logarithmic axis cannot show: it is in the table.
    kinds = [kind for kind in (rows[0]["warm_l2"][unit] if rows else ()) if "minus" not in kind]
    for place, kind in enumerate(kinds):
        spreads = [row["warm_l2"][unit][kind] for row in rows]
        quartile_line(calls, [row["num_tokens"] for row in rows], spreads, place, kind)
    words = "[microseconds]" if has_times else "over the unfused chain [ratio]"
    calls.set_ylabel(f"a call in a CUDA graph {words}")
    calls.legend(fontsize=7)
    _adapter_lines(step, _step_rows(result, "model step"), "num_tokens", _fused_step)
    base_line(step, "merged; dotted: floors")
    step.set_ylabel("decode step over merged [ratio]")
    step.legend(fontsize=7)
    calls.set_yscale("log")
    for axes, step_rows in ((calls, rows), (step, _step_rows(result, "model step"))):
        axes.set_xlabel("batch [tokens]")
        log_ticks(axes, _values(step_rows, "num_tokens"))
    return figure


def gpu_serve(result: Result) -> Figure:
    """TTFT and TPOT of SGLang on a GPU over plain SGLang, by batch and number of adapters."""
    figure, (line,) = panels(2, width=4.4, height=3.1)
    rows = [row for row in _step_rows(result, "serve") if "reason" not in row]
    for axes, metric in zip(line, ("ttft", "tpot"), strict=True):
        _adapter_lines(axes, rows, "batch_size", lambda row, m=metric: row[f"{m}_over_plain"])
        base_line(axes, "plain SGLang, base only")
        axes.set_ylabel(f"{metric.upper()} [ratio]")
        axes.set_xlabel("batch [requests]")
        log_ticks(axes, _values(rows, "batch_size"))
    legend_below(figure)
    return figure


def _of(rows: Sequence[Result], *owners: str, **wanted: object) -> list[Result]:
    """Rows of some (experts, popularity), or of all, with these values."""
    return [
        row
        for row in rows
        if (not owners or (row["experts"], row["popularity"]) == owners)
        and all(row[key] == value for key, value in wanted.items())
    ]


def _bound_lines(
    axes: Axes, rows: Sequence[Result], metric: str, by: str | tuple[str, ...], words: str
) -> None:
    """A line for each value of `by`; at bound 0 all are first come, first served."""
    keys = (by,) if isinstance(by, str) else by
    base_line(axes, "first come, first served")
    for place, values in enumerate(dict.fromkeys(tuple(row[k] for k in keys) for row in rows)):
        chosen = [row for row in rows if tuple(row[k] for k in keys) == values]
        x = [row["max_overtakes"] for row in chosen]
        quartile_line(axes, x, [row[metric] for row in chosen], place, words.format(*values))
    axes.set_xlabel("--max-overtakes [requests]")
    axes.set_xlim(left=0)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2)


def _step_rows(result: Result, step: str) -> Sequence[Result]:
    """Rows of one step of bench/gpu/run.py; none where it failed or was left out."""
    found: Sequence[Result] = result["steps"].get(step, {}).get("rows", [])
    return found


def _fused_step(row: Result) -> Spread:
    found: Spread = row["over_merged"]["fused router"]
    return found


def _adapter_lines(
    axes: Axes, rows: Sequence[Result], x: str, spread_of: Callable[[Result], Spread]
) -> None:
    """A line a number of adapters; where the floor is known it is dotted."""
    for place, count in enumerate(_values(rows, "num_adapters")):
        chosen = [row for row in rows if row["num_adapters"] == count]
        at = [row[x] for row in chosen]
        quartile_line(axes, at, [spread_of(row) for row in chosen], place, f"{count} adapters")
        if all("floor" in row for row in chosen):
            floors = [row["floor"] for row in chosen]
            axes.plot(at, floors, ":", color=COLOURS[place % len(COLOURS)], linewidth=1.1)


def load_test(result: Result) -> Figure:
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


DRAWERS: dict[str, Callable[[Result], Figure]] = {
    "expertweave_figure5": figure5,
    "expertweave_figure6": figure6,
    "expertweave_figure7": sweep,
    "expertweave_figure7_scaled": sweep,
    "expertweave_figure8": sweep,
    "expertweave_figure9": figure9,
    "reroute": reroute,
    "batching": batching,
    "gpu_reroute": gpu_reroute,
    "gpu_serve": gpu_serve,
    "lifecycle_load": load_test,
    "elasticmoe_gap": elastic_plots.gap,
    "elasticmoe_figure7": elastic_plots.latency,
    "elasticmoe_figure8": elastic_plots.figure8,
    "elasticmoe_figure9": elastic_plots.figure9,
    "elasticmoe_figure10": elastic_plots.figure10,
    "elasticmoe_figure11": elastic_plots.figure11,
    "elasticmoe_figure12": elastic_plots.latency,
    "elasticmoe_table1": elastic_plots.table1,
    "elasticmoe_ablation_up": elastic_plots.ablation,
    "elasticmoe_ablation_down": elastic_plots.ablation,
    "elasticmoe_day": elastic_plots.day,
    **finemoe_plots.DRAWERS,
}


def svg(name: str, result: Result) -> str:
    """The picture of a result as SVG text. Raises KeyError for a result without a picture."""
    return to_svg(partial(DRAWERS[name], result))


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
