"""Figure 9, table 1 and table 3: counted rows against the paper's, answers compared by task."""

from __future__ import annotations

import pytest

from bench.expertweave import figure9, table1, table3
from sgl_esft.formats.adapter_shapes import TABLE_1
from sgl_esft.zoo.evaluate import Woven
from sgl_esft.zoo.taskset import Example

LAYERS, EXPERTS = 26, 64


def test_figure_9_is_the_papers_within_two_percent() -> None:
    rows = figure9.measure()
    assert [row["num_adapters"] for row in rows] == [1, 2, 3]
    for row in rows:
        for way, theirs in row["paper"].items():
            ours = row[way]["weight_bytes"] / (1 << 30)
            assert ours == pytest.approx(theirs["weight_gib"], rel=0.02)
    tokens = [row["virtual"]["kv_tokens"] for row in rows]
    assert tokens[1:] == pytest.approx([572e3, 477e3], rel=0.01)
    assert [row["merged"]["kv_tokens"] is None for row in rows] == [False, True, True]


def test_reconstructed_rows_have_the_papers_numbers_and_public_ones_are_counted() -> None:
    rows = table1.measure()["rows"]
    assert [row["adapter"] for row in rows] == list(TABLE_1)
    for row in rows:
        if row["source"] == "reconstructed":
            assert row["ours"] == pytest.approx(row["paper"], abs=0.02)
    public = {row["adapter"]: row["ours"] for row in rows if row["source"] != "reconstructed"}
    assert set(public) == {"gate-intent", "gate-law", "token-intent", "token-law"}
    assert public["gate-law"]["max_experts"] == 11


def test_fragmentation_is_the_papers_formula() -> None:
    """Ten dense adapters of E_max experts waste nothing; of half as many, 65 of 194 slots."""
    dense = [float(table1.E_MAX * LAYERS)] * 10
    assert table1.fragmentation(dense, EXPERTS, LAYERS) == 1.0
    half = [value / 2 for value in dense]
    assert table1.fragmentation(half, EXPERTS, LAYERS) == pytest.approx(194 / 129)
    assert table1.measure()["fragmentation"]["paper_counts"] == pytest.approx(1.502, abs=1e-3)


def test_table_3_compares_answer_by_answer() -> None:
    examples = {"a": [Example("1+1=", "2"), Example("1+2=", "3")]}
    woven = {"a": Woven(adapter=["2\n", "4"], base=["", "3"])}
    (row,) = table3.rows_of(examples, woven, {"a": ["2\n", "3"]})
    shares = {"base": 0.5, "woven": 0.5, "merged": 1.0, "same": 0.5}
    assert row == {"num_adapters": 1, "task": "a", **shares}
    assert table3.unequal([row]) == ["a with 1 adapters: woven 0.500, merged 1.000"]
    assert table3.unequal([{**row, "woven": 1.0}]) == []
