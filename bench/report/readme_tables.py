"""The documents' result tables, from bench/results: `python -m bench.report.readme_tables`.

    bench/results/*.json -> [filled] -> README.md, docs/results.md, between their table markers
    the papers' evaluations: paper_tables.py, elastic_tables.py, finemoe_tables.py; quantised
    experts: quantised_tables.py; on a GPU: gpu_tables.py; faults: fault_tables.py; pictures:
    plots.py

A result that is not there yet reads "not yet measured". A test holds the documents to the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.report import (
    elastic_tables,
    fault_tables,
    finemoe_tables,
    gpu_tables,
    paper_tables,
    quantised_tables,
)
from bench.report.markdown import percent, ratio, result_table, table, where

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "results.md")

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """The text with every marked table made anew. Raises KeyError for an unknown table."""

    def made(found: re.Match[str]) -> str:
        title, make = TABLES[found[2]]
        path = results / f"{found[2]}.json"
        body = make(json.loads(path.read_text())) if path.exists() else "Not yet measured."
        picture = _picture(found[2]) if path.exists() else ""
        return f"{found[1]}{title}\n\n{picture}{body}\n{found[3]}"

    return _TABLE.sub(made, text)


def _picture(name: str) -> str:
    """The line that shows a result's picture (bench/report/plots.py); nothing where it has none."""
    words = PLOTTED.get(name)
    return f"![{words}](pictures/{name}.svg)\n\n" if words else ""


def _zoo(result: Any) -> str:
    """Rows as `python -m sgl_esft.zoo evaluate --json` writes them, bare or in a result file."""
    is_bare = isinstance(result, list)
    rows = [
        [row["task"], *(percent(row[column]) for column in ("base", "merged", "woven", "same"))]
        for row in (result if is_bare else result["rows"])
    ]
    origin = "`python -m sgl_esft.zoo evaluate`" if is_bare else where(result)
    header = ["task", "base", "merged", "woven", "same answer"]
    return f"{table(header, rows)}\n\n{origin}"


def _overhead(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        wall, cpu = row["woven_over_plain"], row["woven_over_plain_cpu"]
        rows.append([str(row["num_requests"]), *map(ratio, (wall, cpu)), str(row["pairs"])])
    header = ["requests in the batch", "by the wall clock", "by processor time", "pairs of runs"]
    return result_table(result, header, rows)


def _vmm(result: Any) -> str:
    """A row for each thing done; raw calls to the backend beside tensors on a pool."""
    found = {(r["kind"], r["operation"], r["per"]): r["over_memcpy"] for r in result["rows"]}

    def cell(kind: str, operation: str, per: str) -> str:
        spread = found.get((kind, operation, per))
        return ratio(spread) if spread else "-"

    rows = []
    for raw, pooled in _VMM_ROWS.items():
        one = "reservation" if raw == "reserve" else "page"
        cells = [cell("raw", raw, one), cell("raw", raw, "page of a run")]
        cells += [cell("pooled", pooled, "page"), cell("pooled", pooled, "page of a run")]
        rows.append([raw.replace("_", " "), *cells])
    header = ["", "one page", "a page of a run", "pooled, one page", "pooled, a page of a run"]
    return result_table(result, header, rows)


# Operation of the backend -> what a virtual tensor on a pool has for it.
_VMM_ROWS = {
    "reserve": "",
    "create": "map_slots_cold",
    "map": "map_slots",
    "set_access": "",
    "unmap": "unmap_slots",
    "destroy": "trim",
}


def _adapter_check(result: Any) -> str:
    over = result["over_unchecked"]
    rows = [["into host memory", ratio(over["wall"]), ratio(over["cpu"])]]
    return result_table(result, ["read", "by the wall clock", "by processor time"], rows)


def _first_token(result: Any) -> str:
    rows = [[f"{result['num_starts'] * result['num_pairs']}", ratio(result["ratio"])]]
    return result_table(result, ["pairs", "time to the first token"], rows)


def _adapter_load(result: Any) -> str:
    load, unload = result["over_memcpy"], result["unload_over_memcpy"]
    rows = [
        [
            _PLACES[name],
            *(ratio(load[name][clock]) for clock in ("wall", "cpu")),
            ratio(unload[name]["wall"]),
        ]
        for name in _PLACES
        if name in load
    ]
    header = ["memory", "load, by the wall clock", "load, by processor time", "unload"]
    return result_table(result, header, rows)


_PLACES = {
    "warm": "virtual, pages in the pool",
    "cold": "virtual, pages created",
    "lazy": "virtual, faulted in",
    "padded": "padded",
}


def _moe_layer(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        over = row["over_plain"]
        cells = [over["virtual"]["wall"], over["virtual"]["cpu"]]
        cells += [over["virtual_small_pages"]["wall"], over["plain_huge_pages"]["wall"]]
        rows.append([str(row["num_tokens"]), *map(ratio, cells)])
    header = ["tokens", "virtual", "virtual, by processor time", "virtual, 4 KiB pages"]
    header += ["plain, huge pages"]
    return result_table(result, header, rows)


def _token_time(result: Any) -> str:
    rows = []
    for subject, found in result["subjects"].items():
        for pair in (name for name in found if "/" in name):
            wall = found[pair]["wall"]
            low, high = wall["mean_95"]
            mean = f"{wall['mean']:.4f} ({low:.4f} to {high:.4f})"
            rows.append([subject, pair, ratio(wall), mean, ratio(found[pair].get("cpu"))])
    header = ["requests of", "servers", "by the wall clock", "mean, with 95%", "by processor time"]
    calls = [_calls_a_step(name, found["calls"]) for name, found in result["subjects"].items()]
    note = (
        f"{result['starts']} starts. Functions that a scheduler calls in a step, this over other: "
        f"{'; '.join(calls)}. "
    )
    return result_table(result, header, rows, note)


def _calls_a_step(subject: str, calls: Mapping[str, Any]) -> str:
    return f"{subject} {calls['this']:.0f} / {calls['other']:.0f} = {calls['this / other']:.4f}"


def _expert_memory(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        ways = [row[way] for way in ("merged", "padded", "virtual")]
        who = f"{row['num_adapters']}{' published' if row['adapters'] == 'published' else ''}"
        rows.append([who, str(row["max_experts"]), *map(_footprint, ways)])
    header = ["adapters", "E_max", "merged", "padded", "virtual"]
    return result_table(result, header, rows)


def _footprint(way: Mapping[str, Any]) -> str:
    """Weights, KV cache, F_mem: `41.7 GB, 479K (1.003)`."""
    tokens = way["kv_tokens"]
    room = "no room" if tokens is None else f"{tokens / 1e3:.0f}K"
    cell = f"{way['weight_bytes'] / 1e9:.1f} GB, {room}"
    return cell if way["fragmentation"] is None else f"{cell} ({way['fragmentation']:.3f})"


def _load_test(result: Any) -> str:
    """Below it: what twice as many adapters as slots cost in throughput."""
    rows = [_load_row(row) for row in result["rows"]]
    crowded = result["crowding"]
    note = ""
    if crowded:
        note = (
            f"Tokens a second with {crowded['adapters']} adapters on {result['slots']} slots, over "
            f"{result['slots']} adapters on them: {ratio(crowded['all_over_slots'])}. "
        )
    return result_table(result, _LOAD_HEADER, rows, note)


def _load_row(row: Mapping[str, Any]) -> list[str]:
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


_LOAD_HEADER = [
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


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "zoo": (
        "The demo, exact match on held-out prompts in percent; the last column says how often\n"
        "woven and merged gave the same answer:",
        _zoo,
    ),
    "overhead": (
        "Throughput of requests without an adapter, weaving on over weaving off, median and\n"
        "quartiles; above 0.97 is the goal:",
        _overhead,
    ),
    "vmm": (
        "Virtual memory calls on the host, each over a memcpy of the page, median and quartiles:",
        _vmm,
    ),
    "adapter_check": (
        "Reading an adapter with the look for NaNs, over reading it without:",
        _adapter_check,
    ),
    "first_token": (
        "What stands before SGLang, with a restricted key: this checkout over one before the "
        "checks of fields and the time limits; 1.02 is the goal:",
        _first_token,
    ),
    "adapter_load": (
        "Loading an adapter from host memory over a memcpy of its bytes; warm, 1.5 is the goal:",
        _adapter_load,
    ),
    "moe_layer": (
        "A MoE layer on a virtual tensor with holes, time over a plain one's; 1.03 is the goal:",
        _moe_layer,
    ),
    "token_time": (
        "A decode step with tiers, quantised bases and LoRA in the tree, none of them used, over\n"
        "one of the commit before them, ab1afb8; 1.005 is the goal. `this again` is a\n"
        "second server of the same commit: what two servers differ by without a cause, as long as\n"
        "they live. Quartiles are of starts.",
        _token_time,
    ),
    "expert_memory": (
        "DeepSeek-V2-Lite on a 64 GiB device: weights, tokens of KV cache, F_mem in brackets:",
        _expert_memory,
    ),
    "expertweave_table1": (
        "The paper's ten adapters: most experts in a layer, average over layers, sparsity. The\n"
        "four with public data have fewer experts than the paper's of that name. The others are\n"
        "made to have the paper's maximum and average, so only their sparsity is a check:",
        paper_tables.table1,
    ),
    "expertweave_table3": (
        "The demo, exact match on held-out prompts in percent; the last column says how often\n"
        "woven and merged gave the same answer:",
        paper_tables.table3,
    ),
    "expertweave_figure5": (
        "Served load on the scaled model, woven over base-only, median and quartiles over rounds.\n"
        "The rate is a share of what base-only serves at saturation; the floor is what TPOT would\n"
        "be if a step took the time of its weights' bytes:",
        paper_tables.figure5,
    ),
    "expertweave_figure6": (
        "Two adapters woven, over a merged server on a core of its own for each, by skew; median\n"
        "and quartiles over rounds:",
        paper_tables.figure6,
    ),
    "expertweave_figure7": (
        "Rerouting fused and unfused over a merged model, all places of an axis together, median\n"
        "and quartiles of turns; what runs *again* is the noise of the method. 1.01 is the goal.\n"
        "Noise does not reach what rerouting and tagging take by themselves:",
        paper_tables.figure7,
    ),
    "expertweave_figure7_scaled": (
        "The same with DeepSeek-V2-Lite's 64 experts and 6 a token, in four layers of 512 x 384,\n"
        "where a step is long enough to compare with:",
        paper_tables.figure7,
    ),
    "expertweave_figure8": (
        "Virtual expert memory over padded, all places of an axis together, median and quartiles\n"
        "of turns; what runs *again* is the noise of the method. 1.01 is the goal:",
        paper_tables.sweep,
    ),
    "reroute": (
        "Native rerouting on a CPU over the paper's chain of torch operations (at most 0.2 is the\n"
        "goal, 0.05 the aim), over what it replaces under EP (1.0), and as a share of a MoE layer\n"
        "of DeepSeek-V2-Lite (0.5%); median and quartiles:",
        paper_tables.reroute,
    ),
    "batching": (
        "Composing batches by adapter (`--max-overtakes 64`, 20 adapters) over first come, first\n"
        "served, simulated; median and quartiles over traces. A load above 1 lets the queue grow:",
        paper_tables.batching,
    ),
    "batching_served": (
        "The same policy on a real server of the demo with six adapters, on over off, median and\n"
        "quartiles over rounds; 0 is a second server without it, that is noise:",
        paper_tables.batching_served,
    ),
    "expertweave_figure9": (
        "One device of 64 GiB, three adapters of table 1; ours / the paper's:",
        paper_tables.figure9,
    ),
    "lifecycle_load": (
        "Eight adapters on three slots while adapters are loaded, replaced, unloaded and pinned;\n"
        "every answer is compared with its merged model's. 2 is the goal for the 99th percentile\n"
        "of the time per output token, during loads over without:",
        _load_test,
    ),
    "lifecycle_load_elastic": (
        "The same on an elastic server, which besides is scaled between one and two devices; of\n"
        "eight adapters three are loaded at a time, and the others when they are asked for:",
        _load_test,
    ),
    "lifecycle_turns": (
        "Six adapters on three slots, twelve streams, beside three adapters, and beside three\n"
        "adapters and six streams, as large a batch as the slots leave six adapters:",
        paper_tables.turns,
    ),
    **gpu_tables.TABLES,
    **elastic_tables.TABLES,
    **fault_tables.TABLES,
    **finemoe_tables.TABLES,
    **quantised_tables.TABLES,
}

# Results with a picture -> what it shows.
PLOTTED = {
    "expertweave_figure5": "TTFT, TPOT, throughput over base-only, by arrival rate, skew, adapters",
    "expertweave_figure6": "TTFT, TPOT and throughput over merged servers, by skew",
    "expertweave_figure7": "TTFT by prompt length, TPOT by batch size, fused, unfused, over merged",
    "expertweave_figure7_scaled": "The same, with V2-Lite's experts scaled down",
    "expertweave_figure8": "TTFT by prompt length and TPOT by batch size, virtual over padded",
    "reroute": "Time of rerouting by number of tokens, over the unfused chain and over a MoE layer",
    "batching": "Distinct experts and steps until admission, by the bound on overtakes",
    "gpu_reroute": "Microseconds of a call, and a decode step over merged with its floor",
    "gpu_serve": "TTFT and TPOT over plain SGLang, by batch size and number of adapters",
    "expertweave_figure9": "Weights, KV cache of merged, padded, virtual for 1, 2 and 3 adapters",
    "lifecycle_load": "Pace of running streams while adapters change, and longest waits",
    **elastic_tables.PLOTTED,
    **finemoe_tables.PLOTTED,
}


def main() -> None:
    """Write the documents' tables."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
