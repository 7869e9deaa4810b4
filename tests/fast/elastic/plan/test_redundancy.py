"""Redundant experts: against brute force, on published scores, who computes what, pages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import PlanError
from sgl_elastic.plan import redundancy
from sgl_elastic.plan.loss import Limits, Loss, plan_loss
from sgl_elastic.plan.pages import expert_slots, pages_of_slots
from sgl_elastic.plan.redundancy import (
    choose_copies,
    computing_rank,
    copies_by_layer,
    copy_pages,
    expert_load,
    fitting_copies,
    holders_of,
    layer_load,
    most_copy_pages,
    not_copied,
)
from sgl_elastic.types import ExpertCopy, Placement, RegionKind
from tests.fast.elastic.plan_samples import adapters_of, make_adapter, make_shape, shapes

SCORES = Path(__file__).resolve().parents[3] / "data" / "esft"


def placed(*homes: int) -> Placement:
    devices = tuple(sorted(set(homes)))
    return Placement(devices, homes, (0,) * len(devices))


def even(num_experts: int, num_devices: int) -> Placement:
    """In contiguous runs, as the first placement is."""
    homes = tuple(e * num_devices // num_experts for e in range(num_experts))
    return Placement(tuple(range(num_devices)), homes, (0,) * num_devices)


def heat_of(task: str) -> dict[int, list[int]]:
    """DeepSeek-V2-Lite's published share of tokens by expert, of every third layer."""
    scores = json.loads((SCORES / f"{task}-scores.json").read_text())["token_scores"]
    return {
        int(layer): [round(1e6 * by_expert[str(e)]) for e in range(len(by_expert))]
        for layer, by_expert in scores.items()
        if int(layer) % 3 == 0
    }


def least_cost(tokens: list[int], placement: Placement, num_copies: int) -> tuple[int, int]:
    """Over every set of places for the copies."""
    num_ranks, homes = placement.dp_size, holders_of(placement, (), 0)
    ranks = range(num_ranks)
    places = [(e, rank) for e in range(len(tokens)) for rank in ranks if rank not in homes[e]]
    costs = []
    for chosen in combinations(places, min(num_copies, len(places))):
        holders = [tuple(sorted({*ranks, *_of(chosen, e)})) for e, ranks in enumerate(homes)]
        costs.append(layer_load(tokens, holders, num_ranks).cost)
    return min(costs)


def _of(places: Iterable[tuple[int, int]], expert_id: int) -> list[int]:
    return [rank for expert, rank in places if expert == expert_id]


def test_choices_are_the_best_that_brute_force_finds_or_near() -> None:
    draw = random.Random(20)
    num_best, num_cases = 0, 150
    for _ in range(num_cases):
        num_devices = draw.choice([2, 3, 4])
        num_experts = draw.randint(num_devices, 7)
        num_copies = draw.randint(1, min(num_experts - 1, 3 if num_devices < 4 else 2))
        tokens = [int(1000 * draw.paretovariate(1.2)) for _ in range(num_experts)]
        homes = sorted((*range(num_devices), *draw.choices(range(num_devices), k=num_experts)))
        placement = placed(*draw.sample(homes, k=len(homes))[:num_experts])
        num_copies = min(num_copies, num_experts * (placement.dp_size - 1))
        copies = choose_copies({0: tokens}, placement, num_copies)
        ours = layer_load(tokens, holders_of(placement, copies, 0), placement.dp_size).cost
        best = least_cost(tokens, placement, num_copies)
        assert best <= ours
        assert ours[0] <= 1.25 * best[0], (tokens, placement, copies)
        num_best += ours == best
    assert num_best >= 0.85 * num_cases


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize(("task", "judge"), [("intent", "intent"), ("law", "law")])
def test_published_heat_is_balanced_by_a_few_copies(
    task: str, judge: str, num_devices: int
) -> None:
    heat, placement = heat_of(task), even(64, num_devices)
    loads = [expert_load(heat, placement, choose_copies(heat, placement, n)) for n in (0, 2, 4, 8)]
    assert loads[0].imbalance > 1.05
    assert all(more.imbalance <= max(less.imbalance, 1.021) for less, more in pairwise(loads))
    assert loads[2].imbalance < 1.04
    assert loads[3].imbalance < 1.021
    assert all(more.crossing_share < less.crossing_share for less, more in pairwise(loads))
    any_copies = tuple(
        ExpertCopy(layer_id, expert_id, (placement.homes[expert_id] + 1) % num_devices)
        for layer_id in heat
        for expert_id in random.Random(layer_id).sample(range(64), 8)
    )
    unplanned = expert_load(heat, placement, any_copies)
    assert loads[3].imbalance - 1 < (unplanned.imbalance - 1) / 3
    assert loads[3].crossing_share < unplanned.crossing_share


def test_copies_are_of_each_layers_own_hot_experts() -> None:
    heat = {1: [90, 1, 1, 1, 1, 1], 4: [1, 1, 1, 1, 1, 90]}
    copies = choose_copies(heat, placed(3, 3, 3, 7, 7, 7), 1)
    assert copies == (ExpertCopy(1, 0, 7), ExpertCopy(4, 5, 3))
    assert copies_by_layer(copies, 7) == {1: (0,)}
    assert copies_by_layer(copies, 3) == {4: (5,)}


def test_a_balanced_layer_spends_copies_on_crossings() -> None:
    """Both devices have the same; the copy of the hottest saves most crossings."""
    assert choose_copies({0: [10, 30, 30, 10]}, placed(0, 0, 1, 1), 2) == (
        ExpertCopy(0, 1, 1),
        ExpertCopy(0, 2, 0),
    )


@given(st.data())
def test_every_token_is_computed_once_and_on_its_own_device_where_it_can_be(
    data: st.DataObject,
) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    holders = tuple(sorted(data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
    expert_id = data.draw(st.integers(0, 300))
    ranks = [computing_rank(source, expert_id, holders) for source in range(num_ranks)]
    assert set(ranks) == set(holders)
    assert all(ranks[holder] == holder for holder in holders)
    counts = [ranks.count(holder) for holder in holders]
    assert max(counts) - min(counts) <= 1
    load = layer_load([0] * expert_id + [7], [(0,)] * expert_id + [holders], num_ranks)
    assert load.slowest == 7 * max(counts)
    assert load.crossing == 7 * sum(rank != source for source, rank in enumerate(ranks))


def test_the_odd_rank_is_not_always_the_same_holders() -> None:
    assert {computing_rank(2, expert_id, (0, 1)) for expert_id in range(4)} == {0, 1}


def test_as_many_copies_as_experts_leave_nothing_for_a_disk() -> None:
    heat = {1: [100, 3, 2, 0, 0, 50], 2: [0] * 6}
    placement = placed(0, 0, 1, 1, 2, 2)
    copies = choose_copies(heat, placement, 6)
    assert len(copies) == 12
    assert [not_copied(placement, copies, (1, 2), device) for device in (0, 1, 2)] == [0, 0, 0]
    fewer = choose_copies(heat, placement, 5)
    assert not_copied(placement, fewer, (1, 2), 1) > 0
    assert all(copy.layer_id == 1 for copy in fewer), "a layer without heat says nothing"
    assert len(choose_copies(heat, placement, 100)) == 2 * 6 * 2, "on every device once"


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_loss_reads_nothing_that_has_a_copy(num_devices: int) -> None:
    """The plan of a loss, by what the workers of the devices left hold."""
    shape = make_shape(num_experts=6, expert_bytes=(64,), layers=(1, 2))
    placement = replace(even(6, num_devices), kv_tokens=(50,) * num_devices)
    heat = {1: [9, 1, 1, 1, 1, 1], 2: [1, 1, 1, 1, 1, 9]}
    for num_copies in (0, 1, 6):
        copies = choose_copies(heat, placement, num_copies)
        for lost in placement.device_ids:
            left = [device for device in placement.device_ids if device != lost]
            held = {
                d: {(layer, e) for layer in heat for e in placement.experts_of(d)}
                | {(c.layer_id, c.expert_id) for c in copies if c.device_id == d}
                for d in left
            }
            budget = dict.fromkeys(placement.device_ids, 10_000)
            limits = Limits(budget, budget, 50, 1)
            made = plan_loss(placement, Loss((lost,), held), left, shape, (), limits)
            num_read = made.read_bytes // 64
            assert num_read == not_copied(placement, copies, (1, 2), lost)
            assert (num_read == 0) == (num_copies == 6)


def test_a_device_takes_no_more_than_it_may() -> None:
    heat = {0: [100, 90, 80, 1, 1, 1]}
    placement = placed(0, 0, 0, 1, 2, 2)
    copies = choose_copies(heat, placement, 4, max_copies_per_device=1)
    assert [copy.device_id for copy in copies].count(1) == 1
    assert len(copies) == 3, "three devices with room for one each"
    with pytest.raises(PlanError, match="take 0 or more"):
        choose_copies(heat, placement, -1)
    assert choose_copies(heat, placed(0, 0, 0, 0, 0, 0), 2) == (), "nobody to copy to"


def test_swaps_mend_what_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    heat, placement = heat_of("intent"), even(64, 4)
    with_swaps = expert_load(heat, placement, choose_copies(heat, placement, 4)).cost
    monkeypatch.setattr(redundancy, "_MAX_SWAPS", 0)
    assert with_swaps < expert_load(heat, placement, choose_copies(heat, placement, 4)).cost


# ---- pages ----


@given(st.data())
def test_pages_of_copies_are_those_of_the_slots_and_bounded(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    adapters = data.draw(adapters_of(shape))
    homes = data.draw(
        st.lists(st.integers(0, 2), min_size=shape.num_experts, max_size=shape.num_experts)
    )
    placement = Placement((0, 1, 2), tuple(homes), (0, 0, 0))
    layers = sorted({region.layer_id for region in shape.of_kind(RegionKind.EXPERT)})
    away = [e for e, home in enumerate(homes) if home != 0]
    copies = tuple(ExpertCopy(layer, e, 0) for layer in layers for e in away if (e + layer) % 2)
    here = set(placement.experts_of(0))
    total = 0
    for region in shape.of_kind(RegionKind.EXPERT):
        extra = {copy.expert_id for copy in copies if copy.layer_id == region.layer_id}
        for ids, sign in ((here | extra, 1), (here, -1)):
            slots = expert_slots(shape, region.layer_id, ids, adapters)
            total += sign * pages_of_slots(slots, region.slot_bytes, shape.page_bytes)
    assert copy_pages(shape, placement, copies, adapters, 0) == total
    assert copy_pages(shape, placement, copies, adapters, 1) == 0
    per_layer = max((len(ids) for ids in copies_by_layer(copies, 0).values()), default=0)
    for held in ((), adapters):
        most = most_copy_pages(shape, per_layer, held)
        assert copy_pages(shape, placement, copies, held, 0) <= most


def test_what_does_not_fit_is_given_up_from_the_coldest() -> None:
    shape = make_shape(expert_bytes=(64,), layers=(1,), adapters=(1, 2))
    placement = placed(0, 0, 0, 0, 1, 1, 1, 1)
    heat = {1: [9, 50, 7, 1, 1, 8, 1, 1]}
    copies = tuple(ExpertCopy(1, e, 1) for e in (0, 1, 2))
    free = {0: 0, 1: 2}
    hot = tuple(ExpertCopy(1, e, 1) for e in (0, 1))
    assert fitting_copies(shape, placement, copies, (), free, heat) == hot
    adapter = make_adapter(0, {1: (0, 1)})
    assert fitting_copies(shape, placement, copies, [adapter], free, heat) == (ExpertCopy(1, 1, 1),)
    assert fitting_copies(shape, placement, copies, (), {0: 0, 1: 3}, heat) == copies
