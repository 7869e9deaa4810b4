"""Tables of the paper's evaluation, repeated here: each function makes one from its result file.

bench/results/expertweave_*.json -> [a function each] -> readme_tables.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.markdown import percent, ratio, result_table, table, where


def table1(result: Any) -> str:
    """The paper's numbers and ours, an adapter a row; F_mem below."""
    rows = [
        [row["adapter"], _adapter(row["paper"]), _adapter(row["ours"]), row["source"]]
        for row in result["rows"]
    ]
    header = ["adapter", "the paper's: max, average, sparsity", "ours", "where ours are from"]
    found = result["fragmentation"]
    words = (
        f"F_mem of all ten by padding to E_max {result['e_max']}: {found['paper_counts']:.3f} from "
        f"the paper's averages (it prints {found['paper_prints']:.2f}), {found['our_counts']:.3f} "
        "with ours."
    )
    return f"{table(header, rows)}\n\n{words}\n\n{where(result)}"


def _adapter(counts: Mapping[str, float]) -> str:
    return f"{counts['max_experts']}, {counts['avg_experts']:.2f}, {counts['sparsity']:.2f}"


def table3(result: Any) -> str:
    """Exact match by task, for each number of adapters served together."""
    columns = ("base", "merged", "woven", "same")
    rows = [
        [str(row["num_adapters"]), row["task"], *(percent(row[name]) for name in columns)]
        for row in result["rows"]
    ]
    header = ["adapters woven together", "task", "base", "merged", "woven", "same answer"]
    return result_table(result, header, rows)


def figure9(result: Any) -> str:
    """Weights in the paper's GB of 2^30 bytes, and KV tokens; ours / theirs."""
    rows = []
    for row in result["rows"]:
        ways = ("merged", "padded", "virtual")
        cells = [_weights(row, way) for way in ways] + [_tokens(row, way) for way in ways]
        rows.append([str(row["num_adapters"]), *cells])
    header = ["adapters", "merged, GiB", "padded, GiB", "virtual, GiB"]
    header += ["merged, KV tokens", "padded, KV tokens", "virtual, KV tokens"]
    return result_table(result, header, rows)


def _weights(row: Any, way: str) -> str:
    return f"{row[way]['weight_bytes'] / (1 << 30):.1f} / {row['paper'][way]['weight_gib']:.1f}"


def _tokens(row: Any, way: str) -> str:
    """The paper has no room for three merged models, and does not print padding's tokens."""
    ours, theirs = row[way]["kv_tokens"], row["paper"][way]["kv_tokens"]
    cell = "no room" if ours is None else f"{ours / 1e3:.0f}K"
    return cell if theirs is None else f"{cell} / {theirs / 1e3:.0f}K"


def figure5(result: Any) -> str:
    """Woven over base-only, a row for each number of adapters, alpha and rate."""
    rows = []
    for row in result["rows"]:
        cells = [str(row["adapters"]), f"{row['alpha']:g}", f"{row['rate']:g}"]
        cells += [ratio(row[metric]) for metric in ("ttft", "tpot")]
        cells += [f"{row['tpot_floor']:.3f}", ratio(row["tpot_over_floor"])]
        rows.append([*cells, ratio(row["prefill_throughput"]), ratio(row["decode_throughput"])])
    header = ["adapters", "alpha", "rate", "TTFT", "TPOT", "floor of TPOT", "TPOT - floor"]
    header += ["prefill tokens/s", "decode tokens/s"]
    return result_table(result, header, rows)


def figure6(result: Any) -> str:
    """Woven over merged servers, a row for each setting and skew."""
    settings = {"half": "half the cores", "equal": "as many cores"}
    metrics = ("ttft", "tpot", "prefill_throughput", "decode_throughput")
    rows = [
        [
            settings[row["setting"]],
            f"{row['alpha']:g} ({100 * row['hot_share']:.0f}%)",
            *(ratio(row[metric]) for metric in metrics),
        ]
        for row in result["rows"]
    ]
    header = ["woven on", "alpha (hot adapter)", "TTFT", "TPOT"]
    return result_table(result, [*header, "prefill tokens/s", "decode tokens/s"], rows)


def sweep(result: Any) -> str:
    """Figures 7 and 8: all turns of a traffic and metric together, a row a system."""
    rows = [
        [
            {"adapter": "one adapter", "base": "no adapter"}[row["traffic"]],
            row["metric"].upper(),
            f"{row['system']} / {row['over']}",
            ratio(row["wall"]),
            f"{row['wall']['low']:.3f} to {row['wall']['high']:.3f}",
            ratio(row["cpu"]),
            percent(row["same_tokens"]),
        ]
        for row in result["summary"]
    ]
    header = ["requests", "", "systems", "by the wall clock", "95% interval of the median"]
    header += ["by processor time", "same answer, %"]
    return result_table(result, header, rows)


def figure7(result: Any) -> str:
    """As `sweep`; then rerouting and tagging timed alone, as shares of a step, place by place."""
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for row in result["rows"]:
        if row["traffic"] == "adapter" and "estimate" in row:
            place = rows.setdefault((row["metric"], row["value"]), {})
            place[row["system"]] = sum(row["estimate"].values())
    lines = [
        [f"{_AXES[metric]} {value}", *(f"{100 * share:.2f}" for share in shares.values())]
        for (metric, value), shares in rows.items()
    ]
    kinds = list(next(iter(rows.values()), {}))
    estimates = table(["alone, % of a step of merged", *kinds], lines)
    return f"{estimates}\n\n{sweep(result)}" if lines else sweep(result)


_AXES = {"ttft": "TTFT, prompt of", "tpot": "TPOT, batch of"}


def reroute(result: Any) -> str:
    """Fused over unfused and gather; as a share of a layer; instructions of an id."""
    names = ("fused_over_unfused", "fused_out_over_unfused", "fused_over_gather")
    rows = [
        [str(row["num_tokens"]), *(ratio(row[name]["wall"]) for name in names)]
        for row in result["rows"]
    ]
    header = ["tokens", "fused / unfused", "the same, into a tensor that is there"]
    chains = table([*header, "fused / SGLang's gather, under EP"], rows)
    rows = [
        [
            str(row["num_tokens"]),
            _share(row["fused_over_layer"]["wall"]),
            _share(row["unfused_over_layer"]["wall"]),
        ]
        for row in result["layer_rows"]
    ]
    shares = table(["tokens", "fused, % of a MoE layer", "unfused, % of a MoE layer"], rows)
    return f"{chains}\n\n{shares}\n\n{_instructions(result['callgrind'])}\n\n{where(result)}"


def _share(spread: Mapping[str, float]) -> str:
    return f"{100 * spread['median']:.3f} ({100 * spread['q1']:.3f} to {100 * spread['q3']:.3f})"


def _instructions(counted: Any) -> str:
    if "skipped" in counted:
        return f"Instructions were not counted: {counted['skipped']}."
    found = [
        f"{row['instructions_per_id']:.1f} ({row['num_tokens']} tokens, int{row['id_bits']})"
        for row in counted["rows"]
    ]
    return f"Instructions for each id, by callgrind: {', '.join(found)}."


SHOWN_BOUND = 64  # of the bounds that were tried; the picture has all


def batching(result: Any) -> str:
    """A row a workload, at one bound."""
    rows = []
    for row in result["rows"]:
        if row["max_overtakes"] == SHOWN_BOUND:
            cells = [f"{row['experts']}, {row['popularity']}", str(row["max_running"])]
            cells += [f"{row['load']:g}", row["preference"]]
            ratios = [row[f"{name}_over_fcfs"] for name in ("experts", "adapters", "delay_p99")]
            rows.append([*cells, *map(ratio, ratios), f"{row['queue']['median']:.2f}"])
    header = ["experts, popularity", "running", "load", "prefers the adapter of"]
    header += ["distinct experts", "distinct adapters", "p99 of steps until admission", "queue"]
    return result_table(result, header, rows)


def batching_served(result: Any) -> str:
    """One load on two servers of the demo, the policy on over off: a row a bound."""
    names = ("adapters", "ttft_mean", "ttft_p99", "duration")
    rows = [
        [
            str(row["max_overtakes"]),
            str(result["max_running"]),
            str(row["rounds"]),
            *(ratio(row[f"{name}_over_fcfs"]) for name in names),
        ]
        for row in result["rows"]
    ]
    header = ["--max-overtakes", "running", "rounds", "distinct adapters at once"]
    header += ["mean TTFT", "p99 TTFT", "time for all"]
    return result_table(result, header, rows)


def turns(result: Any) -> str:
    """A row a server: tokens a second, and processor time of a token."""
    pairs = ("many_over_few", "half_over_few", "many_over_half")
    rows = [
        [row["server"], *(ratio(row[f"{pair}_{what}"]) for pair in pairs for what in _OF_TURNS)]
        for row in result["rows"]
    ]
    words = ["six adapters over three", "half the streams over all", "six over half the streams"]
    header = ["server", *(f"{each}, {what}" for each in words for what in _OF_TURNS.values())]
    return result_table(result, header, rows)


_OF_TURNS = {"rate": "tokens a second", "cpu": "processor time"}
