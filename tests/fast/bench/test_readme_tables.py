"""The tables of the memory benches, as the README shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.expertweave import figure9, table1
from bench.report import paper_tables
from bench.report.readme_tables import TABLES, filled
from tests.fast.result_samples import ORIGIN, SAMPLES

SPREAD = {"min": 0.1, "q1": 0.25, "median": 0.5, "q3": 0.75, "max": 2.0}
BOTH = {"wall": SPREAD, "cpu": {**SPREAD, "median": 0.6}}
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


def test_figure_5_has_the_floor_beside_the_measured() -> None:
    text = table("expertweave_figure5", **SAMPLES["expertweave_figure5"]())
    cells = "| 5 | 1 | 0.3 | 1.000 (0.900 to 1.100) | 1.100 (1.000 to 1.200) | 1.050 |"
    assert f"{cells} 0.050 (-0.050 to 0.150) |" in text
    assert num_rows(text) == 8


def test_figure_6_names_the_setting() -> None:
    text = table("expertweave_figure6", **SAMPLES["expertweave_figure6"]())
    assert "| half the cores | 0.32 (80%) | 1.000 (0.900 to 1.100) |" in text
    assert "| as many cores | 0.1 (93%) |" in text
    assert num_rows(text) == 4


def test_figures_7_and_8_show_the_noise_and_what_was_cut_short() -> None:
    sample = SAMPLES["expertweave_figure7"]()
    text = table("expertweave_figure7", **sample)
    cells = "1.200 (1.100 to 1.300) | 1.150 to 1.250 | 1.200 (1.100 to 1.300) | 100.0 |"
    assert f"| one adapter | TTFT | merged again / merged | {cells}" in text
    assert f"| no adapter | TPOT | unfused / merged | {cells}" in text
    assert "| TPOT, batch of 64 | 0.40 | 0.40 |" in text
    assert num_rows(text.partition("\n\n")[0]) == 4
    assert num_rows(table("expertweave_figure8", **sample)) == 12
    assert "cut short" not in text
    assert table("expertweave_figure8", **{**sample, "complete": False}).endswith(
        "The run was cut short."
    )


def test_reroute_shows_ratios_shares_and_instructions() -> None:
    sample = SAMPLES["reroute"]()
    text = table("reroute", **sample)
    assert "| 4096 | 0.100 (0.090 to 0.110) | 0.080 (0.072 to 0.088) |" in text
    assert "| 256 | 0.100 (0.090 to 0.110) | 1.000 (0.900 to 1.100) |" in text
    assert "Instructions for each id, by callgrind: 2.5 (64 tokens, int32)." in text
    skipped = table("reroute", **{**sample, "callgrind": {"skipped": "no valgrind"}})
    assert "Instructions were not counted: no valgrind." in skipped


def test_batching_shows_one_bound() -> None:
    sample = SAMPLES["batching"]()
    assert num_rows(table("batching", **sample)) == 0
    sample["rows"][0]["max_overtakes"] = paper_tables.SHOWN_BOUND
    text = table("batching", **sample)
    assert "| published, uniform | 16 | 1.2 | most running | 0.900 (0.800 to 1.000) |" in text
    assert num_rows(text) == 1


def test_batching_served_is_one_row() -> None:
    names = ("adapters", "ttft_mean", "ttft_p99", "duration")
    ratios = {f"{name}_over_fcfs": SPREAD for name in names}
    text = table("batching_served", max_overtakes=32, max_running=8, rounds=5, **ratios)
    assert f"| 32 | 8 | 5 | {CELL} | {CELL} | {CELL} | {CELL} |" in text


def test_gpu_tables_show_floors_and_what_has_failed() -> None:
    sample = SAMPLES["gpu_reroute"]()
    text = table("gpu_reroute", **sample)
    assert "|  | 9 | 14 | 10 | 9 |" in text
    assert "| 64 | warm | 2.000 (1.900 to 2.100) |" in text
    assert "| 64 | 20 | 1.020 | 1.050 (0.950 to 1.150); +3.0 |" in text
    assert "Ran on hardware. `python -m b`" in text
    sample["steps"]["model step"] = {"ok": False, "reason": "out of memory"}
    del sample["steps"]["reroute: time"]
    text = table("gpu_reroute", **sample)
    assert "*model step*: out of memory" in text
    assert "*reroute: time*: not yet run" in text


def test_gpu_serve_shows_cells_that_have_no_ratio() -> None:
    text = table("gpu_serve", **SAMPLES["gpu_serve"]())
    spread = "1.200 (1.100 to 1.300)"
    assert f"| 64 | 20 | 1.100 (1.000 to 1.200) | {spread} | 1.150 | +5.0 | 4 |" in text
    assert "| 256 | 20 | - | - | 1.600 | - | 1 rounds: too few |" in text


def test_table_1_says_where_a_row_is_from() -> None:
    text = table("expertweave_table1", **table1.measure())
    assert "| gate-math | 12, 7.04, 0.41 | 12, 7.04, 0.41 | reconstructed |" in text
    assert "| token-law | 10, 6.58, 0.34 | 9, 5.88, 0.35 | published |" in text
    assert "1.502 from the paper's averages (it prints 1.51)" in text
    assert num_rows(text) == 10


def test_table_3() -> None:
    row = {"num_adapters": 2, "task": "sum", "base": 0.0, "woven": 0.9, "merged": 0.9, "same": 1.0}
    text = table("expertweave_table3", rows=[row])
    assert "| 2 | sum | 0.0 | 90.0 | 90.0 | 100.0 |" in text


def test_figure_9_shows_ours_and_the_papers() -> None:
    text = table("expertweave_figure9", rows=figure9.measure())
    assert "| 2 | 58.5 / 58.6 | 39.3 / 39.0 | 36.2 / 36.2 | no room / 6K | 463K |" in text


def test_a_picture_stands_only_beside_a_result(tmp_path: Path) -> None:
    document = "<!-- table: figure5 -->\n<!-- end of table -->\n"
    assert "pictures/" not in filled(document, tmp_path)
    (tmp_path / "expertweave_figure5.json").write_text(json.dumps(SAMPLES["expertweave_figure5"]()))
    assert "](pictures/expertweave_figure5.svg)" in filled(document, tmp_path)
