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
from sgl_elastic.types import Placement, Plan, Step, StepKind
from tests.fast.elastic.plan_samples import make_shape

SHAPE = make_shape(expert_bytes=(64, 128))
BUDGET = dict.fromkeys(range(4), 400)
OLD = place(SHAPE, (0, 1), None, BUDGET, (), 200, min_kv_tokens=1)
NEW = place(SHAPE, (1, 2), OLD, BUDGET, (), 300, min_kv_tokens=1)
# Rank 1 keeps its experts; the good plan also grows its KV, and device 2 takes all that 0 had.
GOOD = plan(OLD, NEW, SHAPE, (), BUDGET, min_kv_tokens=1)
COPY_0_TO_1 = Step(StepKind.COPY_EXPERTS, 1, 0, (0,), num_bytes=2 * 192)


def without(made: Plan, kind: StepKind) -> Plan:
    return replace(
        made,
        before=tuple(step for step in made.before if step.kind is not kind),
        after=tuple(step for step in made.after if step.kind is not kind),
    )


def changed(made: Plan, kind: StepKind, **fields: object) -> Plan:
    def change(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(replace(s, **fields) if s.kind is kind else s for s in steps)  # type: ignore[arg-type]

    return replace(made, before=change(made.before), after=change(made.after))


def first(made: Plan, *steps: Step) -> Plan:
    return replace(made, before=(*steps, *made.before))


def last(made: Plan, *steps: Step) -> Plan:
    return replace(made, before=(*made.before, *steps))


def finally_(made: Plan, *steps: Step) -> Plan:
    return replace(made, after=(*made.after, *steps))


def test_good_plan_has_every_kind_of_step_it_can_have_and_passes() -> None:
    check(GOOD, SHAPE, (), BUDGET)
    kinds = {step.kind for step in (*GOOD.before, *GOOD.after)}
    missing = {StepKind.SHRINK_KV, StepKind.UNMAP_EXPERTS}
    assert kinds == set(StepKind) - missing


ADD_DEVICE, REMOVE_DEVICE = StepKind.ADD_DEVICE, StepKind.REMOVE_DEVICE
MAP_TRUNK, COPY_TRUNK = StepKind.MAP_TRUNK, StepKind.COPY_TRUNK
MAP_EXPERTS, COPY_EXPERTS = StepKind.MAP_EXPERTS, StepKind.COPY_EXPERTS
UNMAP_EXPERTS, MAP_KV = StepKind.UNMAP_EXPERTS, StepKind.MAP_KV
SHRINK_KV, GROW_KV = StepKind.SHRINK_KV, StepKind.GROW_KV

BROKEN: dict[str, tuple[Plan, str]] = {
    "homeless expert": (
        replace(GOOD, new=replace(NEW, homes=(0, *NEW.homes[1:]))),
        "are not all on devices",
    ),
    "too few homes": (replace(GOOD, new=replace(NEW, homes=NEW.homes[1:])), "8 experts"),
    "device twice": (replace(GOOD, new=replace(NEW, device_ids=(1, 1))), "devices are"),
    "capacity missing": (replace(GOOD, new=replace(NEW, kv_tokens=(1,))), "KV tokens"),
    "capacity negative": (replace(GOOD, new=replace(NEW, kv_tokens=(1, -1))), "KV tokens"),
    "unmap before the switch": (
        last(GOOD, Step(UNMAP_EXPERTS, 0, expert_ids=(0,))),
        "must not come before",
    ),
    "remove before the switch": (last(GOOD, Step(REMOVE_DEVICE, 0)), "must not come before"),
    "copy after the switch": (finally_(GOOD, COPY_0_TO_1), "must not come after"),
    "wrong bytes": (changed(GOOD, COPY_EXPERTS, num_bytes=5), "moves 1536 bytes"),
    "wrong trunk bytes": (changed(GOOD, COPY_TRUNK, num_bytes=5), "moves 200"),
    "bytes of no copy": (changed(GOOD, MAP_KV, num_bytes=5), "moves 0 bytes"),
    "no such device": (without(GOOD, ADD_DEVICE), "no worker"),
    "added twice": (first(GOOD, Step(ADD_DEVICE, 0)), "there already"),
    "trunk never mapped": (without(GOOD, MAP_TRUNK), "trunk is not mapped"),
    "trunk never copied": (without(GOOD, COPY_TRUNK), "lacks the trunk"),
    "trunk copied over": (last(GOOD, Step(COPY_TRUNK, 1, 0, num_bytes=200)), "trunk is in use"),
    "trunk mapped twice": (first(GOOD, Step(MAP_TRUNK, 0)), "mapped already"),
    "experts never mapped": (without(GOOD, MAP_EXPERTS), "not mapped"),
    "experts never copied": (without(GOOD, COPY_EXPERTS), "experts"),
    "copied from who has them not": (
        changed(GOOD, COPY_EXPERTS, source_id=1),
        "does not hold experts",
    ),
    "copied from itself": (changed(GOOD, COPY_EXPERTS, source_id=2), "cannot be its source"),
    "copied from nobody": (changed(GOOD, COPY_TRUNK, source_id=3), "cannot be its source"),
    "trunk from who has none": (
        last(
            GOOD,
            Step(ADD_DEVICE, 3),
            Step(MAP_TRUNK, 3),
            Step(ADD_DEVICE, 4),
            Step(COPY_TRUNK, 3, 4, num_bytes=200),
        ),
        "has no trunk",
    ),
    "live experts overwritten": (
        last(GOOD, Step(COPY_EXPERTS, 2, 0, (0,), num_bytes=2 * 192)),
        "in use",
    ),
    "experts mapped twice": (last(GOOD, Step(MAP_EXPERTS, 1, expert_ids=(5,))), "mapped already"),
    "no experts": (last(GOOD, Step(MAP_EXPERTS, 1)), "none, or some twice"),
    "an expert too many": (last(GOOD, Step(MAP_EXPERTS, 1, expert_ids=(0,))), "do not end up"),
    "unmapped what is not there": (
        finally_(GOOD, Step(UNMAP_EXPERTS, 1, expert_ids=(0,))),
        "not mapped",
    ),
    "unmapped what the new one needs": (
        finally_(GOOD, Step(UNMAP_EXPERTS, 1, expert_ids=(4,))),
        "do not end up",
    ),
    "KV never mapped": (without(GOOD, MAP_KV), "KV tokens at the switch"),
    "KV mapped twice": (first(GOOD, Step(MAP_KV, 0, num_tokens=3)), "already"),
    "device added after the switch": (finally_(GOOD, Step(ADD_DEVICE, 3)), "must not come after"),
    "device forgotten": (
        replace(GOOD, before=tuple(s for s in GOOD.before if s.device_id != 2)),
        "device 2 is not there at the switch",
    ),
    "KV grown where none is": (
        finally_(last(GOOD, Step(ADD_DEVICE, 3)), Step(GROW_KV, 3, num_tokens=1)),
        "no KV is mapped",
    ),
    "KV never grown": (without(GOOD, GROW_KV), "do not end up"),
    "KV grown to less": (changed(GOOD, GROW_KV, num_tokens=7), "200 tokens"),
    "KV shrunk to more": (first(GOOD, Step(SHRINK_KV, 1, num_tokens=201)), "200 tokens"),
    "KV below zero": (first(GOOD, Step(SHRINK_KV, 1, num_tokens=-2)), "negative"),
    "more KV at the switch than in the end": (
        changed(GOOD, MAP_KV, num_tokens=301),
        "301 KV tokens at the switch, then 300",
    ),
    "device never removed": (without(GOOD, REMOVE_DEVICE), r"devices \[0\] do"),
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


def test_what_the_old_instance_loses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if unmapping were allowed before the switch."""
    monkeypatch.setattr(checker, "KINDS_AFTER", checker.KINDS_AFTER - {StepKind.UNMAP_EXPERTS})
    broken = last(GOOD, Step(StepKind.UNMAP_EXPERTS, 0, expert_ids=(0,)))
    with pytest.raises(PlanError, match="device 0 has lost what the old instance needs"):
        check(broken, SHAPE, (), BUDGET)


def test_step_that_cannot_be_taken_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "KINDS_AFTER", checker.KINDS_AFTER - {StepKind.UNMAP_EXPERTS})
    extra: Any = {"device_id": 2, "expert_ids": (7,)}
    broken = last(GOOD, Step(StepKind.MAP_EXPERTS, **extra), Step(StepKind.UNMAP_EXPERTS, **extra))
    with pytest.raises(PlanError, match="cannot be taken back"):
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
