"""The documents' result tables, from bench/results: `python -m scripts.readme_tables`.

    bench/results/*.json -> [filled] -> README.md, docs/results.md, between their table markers

A result that is not there yet reads "not yet measured". A test holds the documents to the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "results.md")

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """The text with every marked table made anew. Raises KeyError for an unknown table."""

    def made(found: re.Match[str]) -> str:
        title, table = TABLES[found[2]]
        path = results / f"{found[2]}.json"
        body = table(json.loads(path.read_text())) if path.exists() else "Not yet measured."
        return f"{found[1]}{title}\n\n{body}\n{found[3]}"

    return _TABLE.sub(made, text)


def _zoo(result: Any) -> str:
    """Rows as `python -m sgl_esft.zoo evaluate --json` writes them, bare or in a result file."""
    is_bare = isinstance(result, list)
    rows = [
        [row["task"], *(_percent(row[column]) for column in ("base", "merged", "woven", "same"))]
        for row in (result if is_bare else result["rows"])
    ]
    where = "`python -m sgl_esft.zoo evaluate`" if is_bare else _where(result)
    header = ["task", "base", "merged", "woven", "same answer"]
    return f"{_table(header, rows)}\n\n{where}"


def _overhead(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        wall, cpu = row["woven_over_plain"], row["woven_over_plain_cpu"]
        rows.append([str(row["num_requests"]), *map(_ratio, (wall, cpu)), str(row["pairs"])])
    header = ["requests in the batch", "by the wall clock", "by processor time", "pairs of runs"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


def _vmm(result: Any) -> str:
    """A row for each thing done; raw calls to the backend beside tensors on a pool."""
    found = {(r["kind"], r["operation"], r["per"]): r["over_memcpy"] for r in result["rows"]}

    def cell(kind: str, operation: str, per: str) -> str:
        spread = found.get((kind, operation, per))
        return _ratio(spread) if spread else "-"

    rows = []
    for raw, pooled in _VMM_ROWS.items():
        one = "reservation" if raw == "reserve" else "page"
        cells = [cell("raw", raw, one), cell("raw", raw, "page of a run")]
        cells += [cell("pooled", pooled, "page"), cell("pooled", pooled, "page of a run")]
        rows.append([raw.replace("_", " "), *cells])
    header = ["", "one page", "a page of a run", "pooled, one page", "pooled, a page of a run"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


# Operation of the backend -> what a virtual tensor on a pool has for it.
_VMM_ROWS = {
    "reserve": "",
    "create": "map_slots_cold",
    "map": "map_slots",
    "set_access": "",
    "unmap": "unmap_slots",
    "destroy": "trim",
}


def _adapter_load(result: Any) -> str:
    load, unload = result["over_memcpy"], result["unload_over_memcpy"]
    rows = [
        [
            _PLACES[name],
            *(_ratio(load[name][clock]) for clock in ("wall", "cpu")),
            _ratio(unload[name]["wall"]),
        ]
        for name in _PLACES
        if name in load
    ]
    header = ["memory", "load, by the wall clock", "load, by processor time", "unload"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


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
        rows.append([str(row["num_tokens"]), *map(_ratio, cells)])
    header = ["tokens", "virtual", "virtual, by processor time", "virtual, 4 KiB pages"]
    header += ["plain, huge pages"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


def _expert_memory(result: Any) -> str:
    rows = []
    for row in result["rows"]:
        ways = [row[way] for way in ("merged", "padded", "virtual")]
        who = f"{row['num_adapters']}{' published' if row['adapters'] == 'published' else ''}"
        rows.append([who, str(row["max_experts"]), *map(_footprint, ways)])
    header = ["adapters", "E_max", "merged", "padded", "virtual"]
    return f"{_table(header, rows)}\n\n{_where(result)}"


def _footprint(way: Mapping[str, Any]) -> str:
    """Weights, KV cache, F_mem: `41.7 GB, 479K (1.003)`."""
    tokens = way["kv_tokens"]
    room = "no room" if tokens is None else f"{tokens / 1e3:.0f}K"
    cell = f"{way['weight_bytes'] / 1e9:.1f} GB, {room}"
    return cell if way["fragmentation"] is None else f"{cell} ({way['fragmentation']:.3f})"


def _ratio(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['q1']:.3f} to {spread['q3']:.3f})"


def _where(result: Mapping[str, Any]) -> str:
    """Machine, commit and command of a result file."""
    machine = result["machine"]
    return (
        f"`{result['command']}`, commit {result['commit'][:7]}, {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['device']}."
    )


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


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
    "adapter_load": (
        "Loading an adapter from host memory over a memcpy of its bytes; warm, 1.5 is the goal:",
        _adapter_load,
    ),
    "moe_layer": (
        "A MoE layer on a virtual tensor with holes, time over a plain one's; 1.03 is the goal:",
        _moe_layer,
    ),
    "expert_memory": (
        "DeepSeek-V2-Lite on a 64 GiB device: weights, tokens of KV cache, F_mem in brackets:",
        _expert_memory,
    ),
}


def main() -> None:
    """Write the documents' tables."""
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))


if __name__ == "__main__":
    main()
