"""A plan as the dry run answers it."""

from __future__ import annotations

import json

from sgl_elastic.plan.placement import place
from sgl_elastic.plan.planner import plan
from sgl_elastic.plan.text import describe
from sgl_elastic.types import Plan
from tests.fast.elastic.plan_samples import GIB, PAGE, make_shape, v2_lite

SHAPE = v2_lite()


def two_to_three() -> Plan:
    """DeepSeek-V2-Lite on devices of 64 GiB, 1 -> 2 -> 3."""
    budget = dict.fromkeys(range(3), 64 * GIB // PAGE)
    placement = None
    for devices in [(0,), (0, 1)]:
        placement = place(SHAPE, devices, placement, budget, (), 1_000_000)
    assert placement is not None
    new = place(SHAPE, (0, 1, 2), placement, budget, (), None)
    return plan(placement, new, SHAPE, (), budget)


def test_description_is_json_and_adds_up() -> None:
    made = two_to_three()
    described = describe(made, SHAPE)
    assert json.loads(json.dumps(described)) == described
    assert described["experts"] == {"moved": 20, "kept": 44}
    assert described["new"]["device_ids"] == [0, 1, 2]
    assert sum(link["num_bytes"] for link in described["links"]) == made.copied_bytes
    assert [(link["source_id"], link["device_id"]) for link in described["links"]] == [
        (0, 2),
        (1, 2),
    ]
    assert len(described["before"]) == len(made.before)
    for row in described["devices"]:
        assert row["peak_bytes"] == made.peak_pages[row["device_id"]] * PAGE
        assert row["final_bytes"] <= row["peak_bytes"]
    gained = sum(row["kv_tokens"] - row["kv_tokens_before"] for row in described["devices"])
    assert described["kv_tokens"] == {"gained": gained, "freed": 0}


def test_leaving_device_is_described_as_empty_in_the_end() -> None:
    shape = make_shape(expert_bytes=(64,))
    budget = dict.fromkeys(range(2), 1000)
    old = place(shape, (0, 1), None, budget, (), None)
    made = plan(old, place(shape, (0,), old, budget, (), None), shape, (), budget)
    described = describe(made, shape)
    leaving = next(row for row in described["devices"] if row["device_id"] == 1)
    assert leaving["experts_out"] == 4
    assert leaving["kv_tokens"] == leaving["kv_tokens_at_switch"] == leaving["final_bytes"] == 0
    assert described["kv_tokens"]["freed"] == old.kv_tokens_of(1)
    assert described["kv_moves"] == [{"source_id": 1, "device_id": 0}]
