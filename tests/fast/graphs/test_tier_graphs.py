"""SGLang's breakable decode graphs over experts in tiers: the host decides between the graphs.

a tiny base and three adapters -> tier_steps.py, in processes of its own -> [judged here]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.fast.graphs.test_decode_graphs import ROUNDING, one_step_of, run_ranks

NUM_LAYERS = 2  # of experts
Seen = Mapping[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Any]]:
    """By case, what each rank saw."""
    return run_ranks("tests.fast.graphs.tier_steps", tmp_path_factory.mktemp("tiers"))


def in_tiers(seen: Mapping[str, list[Any]]) -> list[Seen]:
    return [rank for case, ranks in seen.items() if case != "whole" for rank in ranks]


def test_every_replay_answers_as_the_eager_step(seen: Mapping[str, list[Any]]) -> None:
    for rank in in_tiers(seen):
        wrong = [
            f"{step['name']}: off by {step['off']}"
            for step in rank["steps"]
            if not (step["off"] < ROUNDING and step["is_same_token"])  # NaN is wrong, too
        ]
        assert not wrong
        assert rank["steps"]
        assert rank["failure"] is None


@pytest.mark.parametrize(
    "name", ["base alone", "two adapters and the base", "another in its place"]
)
def test_answers_are_those_with_every_expert_in_memory(
    seen: Mapping[str, list[Any]], name: str
) -> None:
    [whole], [tiered] = seen["whole"], seen["one rank"]
    assert (one_step_of(tiered, name) - one_step_of(whole, name)).abs().max() < ROUNDING


def test_under_dp_attention_too(seen: Mapping[str, list[Any]]) -> None:
    [whole], [first, second] = seen["whole"], seen["DP2"]
    expected = one_step_of(whole, "two adapters and the base")
    for found in (one_step_of(first, "unequal"), one_step_of(second, "the first idle")[:3]):
        assert (found - expected).abs().max() < ROUNDING
    assert torch.tensor([rank["counts"]["num_loads"] for rank in (first, second)]).all()


def test_a_graph_is_left_where_a_layers_experts_are_known_and_not_computed(
    seen: Mapping[str, list[Any]],
) -> None:
    """Rerouting is the last that a part computes; the next begins when the experts have."""
    [rank] = seen["one rank"]
    for graph in rank["graphs"]:
        *parts, last = graph["parts"]
        assert graph["num_breaks"] == len(parts) == NUM_LAYERS
        for part in parts:
            computed = [name for name in part if "empty" not in name]
            assert [name for name in computed if "reroute" in name] == computed[-1:]
        assert not any("reroute" in name for name in last)
        assert len(set(graph["replays"])) == 1, "every part, or none"
    assert sum(graph["replays"][0] for graph in rank["graphs"]) == len(rank["steps"])


def test_no_graph_holds_a_row(seen: Mapping[str, list[Any]]) -> None:
    """A row has another expert tomorrow. The router that asks for experts is in the graphs."""
    for rank in in_tiers(seen):
        for graph in rank["graphs"]:
            assert not any(graph["touches_rows"])
            assert sum(graph["touches_routers"]) == NUM_LAYERS


def test_experts_came_from_storage_and_from_host_memory(seen: Mapping[str, list[Any]]) -> None:
    for rank in in_tiers(seen):
        counts = rank["counts"]
        brought = counts["num_loads"] + counts["num_prefetches"]
        assert 0 < rank["from_host"] + rank["from_storage"] <= brought
        assert rank["from_storage"] > 0
    [rank] = seen["one rank"]
    assert rank["from_host"] > 0


def test_a_graphs_padding_asks_for_nothing(seen: Mapping[str, list[Any]]) -> None:
    """Batches of three are replayed as four."""
    [rank] = seen["one rank"]
    by_graph, eagerly = rank["asked"]
    assert by_graph == eagerly
    assert min(by_graph) > 0


def test_a_predictor_sees_what_it_would_see_eagerly(seen: Mapping[str, list[Any]]) -> None:
    [rank] = seen["predicting"]
    assert rank["embedded"] == 2 * len(rank["steps"])
    for graph in rank["graphs"]:
        assert graph["num_breaks"] == NUM_LAYERS + 1
        assert any("embedding" in name for name in graph["parts"][0])


def test_without_a_break_nothing_is_captured(seen: Mapping[str, list[Any]]) -> None:
    """What the host asks would be asked once, while nothing is computed."""
    [rank] = seen["one rank"]
    assert "GraphContractError" in rank["without_break"]
    assert "waits for the device" in rank["without_break"]


def test_a_break_that_is_run_in_a_capture_meets_nothing(seen: Mapping[str, list[Any]]) -> None:
    [rank] = seen["one rank"]
    assert rank["run_in_capture"] != "captured"
