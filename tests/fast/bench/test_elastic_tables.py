"""The tables of elastic scaling, as docs/results.md shows them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.report import elastic_tables
from bench.report.readme_tables import TABLES
from tests.fast.result_samples import SAMPLES

NAMES = list(elastic_tables.TABLES)


def made(name: str, **changes: Any) -> str:
    return TABLES[name][1]({**SAMPLES[name](), **changes})


def num_rows(text: str) -> int:
    return text.count("\n| ") - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_table_says_where_it_is_from_and_what_was_cut_short(name: str) -> None:
    text = made(name)
    assert text.endswith("`python -m b`, commit 0123456, 2 cores of Some CPU, none.")
    assert made(name, is_complete=False).endswith("The run was cut short.")


def test_gaps_are_in_milliseconds() -> None:
    text = made("elasticmoe_gap")
    assert "| 1 -> 2 | 2 | 50 | 50 | 0.500 (0.400 to 0.600) | 50 | 50 |" in text
    assert "1,234 requests went on meanwhile, 0 failed." in text
    assert num_rows(text) == 2


def test_figures_7_and_12_have_ratios_and_seconds() -> None:
    text = made("elasticmoe_figure7")
    ratio = "1.500 (1.400 to 1.600)"
    assert f"| 1 -> 2 | cold restart | {ratio} | 12.00 | {ratio} | 0.50 |" in text
    assert num_rows(text) == 8


def test_figure_8_is_in_bytes() -> None:
    assert "| elastic | 1.500 (1.400 to 1.600) | 200 MB |" in made("elasticmoe_figure8")


def test_figure_11_is_in_percent() -> None:
    text = made("elasticmoe_figure11")
    assert "| devices | seconds | memory, % | prepare, % | switch, % |" in text
    assert "| 1 -> 2 | 0.60 | 50.0 | 30.0 | 25.0 |" in text


def test_figure_9_weighs_windows_by_their_requests() -> None:
    text = made("elasticmoe_figure9")
    assert "| up | elastic | 100.0 | 60.0 | 90.0 |" in text
    assert num_rows(text) == 8
    rows = SAMPLES["elasticmoe_figure9"]()["rows"]
    rows[1]["requests"] = 30  # of the first strategy, share 0.5
    assert "| up | elastic | 100.0 | 55.0 | 90.0 |" in made("elasticmoe_figure9", rows=rows)
    assert "| up | elastic | 100.0 | - | - |" in made("elasticmoe_figure9", rows=rows[:1])


def test_figure_10_has_a_column_a_rate() -> None:
    assert "| colocated | 100.0 | 62.5 |" in made("elasticmoe_figure10")


def test_table_1_has_the_papers_beside_ours() -> None:
    text = made("elasticmoe_table1")
    ours = "0.900 (0.800 to 1.000)"
    assert f"| elastic | {ours} / 1.00 | {ours} / 0.66 | {ours} / 1.30 |" in text
    assert f"| extravagant | {ours} / - | {ours} / - | {ours} / - |" in text


def test_ablations_are_over_all_parts() -> None:
    ratio = "1.200 (1.100 to 1.300)"
    row = f"| - no_standby | {ratio} | 0.60 | 0.30 | {ratio} |"
    assert row in made("elasticmoe_ablation_up")
