"""A plan as the documents show it: devices first, then the steps in their order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sgl_elastic.plan.text import describe
from sgl_elastic.types import MemoryShape, Plan, Step


def table(plan: Plan, shape: MemoryShape) -> str:
    described = describe(plan, shape)
    moved = described["experts"]["moved"]
    lines = [
        f"scale {plan.old.dp_size} -> {plan.new.dp_size}: devices {ranges(plan.old.device_ids)} -> "
        f"{ranges(plan.new.device_ids)}; {moved} of {len(plan.new.homes)} experts move, "
        f"{_gigabytes(plan.copied_bytes)} copied",
        "",
        f"{'device':>6}  {'experts kept':>12}  {'in':>3}  {'out':>3}  {'KV tokens':>11}  "
        f"{'at switch':>11}  {'after':>11}  {'memory peak':>11}  {'after':>8}",
    ]
    lines += [
        f"{row['device_id']:6}  {row['experts_kept']:12}  {row['experts_in']:3}  "
        f"{row['experts_out']:3}  {row['kv_tokens_before']:11,}  {row['kv_tokens_at_switch']:11,}  "
        f"{row['kv_tokens']:11,}  {_gigabytes(row['peak_bytes']):>11}  "
        f"{_gigabytes(row['final_bytes']):>8}"
        for row in described["devices"]
    ]
    before = [_step_line(step) for step in plan.before]
    after = [_step_line(step) for step in plan.after]
    return "\n".join([*lines, "", "before the switch", *before, "after it", *after])


def ranges(ids: Sequence[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [each for _, each in run]
        first, last = members[0], members[-1]
        runs.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(runs)


def _step_line(step: Step) -> str:
    where = f"{step.device_id}" if step.source_id < 0 else f"{step.source_id} -> {step.device_id}"
    what = []
    if step.source_id >= 0:
        what.append(_gigabytes(step.num_bytes))
    if step.expert_ids:
        what.append(f"experts {ranges(step.expert_ids)}")
    if step.num_tokens:
        what.append(f"{step.num_tokens:,} tokens")
    return f"  {step.kind.value:13}  {where:8}  {', '.join(what)}".rstrip()


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
