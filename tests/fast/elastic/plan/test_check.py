"""`check` finds every kind of broken plan: a good one is broken in each way it knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import sgl_elastic.plan.check as checker
from sgl_elastic.errors import PlanError
from sgl_elastic.plan.check import check
from sgl_elastic.plan.placement import place
from sgl_elastic.plan.planner import plan
from sgl_elastic.types import READS, Placement, Plan, Step, StepKind
from tests.fast.elastic.plan_samples import make_shape

SHAPE = make_shape(expert_bytes=(64, 128))
BUDGET = dict.fromkeys(range(4), 400)
OLD = place(SHAPE, (0, 1), None, BUDGET, (), 200, min_kv_tokens=1)
NEW = place(SHAPE, (1, 2), OLD, BUDGET, (), 300, min_kv_tokens=1)
# Rank 1 keeps its experts; the good plan also grows its KV, and device 2 takes all that 0 had.
GOOD = plan(OLD, NEW, SHAPE, (), BUDGET, min_kv_tokens=1)
COPY_0_TO_1 = Step(StepKind.COPY_EXPERTS, 1, 0, (0,), num_bytes=2 * 192)


def without(kind: StepKind) -> Plan:
    before, after = (
        [s for s in steps if s.kind is not kind] for steps in (GOOD.before, GOOD.after)
    )
    return replace(GOOD, before=tuple(before), after=tuple(after))


def changed(kind: StepKind, **fields: Any) -> Plan:
    def change(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(replace(step, **fields) if step.kind is kind else step for step in steps)

    return replace(GOOD, before=change(GOOD.before), after=change(GOOD.after))


def first(*steps: Step) -> Plan:
    return replace(GOOD, before=(*steps, *GOOD.before))


def last(*steps: Step) -> Plan:
    return replace(GOOD, before=(*GOOD.before, *steps))


def finally_(*steps: Step, made: Plan = GOOD) -> Plan:
    return replace(made, after=(*made.after, *steps))


def new(**fields: Any) -> Plan:
    return replace(GOOD, new=replace(NEW, **fields))


def test_good_plan_has_every_kind_of_step_it_can_have_and_passes() -> None:
    check(GOOD, SHAPE, (), BUDGET)
    kinds = {step.kind for step in (*GOOD.before, *GOOD.after)}
    missing = {StepKind.SHRINK_KV, StepKind.UNMAP_EXPERTS, StepKind.TRIM_KV, *READS}
    assert kinds == set(StepKind) - missing


ADD_DEVICE, REMOVE_DEVICE = StepKind.ADD_DEVICE, StepKind.REMOVE_DEVICE
MAP_TRUNK, COPY_TRUNK = StepKind.MAP_TRUNK, StepKind.COPY_TRUNK
MAP_EXPERTS, COPY_EXPERTS = StepKind.MAP_EXPERTS, StepKind.COPY_EXPERTS
UNMAP_EXPERTS, MAP_KV = StepKind.UNMAP_EXPERTS, StepKind.MAP_KV
SHRINK_KV, GROW_KV = StepKind.SHRINK_KV, StepKind.GROW_KV

BROKEN: dict[str, tuple[Plan, str]] = {
    "homeless expert": (new(homes=(0, *NEW.homes[1:])), "are not all on devices"),
    "too few homes": (new(homes=NEW.homes[1:]), "8 experts"),
    "device twice": (new(device_ids=(1, 1)), "devices are"),
    "capacity missing": (new(kv_tokens=(1,)), "KV tokens"),
    "capacity negative": (new(kv_tokens=(1, -1)), "KV tokens"),
    "unmap before the switch": (
        last(Step(UNMAP_EXPERTS, 0, expert_ids=(0,))),
        "must not come before",
    ),
    "remove before the switch": (last(Step(REMOVE_DEVICE, 0)), "must not come before"),
    "copy after the switch": (finally_(COPY_0_TO_1), "must not come after"),
    "wrong bytes": (changed(COPY_EXPERTS, num_bytes=5), "moves 1536 bytes"),
    "wrong trunk bytes": (changed(COPY_TRUNK, num_bytes=5), "moves 200"),
    "bytes of no copy": (changed(MAP_KV, num_bytes=5), "moves 0 bytes"),
    "no such device": (without(ADD_DEVICE), "no worker"),
    "added twice": (first(Step(ADD_DEVICE, 0)), "there already"),
    "trunk never mapped": (without(MAP_TRUNK), "trunk is not mapped"),
    "trunk never copied": (without(COPY_TRUNK), "lacks the trunk"),
    "trunk copied over": (last(Step(COPY_TRUNK, 1, 0, num_bytes=200)), "trunk is in use"),
    "trunk mapped twice": (first(Step(MAP_TRUNK, 0)), "mapped already"),
    "experts never mapped": (without(MAP_EXPERTS), "not mapped"),
    "experts never copied": (without(COPY_EXPERTS), "experts"),
    "copied from who has them not": (changed(COPY_EXPERTS, source_id=1), "does not hold experts"),
    "copied from itself": (changed(COPY_EXPERTS, source_id=2), "cannot be its source"),
    "copied from nobody": (changed(COPY_TRUNK, source_id=3), "cannot be its source"),
    "trunk from who has none": (
        last(
            Step(ADD_DEVICE, 3),
            Step(MAP_TRUNK, 3),
            Step(ADD_DEVICE, 4),
            Step(COPY_TRUNK, 3, 4, num_bytes=200),
        ),
        "has no trunk",
    ),
    "live experts overwritten": (last(Step(COPY_EXPERTS, 2, 0, (0,), num_bytes=2 * 192)), "in use"),
    "experts mapped twice": (last(Step(MAP_EXPERTS, 1, expert_ids=(5,))), "mapped already"),
    "no experts": (last(Step(MAP_EXPERTS, 1)), "none, or some twice"),
    "an expert too many": (last(Step(MAP_EXPERTS, 1, expert_ids=(0,))), "do not end up"),
    "unmapped what is not there": (finally_(Step(UNMAP_EXPERTS, 1, expert_ids=(0,))), "not mapped"),
    "unmapped what the new one needs": (
        finally_(Step(UNMAP_EXPERTS, 1, expert_ids=(4,))),
        "do not end up",
    ),
    "KV never mapped": (without(MAP_KV), "KV tokens at the switch"),
    "KV mapped twice": (first(Step(MAP_KV, 0, num_tokens=3)), "already"),
    "device added after the switch": (finally_(Step(ADD_DEVICE, 3)), "must not come after"),
    "device forgotten": (
        replace(GOOD, before=tuple(s for s in GOOD.before if s.device_id != 2)),
        "device 2 is not there at the switch",
    ),
    "KV grown where none is": (
        finally_(Step(GROW_KV, 3, num_tokens=1), made=last(Step(ADD_DEVICE, 3))),
        "no KV is mapped",
    ),
    "KV never grown": (without(GROW_KV), "do not end up"),
    "KV grown to less": (changed(GROW_KV, num_tokens=7), "200 tokens"),
    "KV shrunk to more": (first(Step(SHRINK_KV, 1, num_tokens=201)), "200 tokens"),
    "KV below zero": (first(Step(SHRINK_KV, 1, num_tokens=-2)), "negative"),
    "more KV at the switch than in the end": (
        changed(MAP_KV, num_tokens=301),
        "301 KV tokens at the switch, then 300",
    ),
    "device never removed": (without(REMOVE_DEVICE), r"devices \[0\] do"),
    "wrong peak": (replace(GOOD, peak_pages={0: 1}), "peaks are"),
    "wrong final pages": (replace(GOOD, final_pages={0: 1}), "final pages are"),
    "KV moves nowhere": (replace(GOOD, kv_moves={}), "KV moves"),
    "KV moves to who leaves": (replace(GOOD, kv_moves={0: 0}), "KV moves"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_found(name: str) -> None:
    broken, message = BROKEN[name]
    with pytest.raises(PlanError, match=message):
        check(broken, SHAPE, (), BUDGET)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(UNMAP_EXPERTS, 0, 0)], "device 0 has lost what the old instance needs"),
        ([(MAP_EXPERTS, 2, 7), (UNMAP_EXPERTS, 2, 7)], "cannot be taken back"),
    ],
)
def test_an_unmap_before_the_switch_is_found_even_if_allowed(
    monkeypatch: pytest.MonkeyPatch, steps: list[Any], message: str
) -> None:
    monkeypatch.setattr(checker, "KINDS_AFTER", checker.KINDS_AFTER - {UNMAP_EXPERTS})
    broken = last(*(Step(kind, d, expert_ids=(e,)) for kind, d, e in steps))
    with pytest.raises(PlanError, match=message):
        check(broken, SHAPE, (), BUDGET)


def test_undo_that_leaves_a_trace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "after_undo", lambda state, step, kv_tokens: state)
    with pytest.raises(PlanError, match="does not lead back"):
        check(GOOD, SHAPE, (), BUDGET)


def test_budget_is_checked_at_every_moment() -> None:
    most = max(GOOD.peak_pages.values())
    check(GOOD, SHAPE, (), dict.fromkeys(range(4), most))
    for device, peak in GOOD.peak_pages.items():
        with pytest.raises(PlanError, match=f"device {device} has {peak} pages of {peak - 1}"):
            check(GOOD, SHAPE, (), BUDGET | {device: peak - 1})


def test_peak_may_be_in_the_middle() -> None:
    old = Placement((0, 1), (0,) * 4 + (1,) * 4, (100, 100))
    swapped = Placement((0, 1), (1,) * 4 + (0,) * 4, (100, 100))
    made = plan(old, swapped, SHAPE, (), BUDGET)
    check(made, SHAPE, (), BUDGET)
    assert made.peak_pages[0] > made.final_pages[0]
    with pytest.raises(PlanError, match=r"device 0 has .* at its peak"):
        check(made, SHAPE, (), BUDGET | {0: made.peak_pages[0] - 1})
