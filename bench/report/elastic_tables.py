"""Tables of elastic scaling, the ElasticMoE paper's evaluation repeated.

bench/results/elasticmoe_*.json --> [a function each] --> readme_tables.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.report.markdown import percent, ratio, result_table

_MB = 1e6


def scales(result: Any) -> str:
    """Figures 7 and 12: a row a step and strategy."""
    rows = [
        [
            row["step"],
            _words(row["strategy"]),
            ratio(row["ready_over_cold"]),
            _seconds(row["ready_s"]),
            ratio(row["gap_over_cold"]),
            _seconds(row["gap_s"]),
        ]
        for row in result["rows"]
    ]
    header = ["devices", "strategy", "until it serves", "seconds", "requests held", "seconds"]
    return result_table(result, header, rows)


def memory(result: Any) -> str:
    """Figure 8."""
    rows = [
        [
            row["step"],
            _words(row["strategy"]),
            ratio(row["peak_over_cold"]),
            f"{row['peak_bytes']['median'] / _MB:.0f} MB",
        ]
        for row in result["rows"]
    ]
    return result_table(result, ["devices", "strategy", "peak memory", "bytes"], rows)


def breakdown(result: Any) -> str:
    """Figure 11: shares of the time until ready, in percent."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["phases"]))
    rows = [
        [
            row["step"],
            _seconds(row["ready_s"]),
            *(percent(row["phases"].get(name, {}).get("median")) for name in names),
        ]
        for row in result["rows"]
    ]
    return result_table(result, ["devices", "seconds", *(f"{name}, %" for name in names)], rows)


def over_time(result: Any) -> str:
    """Figure 9: before, in the 30 seconds after the command, and later."""
    rows = []
    spans = [lambda t: t < 0, lambda t: 0 <= t < _SOON_S, lambda t: t >= _SOON_S]
    keys = dict.fromkeys((row["step"], row["strategy"]) for row in result["rows"])
    for step, strategy in keys:
        chosen = [r for r in result["rows"] if (r["step"], r["strategy"]) == (step, strategy)]
        cells = [_shares([r for r in chosen if span(r["at_s"])]) for span in spans]
        rows.append([step, _words(strategy), *cells])
    header = ["scale", "strategy", "before, %", f"first {_SOON_S:g} s, %", "later, %"]
    return result_table(result, header, rows)


_SOON_S = 30.0


def _shares(rows: Sequence[Mapping[str, Any]]) -> str:
    """Percent of all requests of some windows, by round: the median, and the extremes."""
    by_round: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_round.setdefault(row.get("round", 0), []).append(row)
    shares = [share for each in by_round.values() if (share := _share(each)) is not None]
    if len(shares) < 2:
        return percent(shares[0] if shares else None)
    return f"{percent(median(shares))} ({percent(min(shares))} to {percent(max(shares))})"


def _share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all requests of some windows of a round; None without any."""
    total = sum(row["requests"] for row in rows)
    return sum(row["share"] * row["requests"] for row in rows) / total if total else None


def by_rate(result: Any) -> str:
    """Figure 10."""
    rates = list(dict.fromkeys(row["rate"] for row in result["rows"]))
    found: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    for row in result["rows"]:
        found.setdefault(row["strategy"], {}).setdefault(row["rate"], []).append(row)
    rows = [
        [_words(strategy), *(_shares(by_rate.get(rate, [])) for rate in rates)]
        for strategy, by_rate in found.items()
    ]
    return result_table(result, ["strategy", *(f"rate {rate:g}, %" for rate in rates)], rows)


def throughput(result: Any) -> str:
    """Table 1, ours and the paper's, both over elastic's before."""
    rows = []
    base = next(row["paper"][0] for row in result["rows"] if row["strategy"] == "elastic")
    for row in result["rows"]:
        theirs = row["paper"] or (None, None, None)
        cells = [
            f"{ratio(row[window])} / {'-' if paper is None else f'{paper / base:.2f}'}"
            for window, paper in zip(("before", "during", "after"), theirs, strict=True)
        ]
        rows.append([_words(row["strategy"]), *cells])
    return result_table(result, ["strategy", "before", "during", "after"], rows)


def targets(result: Any) -> str:
    """A row for each target, by what was kept ready for it."""
    rows = [
        [
            row["target"],
            _words(row["ready"]),
            ratio(row["over_cold"]),
            _seconds(row["ready_s"]),
            _milliseconds(row["gap_s"]),
        ]
        for row in sorted(result["rows"], key=lambda row: row["target"])
    ]
    header = ["devices", "kept ready", "until it serves", "seconds", "requests held, ms"]
    return result_table(result, header, rows)


def after(result: Any) -> str:
    """A row a direction."""
    rows = [
        [
            row["step"],
            *(ratio(row[f"{name}_over_fresh"]) for name in ("scaled", "pairs", "cpu")),
            str(row["pairs_over_fresh"]["runs"]),
        ]
        for row in result["rows"]
    ]
    header = [
        "devices",
        "tokens a second",
        "window by window",
        "processor time of a token",
        "pairs",
    ]
    return result_table(result, header, rows)


def ablation(result: Any) -> str:
    """A row a set of parts."""
    rows = [
        [
            row["parts"],
            ratio(row["ready_over_all"]),
            _seconds(row["ready_s"]),
            _seconds(row["gap_s"]),
            ratio(row["peak_over_all"]),
        ]
        for row in result["rows"]
    ]
    header = ["parts", "until it serves", "seconds", "requests held, seconds", "peak memory"]
    return result_table(result, header, rows)


def gaps(result: Any) -> str:
    """What running streams notice: a row a step."""
    rows = [
        [
            row["step"],
            str(row["scales"]),
            _milliseconds(row["longest_s"]),
            _milliseconds(row["steady_p99_s"]),
            ratio(row["longest_over_allowed"]),
            _milliseconds(row["later_s"]),
            _milliseconds(row["held_s"]),
            ratio(row["peak_over_larger"]),
            ratio(row.get("device_peak_over_larger")),
            f"{row['copied_bytes']['median'] / _MB:.1f} MB",
        ]
        for row in result["rows"]
    ]
    header = ["devices", "scales", "longest gap, ms", "steady p99, ms", "over allowed"]
    header += ["later, ms", "requests held, ms", "peak memory", "of a device", "copied"]
    note = f"{result['requests']:,} requests went on meanwhile, {result['failed']} failed. "
    return result_table(result, header, rows, note)


def day(result: Any) -> str:
    """The autoscaler's day: a row a seed and run, then each claim and whether it holds."""
    rows = [
        [
            str(row["seed"]),
            row["run"],
            *(percent(row["attainment"].get(name)) for name in ("ttft", "tpot", "both")),
            f"{row['attainment_over_largest']:.3f}",
            f"{row['device_seconds']:.0f}",
            f"{row['device_seconds_over_largest']:.3f}",
            _count(row, "scales", "scales_failed"),
            _count(row, "wrong"),
            _count(row, "failed"),
        ]
        for row in result["rows"]
    ]
    header = ["seed", "run", "TTFT, %", "TPOT, %", "both, %", "over largest", "device-seconds"]
    header += ["over largest", "scales (failed)", "wrong", "failed"]
    return result_table(result, header, rows, f"{_claims(result['claims'])}\n\n")


def _count(row: Mapping[str, Any], name: str, of_them: str = "") -> str:
    """A dash for what has none of its own; in brackets a part of them, where there is one."""
    part = row.get(of_them)
    return f"{row.get(name, '-')}" + (f" ({part})" if part else "")


def _claims(claims: list[Mapping[str, Any]]) -> str:
    lines = [
        f"- Seed {each['seed']}: {each['claim']}: {each['measured']:.3f}, "
        f"{'holds' if each['holds'] else '**does not hold**'}"
        for each in claims
    ]
    return "\n".join(lines)


def tunnels(result: Any) -> str:
    """What TLS costs between nodes: a row for bytes, a row for connections."""
    rows = [
        [name, ratio(row["rate"]), ratio(row["processor_time"])]
        for name, row in result["rows"].items()
    ]
    return result_table(result, ["a second", "rate", "processor time of both ends"], rows)


def _milliseconds(spread: Mapping[str, float]) -> str:
    return f"{spread['median'] * 1e3:.0f}"


def _words(strategy: str) -> str:
    return strategy.replace("_", " ")


def redundancy(result: Any) -> str:
    """A row for each task, number of devices and of copies."""
    rows = [
        [
            row["task"],
            str(row["devices"]),
            str(row["copies"]),
            *(
                f"{row[how]['imbalance']:.3f}" if row["copies"] or how == "by_heat" else ""
                for how in ("by_heat", "by_other_heat")
            ),
            f"{row['at_random']['imbalance']['median']:.3f}" if row["copies"] else "",
            f"{row['by_heat']['crossings']:.3f}",
            f"{row['at_random']['crossings']['median']:.3f}" if row["copies"] else "",
        ]
        for row in result["rows"]
    ]
    header = ["task", "devices", "copies a layer", "imbalance", "by the other task's heat"]
    header += ["copies at random", "crossings", "copies at random"]
    return result_table(result, header, rows)


def _seconds(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f}"


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "elasticmoe_gap": (
        "What running streams notice of a scale with a parked standby: the longest gap between\n"
        "two tokens of any stream, over what is allowed (twice the 99th percentile of the seconds\n"
        "before, plus 100 ms), and the peak of all devices' memory, and of the device for which\n"
        "it is the most, over what the larger configuration needs:",
        gaps,
    ),
    "redundant_experts": (
        "Imbalance of devices and crossings of tokens that copies of hot experts leave\n"
        "(MoETuner's question; no copies is no planning):",
        redundancy,
    ),
    "elasticmoe_figure7": (
        "Scaling up: time until the new instance serves and time for which new requests wait,\n"
        "over a cold restart in the same round, median and quartiles:",
        scales,
    ),
    "elasticmoe_figure12": ("Scaling down, the same:", scales),
    "elasticmoe_figure8": (
        "Peak memory behind all devices while scaling up, over a cold restart's:",
        memory,
    ),
    "elasticmoe_figure11": (
        "Where elastic's own time goes, in percent of the time until the new instance serves:",
        breakdown,
    ),
    "elasticmoe_figure9": (
        "Requests that met their targets around a load step that a scale answers, in percent:",
        over_time,
    ),
    "elasticmoe_figure10": (
        "Requests that met their targets by rate, a scale from one device to two among them:",
        by_rate,
    ),
    "elasticmoe_table1": (
        "Requests a second before, during and after a scale, over elastic's before; ours / the\n"
        "paper's:",
        throughput,
    ),
    "elasticmoe_targets": (
        "Targets that nobody predicted, under a light load: time until the new instance serves,\n"
        "over a cold restart to the same target in the same round, and how long requests waited:",
        targets,
    ),
    "elasticmoe_after": (
        "What an instance serves once it was scaled, over one of its size that was started fresh;\n"
        "0.97 is the goal:",
        after,
    ),
    "elasticmoe_ablation_up": (
        "Scaling up with one more part off in each row, over all parts in the same round:",
        ablation,
    ),
    "elasticmoe_ablation_down": ("Scaling down, the same:", ablation),
    "elasticmoe_day": (
        "A day's load in ten minutes: the autoscaler, static sizes, and the best schedule in\n"
        "hindsight, composed of the static runs. Over static largest of the same seed:",
        day,
    ),
    "tunnels": (
        "A tunnel between nodes as it is, encrypted, over the same one in plain text. Sender,\n"
        "receiver and both ends share one process and its cores:",
        tunnels,
    ),
}

PLOTTED = {
    "elasticmoe_gap": "Longest gap between two tokens around a scale, over what is allowed",
    "elasticmoe_figure7": "Time until a larger instance serves, over cold restart, by strategy",
    "elasticmoe_figure8": "Peak memory of scaling up over cold restart, by strategy",
    "elasticmoe_figure9": "Requests in time around a load step, by strategy",
    "elasticmoe_figure10": "Requests in time by rate, by strategy",
    "elasticmoe_figure11": "Phases of elastic scales as shares of their time",
    "elasticmoe_figure12": "Time until a smaller instance serves, over cold restart, by strategy",
    "elasticmoe_table1": "Throughput before, during and after a scale, here and in the paper",
    "elasticmoe_ablation_up": "Seconds of a scale up, with one more part off in each bar",
    "elasticmoe_ablation_down": "Seconds of a scale down, with one more part off in each bar",
    "elasticmoe_day": "Offered load, devices and requests in time over a day, by run",
}
