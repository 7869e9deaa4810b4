"""The heat of experts, counted on tensors, against a loop that counts one token at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.http.record import OTHERS
from sgl_esft.weave.heat import MAX_NAMES, HeatSampler, SlotOwner, merged

LAYERS = (1, 2)
NUM_EXPERTS = 4
MATH = SlotOwner("math", {1: (0, 2)})
LAW = SlotOwner("law", {1: (3,), 2: (1,)})


def sampler(every: int = 1, owners: Mapping[int, SlotOwner] | None = None) -> HeatSampler:
    owned = {0: MATH, 1: LAW} if owners is None else owners
    return HeatSampler(LAYERS, 2, NUM_EXPERTS, every, lambda: owned, "cpu")


def step(
    heat: HeatSampler, ids: list[list[int]], tags: list[int], real: int | torch.Tensor | None = None
) -> None:
    """One forward pass in which both layers choose the same experts."""
    heat.begin_step(len(ids) if real is None else real)
    for layer_id in LAYERS:
        heat.layer(layer_id)(torch.tensor(ids), torch.tensor(tags, dtype=torch.int32))


def test_each_token_counts_for_its_adapter_and_experts() -> None:
    heat = sampler()
    step(heat, [[0, 1], [1, 3], [2, 0]], [-1, 0, 1])
    report = heat.report()
    assert report["layers"] == [1, 2]
    assert report["num_experts"] == NUM_EXPERTS
    assert report["sampled_steps"] == 1
    assert report["adapters"] == {
        "base": [[1, 1, 0, 0]] * 2,
        "math": [[0, 1, 0, 1]] * 2,
        "law": [[1, 0, 1, 0]] * 2,
    }


def test_a_step_reads_the_bases_expert_once_and_each_adapters_own() -> None:
    heat = sampler()
    # Expert 0: the base's, for base and law; math has its own, in layer 1.
    step(heat, [[0], [0], [0]], [-1, 0, 1])
    assert heat.report()["distinct_experts_per_step"] == {"mean": [2.0, 1.0], "last": [2, 1]}
    step(heat, [[1], [1]], [-1, 1])  # law has its own 1 in layer 2
    assert heat.report()["distinct_experts_per_step"] == {"mean": [1.5, 1.5], "last": [1, 2]}


def test_padding_and_no_expert_count_for_nobody() -> None:
    heat = sampler()
    step(heat, [[0, -1], [3, 3]], [-1, -1], real=1)
    step(heat, [[1, 2], [3, 3], [0, 1]], [0, -1, 1], real=torch.tensor([True, False, True]))
    assert heat.report()["adapters"] == {
        "base": [[1, 0, 0, 0]] * 2,
        "math": [[0, 1, 1, 0]] * 2,
        "law": [[1, 1, 0, 0]] * 2,
    }


def test_every_nth_step_is_sampled_the_first_among_them() -> None:
    heat = sampler(every=3)
    for number in range(7):  # steps 0, 3 and 6
        step(heat, [[number % NUM_EXPERTS]], [-1])
    report = heat.report()
    assert report["sampled_steps"] == 3
    assert report["adapters"]["base"][0] == [1, 0, 1, 1]


def test_a_step_that_is_announced_twice_or_runs_no_layer_is_no_step() -> None:
    heat = sampler(every=2)
    heat.begin_step(1)  # a replay of a graph
    heat.begin_step(1)
    step(heat, [[2]], [-1])
    step(heat, [[3]], [-1])
    assert heat.report()["adapters"]["base"][0] == [0, 0, 1, 0]


def test_a_slot_that_changes_hands_counts_for_who_has_it_then() -> None:
    owners = {0: MATH}
    heat = sampler(owners=owners)
    step(heat, [[0]], [0])
    owners[0] = LAW
    step(heat, [[1]], [0])
    adapters = heat.report()["adapters"]
    assert adapters["math"] == [[1, 0, 0, 0]] * 2
    assert adapters["law"] == [[0, 1, 0, 0]] * 2


def test_a_rank_that_serves_again_begins_at_zero() -> None:
    heat = sampler(every=2)
    empty = heat.report()
    step(heat, [[0, 1]], [0])
    heat.begin_step(1)
    heat.reset()
    assert heat.report() == empty
    step(heat, [[2, 3]], [-1])  # the first one is sampled, as ever
    assert heat.report()["adapters"] == {"base": [[0, 0, 1, 1]] * 2}
    assert heat.report()["sampled_steps"] == 1


def test_adapters_that_come_and_go_for_ever_are_not_all_told_apart() -> None:
    owners: dict[int, SlotOwner] = {1: LAW}
    heat = sampler(owners=owners)
    for number in range(MAX_NAMES + 5):
        owners[0] = SlotOwner(f"adapter-{number}", {})
        step(heat, [[0], [1]], [0, 1])
    adapters = heat.report()["adapters"]
    assert len(adapters) == MAX_NAMES + 2  # and the base, and the others
    assert adapters[OTHERS] == [[6, 0, 0, 0]] * 2  # those counted longest ago
    assert f"adapter-{MAX_NAMES + 4}" in adapters
    assert adapters["law"] == [[0, MAX_NAMES + 5, 0, 0]] * 2, "it is counted in every step"


def test_a_report_in_between_loses_nothing_and_counts_nothing_twice() -> None:
    heat = sampler()
    step(heat, [[0]], [-1])
    assert heat.report() == heat.report()
    step(heat, [[0]], [-1])
    assert heat.report()["adapters"]["base"] == [[2, 0, 0, 0]] * 2


def test_distinct_experts_are_told_layer_by_layer() -> None:
    told: list[tuple[int, int]] = []
    heat = HeatSampler(
        LAYERS, 2, NUM_EXPERTS, 1, dict, "cpu", lambda layer, number: told.append((layer, number))
    )
    step(heat, [[0, 3]], [-1])
    heat.report()
    assert told == [(1, 2), (2, 2)]


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1),
            st.lists(st.integers(-1, NUM_EXPERTS - 1), min_size=2, max_size=2),
        ),
        max_size=30,
    )
)
def test_counts_are_those_of_a_loop(tokens: list[tuple[int, list[int]]]) -> None:
    heat = sampler()
    step(heat, [ids for _, ids in tokens] or [[-1, -1]], [tag for tag, _ in tokens] or [-1])
    report = heat.report()
    names = {-1: "base", 0: "math", 1: "law"}
    expected = Counter((names[tag], e) for tag, ids in tokens for e in ids if e >= 0)
    found = Counter(
        {
            (name, e): number
            for name, layers in report["adapters"].items()
            for e, number in enumerate(layers[0])
            if number
        }
    )
    assert found == expected
    own = {(tag, e) for tag, e in read(tokens) if e in owned(tag)}
    shared = {e for tag, e in read(tokens) if e not in owned(tag)}
    assert report["distinct_experts_per_step"]["last"][0] == len(own) + len(shared)


def read(tokens: list[tuple[int, list[int]]]) -> set[tuple[int, int]]:
    return {(tag, e) for tag, ids in tokens for e in ids if e >= 0}


def owned(tag: int) -> tuple[int, ...]:
    return {0: MATH, 1: LAW}[tag].experts[1] if tag >= 0 else ()


def test_replicas_add_up() -> None:
    first, second = sampler(), sampler()
    step(first, [[0]], [-1])
    step(second, [[0, 1]], [0])
    step(second, [[0, 1]], [0])
    both = merged([first.report(), second.report()])
    assert both["sampled_steps"] == 3
    assert both["adapters"] == {"base": [[1, 0, 0, 0]] * 2, "math": [[2, 2, 0, 0]] * 2}
    assert both["distinct_experts_per_step"]["mean"] == pytest.approx([5 / 3, 5 / 3])
    assert merged([first.report()]) == first.report()


def test_into_a_graph_nothing_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_esft.weave.heat._is_capturing", lambda tensor: True)
    heat = sampler()
    step(heat, [[0]], [-1])
    assert heat.report()["sampled_steps"] == 0
