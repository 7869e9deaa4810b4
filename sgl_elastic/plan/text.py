"""A plan as the dry run's answer.

Plan --> [describe] --> JSON values
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sgl_elastic.plan.planner import kv_at_switch
from sgl_elastic.types import READS, MemoryShape, Placement, Plan, Step, StepKind


def describe(plan: Plan, shape: MemoryShape) -> dict[str, Any]:
    """The plan as JSON values: ids, and counts of bytes, KV tokens and experts.

    KV tokens gained and freed are sums over the devices that have more, or fewer, in the end.
    """
    moved = _num_moved(plan)
    devices = [_device(plan, shape, device) for device in plan.peak_pages]
    gained = [row["kv_tokens"] - row["kv_tokens_before"] for row in devices]
    return {
        "old": _placement(plan.old),
        "new": _placement(plan.new),
        "experts": {"moved": moved, "kept": len(plan.new.homes) - moved},
        "kv_tokens": {
            "gained": sum(change for change in gained if change > 0),
            "freed": -sum(change for change in gained if change < 0),
        },
        "copied_bytes": plan.copied_bytes,
        "read_bytes": plan.read_bytes,
        "lost": list(plan.lost),
        "links": [
            {"source_id": source, "device_id": device, "num_bytes": num_bytes}
            for (source, device), num_bytes in _links(plan).items()
        ],
        "devices": devices,
        "kv_moves": [
            {"source_id": source, "device_id": device} for source, device in plan.kv_moves.items()
        ],
        "before": [_step(step) for step in plan.before],
        "after": [_step(step) for step in plan.after],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return {
        "device_ids": list(placement.device_ids),
        "homes": list(placement.homes),
        "kv_tokens": list(placement.kv_tokens),
    }


def _device(plan: Plan, shape: MemoryShape, device: int) -> dict[str, int]:
    """One device: what it has before, at the switch and in the end."""
    had, has = set(plan.old.experts_of(device)), set(plan.new.experts_of(device))
    return {
        "device_id": device,
        "experts_kept": len(had & has),
        "experts_in": len(has - had),
        "experts_out": len(had - has),
        "kv_tokens_before": plan.old.kv_tokens_of(device),
        "kv_tokens_at_switch": kv_at_switch(plan).get(device, 0),
        "kv_tokens": plan.new.kv_tokens_of(device),
        "peak_bytes": plan.peak_pages[device] * shape.page_bytes,
        "final_bytes": plan.final_pages[device] * shape.page_bytes,
    }


def _step(step: Step) -> dict[str, Any]:
    """A step with the fields that mean something for its kind."""
    known: dict[str, Any] = {"kind": step.kind.value, "device_id": step.device_id}
    if step.source_id >= 0:
        known |= {"source_id": step.source_id, "num_bytes": step.num_bytes}
    if step.kind in READS:
        known["num_bytes"] = step.num_bytes
    if step.expert_ids:
        known["expert_ids"] = list(step.expert_ids)
    if step.kind in _KV_STEPS:
        known["num_tokens"] = step.num_tokens
    return known


def _links(plan: Plan) -> Counter[tuple[int, int]]:
    """(Source, destination) -> bytes that go there before the switch."""
    links: Counter[tuple[int, int]] = Counter()
    for step in plan.before:
        if step.source_id >= 0:
            links[step.source_id, step.device_id] += step.num_bytes
    return links


def _num_moved(plan: Plan) -> int:
    return sum(was != is_now for was, is_now in zip(plan.old.homes, plan.new.homes, strict=True))


_KV_STEPS = frozenset({StepKind.SHRINK_KV, StepKind.TRIM_KV, StepKind.MAP_KV, StepKind.GROW_KV})
