"""Tables and pictures of what tests/repo/docs/test_generated.py has no result of: a GPU's figures,
and what was cut short. Those with a result are compared there, byte for byte.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from bench.common.record import RESULTS
from bench.report import plot_style, plots
from bench.report.readme_tables import TABLES

WORDS = "{http://www.w3.org/2000/svg}text"
KINDS = ("unfused chain", "standalone", "fused router")


def spread(median: float) -> dict[str, float]:
    ends = {"min": median - 0.2, "q1": median - 0.1, "q3": median + 0.1, "max": median + 0.2}
    return {**ends, "median": median}


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def on_a_gpu(**steps: Any) -> dict[str, Any]:
    origin = {
        "machine": {"cpu": "Some CPU", "cores": 2, "device": "none"},
        "command": "python -m b",
        "commit": "0123456789",
    }
    done = {name.replace("__", ": ").replace("_", " "): step for name, step in steps.items()}
    return {**origin, "evidence": "ran on hardware", "complete": True, "steps": done}


def gpu_reroute() -> dict[str, Any]:
    timed = {kind: spread(2.0) for kind in (*KINDS, "fused router minus router")}
    caches = {cache: {"microseconds_a_call": timed} for cache in ("warm_l2", "cold_l2")}
    over = {kind: spread(1.05) for kind in KINDS}
    step = {"num_tokens": 64, "num_adapters": 20, "floor": 1.02, "over_merged": over}
    kernels = {"plain": 9, "unfused chain": 14, "standalone": 10, "fused router": 9}
    nodes = {name: {"kernel": count, "memset": 1} for name, count in kernels.items()}
    return on_a_gpu(
        reroute__launches={"ok": True, "experts": "some", "nodes_a_layer": nodes},
        reroute__time={"ok": True, "rows": [{"num_tokens": n, **caches} for n in (1, 64)]},
        model_step={"ok": True, "rows": [step]},
    )


def gpu_serve() -> dict[str, Any]:
    row = {
        "batch_size": 64,
        "num_adapters": 20,
        "floor": 1.15,
        "rounds": 4,
        "ttft_over_plain": spread(1.1),
        "tpot_over_plain": spread(1.2),
        "tpot_points_over_floor": 0.05,
    }
    few = {"batch_size": 256, "num_adapters": 20, "floor": 1.6, "reason": "1 rounds: too few"}
    served = {"ok": True, "num_layers": 4, "rounds_left_out": 31, "rows": [row, few]}
    return on_a_gpu(serve=served)


def test_gpu_tables_show_floors_and_what_has_failed() -> None:
    sample = gpu_reroute()
    text = TABLES["gpu_reroute"][1](sample)
    assert "|  | 9 | 14 | 10 | 9 |" in text
    assert "| 64 | warm | 2.000 (1.900 to 2.100) |" in text
    assert "| 64 | 20 | 1.020 | 1.050 (0.950 to 1.150); +3.0 |" in text
    assert "Ran on hardware. `python -m b`, commit 0123456, 2 cores of Some CPU, none." in text
    sample["steps"]["model step"] = {"ok": False, "reason": "out of memory"}
    del sample["steps"]["reroute: time"]
    text = TABLES["gpu_reroute"][1](sample)
    assert "*model step*: failed: out of memory" in text
    assert "*reroute: time*: not run: no result" in text


def test_gpu_answers_show_the_row_that_is_most_off() -> None:
    row = {"server": "24 rows", "phase": "prompts", "rounding": 0.25, "distance": 4.0}
    tiers = {
        "ok": True,
        "device": "H200",
        "rows": [{**row, "model": "base", "off": 0.125}, {**row, "model": "a00", "off": 0.5}],
        "milliseconds_a_token": {"24 rows": {"runs": 1, "median": 3.0}},
        "counted": {"24 rows": {"demand": 7.0}},
    }
    sample = on_a_gpu(**{"tiers: equality": tiers})
    text = TABLES["gpu_answers"][1](sample)
    assert "| 24 rows | prompts | a00 | 0.25 | 0.5 | 4 |" in text
    assert "24 rows 3.000 (one run). Experts read: 24 rows 7." in text
    assert "*quantised: equality*: not run" in text
    sample["steps"]["old"] = {"ok": True, "device": "H100"}
    assert "on H200: tiers: equality; on H100: old." in TABLES["gpu_answers"][1](sample)


def test_gpu_serve_shows_cells_that_have_no_ratio() -> None:
    text = TABLES["gpu_serve"][1](gpu_serve())
    ratios = "1.100 (1.000 to 1.200) | 1.200 (1.100 to 1.300)"
    assert f"| 64 | 20 | {ratios} | 1.150 | +5.0 | 4 |" in text
    assert "| 256 | 20 | - | - | 1.600 | not run | 1 rounds: too few |" in text
    assert "4 layers; 31 runs of a cell had no time." in text


def test_an_adapter_that_is_off_is_no_result() -> None:
    sample = gpu_serve()
    step = {"ok": True, "tokens": 8, "off": 0.01, "rounding": 0.02, "distance": 0.5}
    sample["steps"]["serve: equality"] = step
    text = TABLES["gpu_serve"][1](sample)
    assert "of 8 tokens: an adapter is 0.01 off its merged model, the woven base 0.02" in text
    step |= {"ok": False, "reason": "off by more than 2 roundings"}
    text = TABLES["gpu_serve"][1](sample)
    assert "*serve: equality*: failed: off by more than 2 roundings" in text
    assert "an adapter is" not in text


@pytest.mark.parametrize(
    ("name", "sample"), [("gpu_reroute", gpu_reroute), ("gpu_serve", gpu_serve)]
)
def test_gpu_pictures_have_units_and_no_date(name: str, sample: Any) -> None:
    text = plots.svg(name, sample())
    words = {"".join(each.itertext()) for each in ET.fromstring(text).iter(WORDS)}
    assert any("[" in each for each in words)
    assert "<dc:date>" not in text
    assert text == plots.svg(name, sample())


@pytest.mark.parametrize(
    "name", ["expertweave_figure5", "expertweave_figure7", "elasticmoe_figure7", "lifecycle_load"]
)
def test_what_was_cut_short_says_so(name: str) -> None:
    said, mark = "The run was cut short.", "is_complete"
    if name == "expertweave_figure7":
        mark = "complete"
    result = measured(name)
    texts = [TABLES[name][1]({**result, mark: is_whole}) for is_whole in (True, False)]
    assert [said in text for text in texts] == [False, True]


def test_windows_are_weighed_by_their_requests() -> None:
    result = measured("elasticmoe_figure9")
    windows = ((-2.5, 10, 1.0), (2.5, 30, 0.5), (27.5, 10, 0.7))
    keys = ("at_s", "requests", "share")
    rows = [
        {"strategy": "elastic", "step": "up", **dict(zip(keys, each, strict=True))}
        for each in windows
    ]
    text = TABLES["elasticmoe_figure9"][1]({**result, "rows": rows})
    assert "| up | elastic | 100.0 | 55.0 | - |" in text


def test_of_several_rounds_the_median_and_the_extremes_are_said() -> None:
    by_round = (0.5, 1.0, 0.8)
    step = {"strategy": "elastic", "step": "up", "at_s": 2.5, "rate": 0.5, "requests": 10}
    rows = [{**step, "round": each, "share": share} for each, share in enumerate(by_round)]
    figures = ("elasticmoe_figure9", "elasticmoe_figure10")
    over_time, by_rate = (TABLES[name][1]({**measured(name), "rows": rows}) for name in figures)
    assert "| up | elastic | - | 80.0 (50.0 to 100.0) | - |" in over_time
    assert "| elastic | 80.0 (50.0 to 100.0) |" in by_rate


def test_ids_are_the_same_whatever_the_processor_rounds() -> None:
    text = '<g clip-path="url(#p{0})"/><use xlink:href="#m0123456789"/><clipPath id="p{0}"/>#{0}'
    one, other = (
        plot_style.with_plain_ids(text.format(each)) for each in ("262f5d0682", "d5566ba9c2")
    )
    assert one.replace("262f5d0682", "d5566ba9c2") == other, "colours are left alone"
    assert one.startswith('<g clip-path="url(#id0)"/><use xlink:href="#id1"/><clipPath id="id0"/>')
