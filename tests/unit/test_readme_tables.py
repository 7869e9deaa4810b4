"""The tables of the memory benches, as the README shows them."""

from __future__ import annotations

from typing import Any

from scripts.readme_tables import TABLES

SPREAD = {"min": 0.1, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 2.0}
BOTH = {"wall": SPREAD, "cpu": {**SPREAD, "median": 0.6}}
ORIGIN: dict[str, Any] = {
    "machine": {"cpu": "Some CPU", "cores": 2, "device": "none"},
    "command": "python -m b",
    "commit": "0123456789",
}
CELL = "0.500 (0.250 to 0.750)"


def table(name: str, **result: Any) -> str:
    return TABLES[name][1]({**ORIGIN, **result})


def num_rows(text: str) -> int:
    return text.count("\n| ") - 1


def test_vmm() -> None:
    rows = [
        {"kind": kind, "operation": operation, "per": per, "over_memcpy": SPREAD}
        for kind, operation, per in [
            ("raw", "reserve", "reservation"),
            ("raw", "map", "page"),
            ("raw", "map", "page of a run"),
            ("pooled", "map_slots", "page of a run"),
        ]
    ]
    text = table("vmm", rows=rows)
    assert f"| map | {CELL} | {CELL} | - | {CELL} |" in text
    assert f"| reserve | {CELL} | - | - | - |" in text
    assert num_rows(text) == 6
    assert text.endswith("`python -m b`, commit 0123456, 2 cores of Some CPU, none.")


def test_adapter_load() -> None:
    places = {"warm": BOTH, "cold": BOTH, "lazy": BOTH, "padded": BOTH}
    text = table("adapter_load", over_memcpy=places, unload_over_memcpy=places)
    cpu = "0.600 (0.250 to 0.750)"
    assert f"| virtual, pages in the pool | {CELL} | {cpu} | {CELL} |" in text
    assert num_rows(text) == 4


def test_moe_layer() -> None:
    kinds = ("virtual", "virtual_small_pages", "plain_small_pages", "plain_huge_pages")
    rows = [{"num_tokens": n, "over_plain": dict.fromkeys(kinds, BOTH)} for n in (1, 8)]
    text = table("moe_layer", rows=rows)
    assert f"| 8 | {CELL} | 0.600 (0.250 to 0.750) | {CELL} | {CELL} |" in text
    assert num_rows(text) == 2


def test_expert_memory() -> None:
    merged = {"weight_bytes": 31.4e9, "kv_tokens": None, "fragmentation": None}
    other = {"weight_bytes": 41.72e9, "kv_tokens": 478_693, "fragmentation": 1.0031}
    row = {"num_adapters": 3, "max_experts": 12, "merged": merged}
    rows = [
        {"adapters": "table1", **row, "padded": other, "virtual": other},
        {"adapters": "published", **row, "padded": other, "virtual": other},
    ]
    text = table("expert_memory", rows=rows)
    cell = "41.7 GB, 479K (1.003)"
    assert f"| 3 | 12 | 31.4 GB, no room | {cell} | {cell} |" in text
    assert "| 3 published | 12 |" in text
