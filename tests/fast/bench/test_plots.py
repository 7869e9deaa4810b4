"""Pictures of results: the committed ones are drawn anew, and nothing else makes them differ."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from bench.common.record import RESULTS
from bench.report import plot_style, plots, readme_tables
from tests.fast.result_samples import SAMPLES

MEASURED = [name for name in plots.DRAWERS if (RESULTS / f"{name}.json").exists()]
TEXT = "{http://www.w3.org/2000/svg}text"


def result(name: str) -> plots.Result:
    """The measured one where there is one, else a sample."""
    if name in MEASURED:
        return json.loads((RESULTS / f"{name}.json").read_text())
    return SAMPLES[name]()


def words_in(svg: str) -> set[str]:
    return {"".join(each.itertext()) for each in ET.fromstring(svg).iter(TEXT)}


@cache
def drawn(name: str) -> str:
    return plots.svg(name, result(name))


@pytest.mark.parametrize("name", MEASURED)
def test_committed_pictures_are_those_of_the_results(name: str) -> None:
    assert (plots.PICTURES / f"{name}.svg").read_text() == drawn(name)


@pytest.mark.parametrize("name", plots.DRAWERS)
def test_pictures_are_small_have_units_and_a_background(name: str) -> None:
    text = drawn(name)
    assert len(text) < 300_000
    assert any("[" in each for each in words_in(text)), "an axis with its unit"
    assert "fill: #ffffff" in text.partition("</g>")[0]
    assert "<dc:date>" not in text


def test_the_same_result_gives_the_same_bytes() -> None:
    assert plots.svg("expertweave_figure7", SAMPLES["expertweave_figure7"]()) == plots.svg(
        "expertweave_figure7", SAMPLES["expertweave_figure7"]()
    )


def test_samples_are_drawn_where_there_is_a_result_too() -> None:
    for name in set(SAMPLES) & set(MEASURED):
        assert words_in(plots.svg(name, SAMPLES[name]()))


def test_figure_5_has_a_panel_an_alpha_and_a_line_a_number_of_adapters() -> None:
    words = words_in(plots.svg("expertweave_figure5", SAMPLES["expertweave_figure5"]()))
    assert {"alpha 1", "alpha 0.1", "5 adapters", "20 adapters", "base-only"} <= words
    assert "floor of 20 adapters" in words


def test_figures_7_and_8_have_a_line_a_system_and_the_noise() -> None:
    words = words_in(plots.svg("expertweave_figure7", SAMPLES["expertweave_figure7"]()))
    assert {"fused", "unfused", "merged again", "one adapter: TTFT", "no adapter: TPOT"} <= words
    assert {"goal: 1.03", "goal: 1.01"} <= words


def test_the_load_test_has_a_goal_and_a_line_an_adapter() -> None:
    words = words_in(plots.svg("lifecycle_load", SAMPLES["lifecycle_load"]()))
    assert {"zipf", "round robin", "goal: 2", "longest wait [s]"} <= words


def test_a_sweep_that_was_cut_short_is_drawn() -> None:
    sample = SAMPLES["expertweave_figure8"]()
    sample["rows"] = [row for row in sample["rows"] if row["metric"] == "ttft"]
    assert "one adapter: TTFT" in words_in(plots.svg("expertweave_figure8", sample))


def test_there_is_a_result_to_draw() -> None:
    assert "expertweave_figure9" in MEASURED


def test_a_missing_result_is_named_and_nothing_is_drawn(tmp_path: Path) -> None:
    assert plots.draw(tmp_path, tmp_path) == list(plots.DRAWERS)
    assert list(tmp_path.iterdir()) == []


def test_draw_writes_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "expertweave_figure9.json").write_text(
        (RESULTS / "expertweave_figure9.json").read_text()
    )
    assert "expertweave_figure9" not in plots.draw(tmp_path, tmp_path)
    assert (tmp_path / "expertweave_figure9.svg").read_text() == drawn("expertweave_figure9")


def test_a_changed_result_changes_the_picture() -> None:
    changed = result("expertweave_figure9")
    changed["rows"][0]["virtual"]["weight_bytes"] *= 1.1
    assert plots.svg("expertweave_figure9", changed) != drawn("expertweave_figure9")


def test_the_documents_show_every_picture() -> None:
    assert set(readme_tables.PLOTTED) == set(plots.DRAWERS)


def test_ids_are_the_same_whatever_the_processor_rounds() -> None:
    text = '<g clip-path="url(#p{0})"/><use xlink:href="#m0123456789"/><clipPath id="p{0}"/>#{0}'
    one, other = (
        plot_style.with_plain_ids(text.format(each)) for each in ("262f5d0682", "d5566ba9c2")
    )
    assert one.replace("262f5d0682", "d5566ba9c2") == other, "colours are left alone"
    assert one.startswith('<g clip-path="url(#id0)"/><use xlink:href="#id1"/><clipPath id="id0"/>')
