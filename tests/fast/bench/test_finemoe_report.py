"""What benches of experts in tiers write is what their tables and pictures read.

Those on traces run over a small made trace; of those that serve, windows and measurements are made,
and their own functions make the rows.
"""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.common.record import write_result
from bench.elasticmoe.load import Ask
from bench.finemoe import caching, large, prediction, regimes, served, speed
from bench.finemoe.large_model import LargeShape
from bench.finemoe.tier_servers import Counted, Window
from bench.report import plots
from bench.report.finemoe_tables import FINE_TABLES, PLOTTED, at
from bench.report.readme_tables import TABLES
from sgl_esft.offload.advise import Machine
from sgl_esft.offload.speed import Speed

LAYERS, EXPERTS, TOP_K = 9, 64, 6
NEVER = {"semantic_recall", "semantic_pearson"}  # of these traces
_COUNT = itertools.count(1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks' results of both benches on traces, in a folder."""
    folder, draw = tmp_path_factory.mktemp("finemoe"), np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for task in ("one", "two"):
        kinds = draw.random((20, LAYERS, EXPERTS))
        lengths = draw.integers(40, 60, 10)
        of = draw.integers(0, len(kinds), lengths.sum())
        scores = kinds[of] + draw.random((len(of), LAYERS, EXPERTS)) * 0.2
        ids = np.argsort(-scores, axis=2)[:, :, :TOP_K].swapaxes(0, 1)
        weights = -np.sort(-draw.random(ids.shape), axis=2)
        arrays |= {
            f"{task}_lengths": lengths.astype(np.int32),
            f"{task}_ids": ids.astype(np.uint8),
            f"{task}_weights": weights.astype(np.float16),
        }
    np.savez(folder / "trace.npz", **arrays)
    for bench in (prediction, caching):
        bench.main(["--trace", str(folder / "trace.npz"), "--quick", "--out", str(folder)])
    return folder


def window(speed: float) -> Window:
    """Another one each time."""
    number = next(_COUNT)
    counted = Counted(
        *(float(number * each) for each in (60, 40, 20, 12, 8, 4)), 0.0, 0.3 * number, 1e6 * number
    )
    times = tuple(speed * (1 + 0.01 * n) for n in range(4))
    return Window(times, times, times, 64, 64 * speed, counted)


def of_servers(folder: Path) -> None:
    """figure10, figure11, regimes, as from two rounds."""
    plan = served.ServedPlan(rounds=2, link_speeds=(0.3,))
    rounds = {
        0.3: [
            {phase: {name: window(0.1) for name in plan.systems} for phase in served.PHASES}
            for _ in range(2)
        ]
    }
    served.write(rounds, plan, 0.01, folder)
    few = regimes.RegimePlan(link_speeds=(0.3, 3.0), batches=(1, 4), rounds=2)
    windows = {b: {way: window(0.1) for way in regimes.WAYS} for b in few.batches}
    found = {r: regimes.Regime("regression", [windows, windows]) for r in few.link_speeds}
    for name in ("finemoe_regimes", "finemoe_regimes_decoding"):
        write_result(name, {"rows": regimes.rows_of(found, few)}, folder=folder)


def test_prompts_are_asked_before_a_window_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token each, so that the window finds them in the prefix cache."""
    tokens: list[list[int]] = []

    def noted(url: str, asks: Sequence[Ask], concurrency: int) -> Window:
        tokens.append([each.num_tokens for each in asks])
        return window(0.1)

    monkeypatch.setattr(regimes, "window", noted)
    asks = [Ask("a", None, 16), Ask("b", "reverse", 20)]
    regimes.asked("http://none", asks, 2, is_decoding=True)
    regimes.asked("http://none", asks, 2, is_decoding=False)
    assert tokens == [[1, 1], [16, 20], [16, 20]]


def test_auto_is_compared_with_who_leads_it_most_and_its_choice_with_what_it_left() -> None:
    """Of three rounds the middle one counts."""
    tokens_per_s = {"lfu": 10.0, "finemoe": 16.0, "regression": 20.0, "auto": 18.0}
    windows = [
        {way: replace(window(0.1), seconds=64 / (slow * n)) for way, n in tokens_per_s.items()}
        for slow in (1.0, 0.5, 0.1)
    ]
    plan = regimes.RegimePlan(link_speeds=(1.0,), batches=(1,))
    found = {1.0: regimes.Regime("regression", [{1: each} for each in windows])}
    (row,) = regimes.rows_of(found, plan)
    assert row["auto_is"] == "regression"
    assert row["auto_over_best_fixed"]["median"] == pytest.approx(18 / 20)
    assert row["chosen_over_others"]["median"] == pytest.approx(20 / 16)


def of_predictions(folder: Path) -> None:
    """A row as speed.py's, and its summary."""
    row = {
        "rows": 16,
        "r": 0.3,
        "batch": 3,
        "with_adapters": True,
        "predicted_tokens_per_s": asdict(Speed(100.0, 90.0, 110.0)),
        "served_tokens_per_s": 104.0,
        "tokens_per_s": {
            "runs": 3,
            "min": 99.0,
            "q1": 99.5,
            "median": 103.0,
            "q3": 105.0,
            "max": 1,
        },
        "error": -0.038,
        "is_inside": True,
    }
    found = speed.summary([row])
    figures = {"paper": speed.PAPER, "wanted": speed.WANTED, **found, "with_drift": found}
    figures["rows"] = [row]
    write_result("finemoe_speed", figures, folder=folder)


def of_a_large_model(folder: Path) -> None:
    """Every system, two servers of each."""
    plan = large.LargePlan(LargeShape(), 20_000_000_000, rounds=2)
    storage = (Machine(0.01, 0.01, 1, 17_000_000), Machine(0.02, 0.01, 2, 17_000_000))
    windows = window(0.2), window(0.9), window(0.3)
    rounds = {
        name: [large.Measured(9.0, 17, 3, 18, *windows, storage) for _ in range(2)]
        for name in plan.systems
    }
    site = large.Site(folder, {"math": folder}, folder)
    large.write(rounds, plan, site, folder)


@pytest.fixture(scope="module")
def results(traced: Path) -> Path:
    for make in (of_servers, of_predictions, of_a_large_model):
        make(traced)
    return traced


def read(results: Path, name: str) -> Any:
    found = json.loads((results / f"{name}.json").read_text())
    return {**found, "command": "python -m bench.finemoe.served"}  # and not pytest's


def test_every_result_has_a_table(results: Path) -> None:
    assert {path.stem for path in results.glob("*.json")} == set(FINE_TABLES)
    assert FINE_TABLES.keys() <= TABLES.keys()
    assert PLOTTED.keys() == {name for name in plots.DRAWERS if name.startswith("finemoe")}


@pytest.mark.parametrize("name", FINE_TABLES)
def test_a_table_reads_what_its_bench_writes(results: Path, name: str) -> None:
    """No column is empty: a key that no row has would be one."""
    result, spec = read(results, name), FINE_TABLES[name]
    text = TABLES[name][1](result)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, rows = lines[0], lines[2:]
    assert rows
    assert all(len(row) == len(header) for row in rows)
    for column, words in enumerate(header):
        assert {row[column].strip("| ") for row in rows} != {"-"}, words
    for path in (*spec.shares, *spec.megabytes):
        assert path in (*spec.columns, spec.value)
    assert "The paper" in text
    assert "Ours" in text


def test_percent_and_ratios_are_told_apart(results: Path) -> None:
    result = read(results, "finemoe_figure4")
    first = TABLES["finemoe_figure4"][1](result).splitlines()[2]
    row = result["rows"][0]
    assert f"| {100 * row['fine']['recall']:.1f} |" in first
    assert 1 < 100 * row["fine"]["recall"] <= 100
    text = TABLES["finemoe_speed"][1](read(results, "finemoe_speed"))
    assert (
        "| 16 | 0.3 | 3 | yes | 100 | 90 | 110 | 104 | 103.000 (99.500 to 105.000) | -3.8 |" in text
    )
    assert "Of 1 points median error 3.8% (goal 6.0%) and worst error 3.8% (goal 15.0%)" in text


def test_rows_of_one_key_become_columns(results: Path) -> None:
    result = read(results, "finemoe_figure12")
    lines = TABLES["finemoe_figure12"][1](result).splitlines()
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    assert lines[0] == f"| task | rows | {' | '.join(ways)} |"
    wanted = [r for r in result["rows"] if (r["task"], r["num_rows"]) == ("two", 32)]
    cells = " | ".join(f"{100 * row['hit_rate']:.1f}" for row in wanted)
    assert f"| two | 32 | {cells} |" in lines


@pytest.mark.parametrize("name", PLOTTED)
def test_pictures_are_drawn_the_same_each_time(results: Path, name: str) -> None:
    text = plots.svg(name, read(results, name))
    assert ET.fromstring(text).tag.endswith("svg")
    assert text == plots.svg(name, read(results, name))


def test_what_the_paper_has_not_is_said(results: Path) -> None:
    said: Callable[[str], str] = lambda name: TABLES[name][1](read(results, name))  # noqa: E731
    assert "The paper has no such figure: maps and tests are of one data set." in said(
        "finemoe_shift"
    )
    assert "The paper has no such figure." in said("finemoe_large")
    assert "at 6 GB FineMoE's is 36, 25, 16 and 29% below" in said("finemoe_figure12")


def test_a_path_may_have_a_dot_of_its_own() -> None:
    row: Mapping[str, Any] = {"a.b": 1, "a": {"b": 2, "c": {"d": 3}}}
    assert (at(row, "a.b"), at(row, "a.c.d"), at(row, "a.x.y"), at(row, "x")) == (1, 3, None, None)
