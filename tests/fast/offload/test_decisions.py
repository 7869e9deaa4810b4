"""Who is in which row: every plan, carried out in the worst order, computes what was asked for."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.decisions import WAVE_ROWS, Decisions, Load, Plan
from sgl_esft.offload.policies import (
    POLICIES,
    ExpertPolicy,
    LeastExpected,
    LeastFrequentlyUsed,
    auto_policy,
    policy_of,
)
from sgl_esft.offload.rows import EMPTY, NOT_HERE, RowTable


def slots(*values: int) -> np.ndarray:
    return np.array(sorted(values), dtype=np.int64)


class Rows:
    """What the rows of one layer hold, as loads that are carried out as early as they may be."""

    def __init__(self, num_rows: int) -> None:
        self.content = [EMPTY] * num_rows

    def carry_out(self, plan: Plan) -> list[int]:
        """Loads that wait for nobody land before anything is computed. Returns who was computed."""
        computed: list[int] = []
        for load in plan.loads:
            if load.after == EMPTY:
                self.content[load.row] = load.slot
        for slot, row in plan.present:
            computed.append(self._compute(slot, row))
        for load in plan.loads:
            if load.after != EMPTY:
                assert load.after in computed, f"{load} waits for who was not computed"
                self.content[load.row] = load.slot
            computed.append(self._compute(load.slot, load.row))
        return computed

    def _compute(self, slot: int, row: int) -> int:
        assert self.content[row] == slot, f"row {row} holds {self.content[row]}, not {slot}"
        return slot

    def land(self, load: Load) -> None:
        self.content[load.row] = load.slot


def make(num_rows: int, policy: str = "lru", **more: object) -> Decisions:
    return Decisions(3, 12, num_rows, POLICIES[policy], num_base=8, **more)  # type: ignore[arg-type]


def test_a_slot_is_loaded_once_and_found_again() -> None:
    decisions, rows = make(4), Rows(4)
    first = decisions.step(0, slots(1, 5))
    again = decisions.step(0, slots(1, 5))
    assert rows.carry_out(first) == [1, 5]
    assert [load.slot for load in first.loads] == [1, 5]
    assert not again.loads
    assert rows.carry_out(again) == [1, 5]
    counts = decisions.counts(0)
    assert (counts.num_asked, counts.num_hits, counts.num_loads) == (4, 2, 2)


def test_the_least_recently_used_leaves_and_never_one_of_this_step() -> None:
    decisions, rows = make(3), Rows(3)
    for needed in (slots(0), slots(1), slots(2), slots(0)):
        rows.carry_out(decisions.step(0, needed))
    rows.carry_out(decisions.step(0, slots(1, 7)))  # 1 is oldest, and needed: 2 leaves
    assert decisions.where(0)[2] == NOT_HERE
    assert all(decisions.where(0)[slot] >= 0 for slot in (0, 1, 7))


def test_more_experts_than_rows_go_through_a_few_of_them() -> None:
    """What was kept for decoding is there after a prompt that asked for everything."""
    decisions, rows = make(8), Rows(8)
    rows.carry_out(decisions.step(0, slots(*range(8))))
    rows.carry_out(decisions.step(0, slots(0, 1, 2, 3)))  # the last used
    plan = decisions.step(0, slots(*range(12)))
    assert plan.is_wave
    assert sorted(rows.carry_out(plan)) == list(range(12))
    assert len(plan.loads) == 4, "each missing expert once"
    assert {load.row for load in plan.loads} == {rows.content.index(s) for s in range(8, 12)}
    kept = {slot for slot in range(12) if decisions.where(0)[slot] >= 0}
    assert {0, 1, 2, 3} <= kept
    assert len({load.row for load in plan.loads}) <= WAVE_ROWS


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_one_row_is_enough_to_compute_everything(num_rows: int) -> None:
    decisions, rows = make(num_rows), Rows(num_rows)
    for _ in range(3):
        assert sorted(rows.carry_out(decisions.step(0, slots(*range(9))))) == list(range(9))
    decisions.check_integrity()


def test_prefetches_are_the_most_urgent_that_the_link_carries() -> None:
    decisions = make(8, "finemoe", loads_per_layer=2.0)
    decisions.begin()
    decisions.expect(1, slots(3, 4), np.array([0.2, 0.6], dtype=np.float32))
    decisions.expect(2, slots(5), np.array([0.9], dtype=np.float32))
    found = decisions.prefetches(0)
    # 0.6 / 1, 0.9 / 2, 0.2 / 1: two of them
    assert [(load.layer, load.slot) for load in found] == [(1, 4), (2, 5)]
    decisions.expect(1, slots(6, 7), np.array([0.2, 0.2], dtype=np.float32))
    assert len(decisions.step(0, slots(*range(8))).loads) == 8
    assert len(decisions.prefetches(0)) == 2, "it waits for its own, and hides others meanwhile"


def test_tokens_that_expect_one_slot_add_up() -> None:
    decisions = make(4, "finemoe", loads_per_layer=1.0)
    decisions.begin()
    decisions.expect(1, slots(3), np.array([0.5], dtype=np.float32))
    decisions.expect(1, slots(4), np.array([0.3], dtype=np.float32))
    decisions.expect(1, slots(4), np.array([0.3], dtype=np.float32))
    assert [load.slot for load in decisions.prefetches(0)] == [4]


def test_a_guess_never_displaces_what_is_expected_too() -> None:
    decisions, rows = make(2, "finemoe", loads_per_layer=4.0), Rows(2)
    rows.carry_out(decisions.step(1, slots(0, 1)))
    decisions.begin()
    decisions.expect(1, slots(0, 1, 2), np.array([0.1, 0.1, 0.9], dtype=np.float32))
    assert decisions.prefetches(0) == ()


def test_prefetched_and_used_or_not_is_counted() -> None:
    decisions = make(4, "finemoe", loads_per_layer=2.0)
    decisions.begin()
    decisions.expect(1, slots(3, 4), np.array([0.5, 0.5], dtype=np.float32))
    assert len(decisions.prefetches(0)) == 2
    decisions.step(1, slots(3, 6))
    counts = decisions.counts(1)
    assert (counts.num_hits, counts.num_loads) == (1, 1)
    assert (counts.num_prefetches, counts.num_useful, counts.num_wasted) == (2, 1, 1)


def test_streaming_fetches_the_next_layer_in_order() -> None:
    decisions = make(6, "stream", loads_per_layer=2.0)
    decisions.begin()
    assert [load.slot for load in decisions.prefetches(0)] == [0, 1]
    assert [load.slot for load in decisions.prefetches(0)] == [2]  # half of the rows are guesses
    assert decisions.prefetches(2) == (), "there is no next layer"


def test_pinned_slots_stay_and_leave_something_to_load_into() -> None:
    decisions, rows = make(3), Rows(3)
    rows.carry_out(decisions.step(0, slots(8, 9)))
    decisions.pin(0, [8, 9])
    for needed in (slots(0), slots(1), slots(*range(8))):
        rows.carry_out(decisions.step(0, needed))
    assert all(decisions.where(0)[slot] >= 0 for slot in (8, 9))
    with pytest.raises(InvariantError, match="3 slots pinned in 3 rows"):
        decisions.pin(0, [7])


def test_forgotten_slots_are_loaded_again() -> None:
    decisions = make(4)
    decisions.step(0, slots(8, 9))
    decisions.forget(0, [8])
    assert [load.slot for load in decisions.step(0, slots(8, 9)).loads] == [8]


@pytest.mark.parametrize("policy", [*POLICIES])
@pytest.mark.parametrize("seed", range(3))
def test_random_life(policy: str, seed: int) -> None:
    """Steps, guesses, pins and adapters that come and go keep every invariant of the tables."""
    rng = random.Random(f"{policy} {seed}")
    num_rows = rng.randrange(1, 9)
    decisions = make(num_rows, policy, loads_per_layer=rng.choice([0.0, 0.4, 1.0, 5.0]))
    layers = [Rows(num_rows) for _ in range(3)]
    for number in range(1200):
        layer = number % 3
        if layer == 0:
            decisions.begin()
        needed = slots(*rng.sample(range(12), rng.choice([1, 2, 3, 9, 12])))
        plan = decisions.step(layer, needed)
        assert sorted(layers[layer].carry_out(plan)) == needed.tolist()
        _guess(rng, decisions, layers, layer)
        _change(rng, decisions, num_rows)
        decisions.check_integrity()
        _check_content(decisions, layers)
    total = decisions.counts(0)
    assert total.num_asked == total.num_hits + total.num_loads


def _guess(rng: random.Random, decisions: Decisions, layers: list[Rows], layer: int) -> None:
    if layer < 2:
        some = slots(*rng.sample(range(12), 3))
        decisions.expect(layer + 1, some, np.full(3, 0.3, dtype=np.float32))
    for load in decisions.prefetches(layer):
        assert load.layer > layer
        layers[load.layer].land(load)


def _change(rng: random.Random, decisions: Decisions, num_rows: int) -> None:
    layer, kind = rng.randrange(3), rng.randrange(8)
    if kind == 0:
        decisions.forget(layer, rng.sample(range(8, 12), 2))
    elif kind == 1 and num_rows > 2:
        decisions.pin(layer, [rng.choice([10, 11])]) if num_rows > 3 else None
    elif kind == 2:
        decisions.unpin(layer, [10, 11])


def _check_content(decisions: Decisions, layers: Iterable[Rows]) -> None:
    for layer, rows in enumerate(layers):
        for slot, row in enumerate(decisions.where(layer).tolist()):
            assert row == NOT_HERE or rows.content[row] == slot


def test_the_same_steps_decide_the_same() -> None:
    def life() -> list[Plan]:
        rng = random.Random(3)
        decisions = make(4, "lfu")
        return [decisions.step(0, slots(*rng.sample(range(12), 3))) for _ in range(200)]

    assert life() == life()


def test_frequency_forgets_slowly_and_survives_many_steps() -> None:
    values = LeastFrequentlyUsed(3, None)
    for _ in range(20000):  # the growing weight is brought back several times
        values.used(slots(0))
    values.used(slots(1))
    found = values.values(slots(0, 1, 2))
    assert found[0] > found[1] > found[2] == 0
    for _ in range(400):
        values.used(slots(1))
    assert np.argmax(values.values(slots(0, 1, 2))) == 1


def test_least_expected_is_probability_times_uses() -> None:
    values = LeastExpected(3, None)
    values.predicted(slots(0, 1), np.array([0.2, 0.5], dtype=np.float32))
    values.used(slots(0))
    values.used(slots(0))
    values.used(slots(0))  # 0.2 * 4 against 0.5 * 1
    assert np.argsort(values.values(slots(0, 1, 2))).tolist() == [2, 1, 0]


def test_auto_predicts_only_where_something_can_be_hidden() -> None:
    assert auto_policy(2.0, can_predict=True).predictor == "regression"
    assert auto_policy(0.2, can_predict=True).predictor is None
    assert auto_policy(2.0, can_predict=False).predictor is None


def test_auto_does_not_predict_what_is_loaded_faster() -> None:
    assert auto_policy(2.0, can_predict=True, load_s=0.013).predictor == "regression"
    assert auto_policy(2.0, can_predict=True, load_s=0.001).predictor == "regression"
    assert auto_policy(2.0, can_predict=True, load_s=0.0009).predictor is None


def test_auto_does_what_the_policy_does_that_it_is_called_after() -> None:
    for loads_per_layer, name in ((0.2, "lfu"), (2.0, "regression")):
        found = auto_policy(loads_per_layer, can_predict=True)
        assert found.name == f"auto: {name}"
        assert replace(found, name=name, what="") == replace(POLICIES[name], what="")


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="--expert-policy 'best': choose one of auto, stream"):
        policy_of("best")
    assert isinstance(policy_of("lru"), ExpertPolicy)


def test_a_row_table_refuses_to_hold_a_slot_twice() -> None:
    table = RowTable(4, 2)
    table.put(3, 0)
    with pytest.raises(InvariantError, match="slot 3 is in row 0"):
        table.put(3, 1)
    assert table.put(2, 0) == 3
    assert table.where[3] == NOT_HERE
    table.slot_of[1] = 2
    with pytest.raises(InvariantError):
        table.check_integrity()


def test_streaming_goes_on_where_every_layer_misses() -> None:
    """It is what it is compared with: always the next layer, whatever was there."""
    decisions, rows = make(4, "stream", loads_per_layer=2.0), [Rows(4) for _ in range(3)]
    for number in range(30):
        layer = number % 3
        if layer == 0:
            decisions.begin()
        plan = decisions.step(layer, slots(*range(8)))
        rows[layer].carry_out(plan)
        for load in decisions.prefetches(layer):
            rows[load.layer].land(load)
    assert decisions.counts(1).num_prefetches >= 9
    assert decisions.counts(1).num_useful == decisions.counts(1).num_prefetches
