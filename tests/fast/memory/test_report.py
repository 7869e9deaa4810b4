"""Memory reports: exact JSON, strict reading, honest numbers."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sgl_esft.errors import InvariantError, ServerAnswerError
from sgl_esft.memory.report import ExpertTiers, MemoryReport, SlotRun, layer_memory
from sgl_esft.tools.memory_cli import report_lines
from sgl_esft.weave.expert_memory import SlotUsage
from tests.support import memory_reports
from tests.support.memory_reports import ADAPTERS, LAYOUT, PAGE_BYTES, SLOT_BYTES, virtual_device

SLOT = sum(SLOT_BYTES)
Change = Callable[[dict[str, Any]], object]


def test_round_trip_through_text() -> None:
    report = memory_reports.report()
    assert MemoryReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert MemoryReport.from_json({"devices": []}) == MemoryReport(())


def test_runs_are_the_mapped_slots() -> None:
    first, second = memory_reports.padded_device().layers
    assert first.runs == (SlotRun(0, 8, -1), SlotRun(8, 1, 0), SlotRun(16, 4, 2))
    assert second.runs == (SlotRun(0, 8, -1), SlotRun(8, 3, 0))


def test_numbers_of_a_virtual_device() -> None:
    device = memory_reports.virtual_device()
    assert device.used_bytes == SLOT * (8 + 8 + 1 + 3 + 4)
    assert device.padded_bytes == device.layers[0].padded_bytes * 2 == SLOT * 20 * 2
    assert device.mapped_bytes == device.pool.used_bytes
    # Every tensor of every layer may waste less than a page at each end of each run.
    assert 0 <= device.mapped_bytes - device.used_bytes < 2 * 2 * 3 * 2 * PAGE_BYTES
    assert 0 < device.shared_bytes < device.mapped_bytes <= device.reserved_bytes
    assert device.fragmentation == device.mapped_bytes / device.used_bytes
    assert device.padded_fragmentation == 40 / 24
    assert device.kv_tokens_gained == (device.padded_bytes - device.mapped_bytes) // 100


def test_numbers_of_a_padded_device() -> None:
    device = memory_reports.padded_device()
    assert device.mapped_bytes == device.padded_bytes == device.reserved_bytes
    assert device.fragmentation == device.padded_fragmentation == 40 / 24
    assert device.kv_tokens_gained == 0
    assert (device.pool, device.resident_bytes, device.shared_bytes) == (None, None, 0)


def test_bytes_of_each_owner() -> None:
    device = memory_reports.virtual_device()
    held = [device.owner_bytes(owner) // SLOT for owner in (-1, 0, 1, 2)]
    assert held == [16, 4, 0, 4]


def test_a_device_without_layers_is_not_fragmented() -> None:
    value = memory_reports.report().to_json()
    (device,) = value["devices"][:1]  # type: ignore[index]
    device |= {"layers": [], "kv": None, "kv_tokens_gained": None}
    device |= dict.fromkeys(["mapped_bytes", "used_bytes", "reserved_bytes", "shared_bytes"], 0)
    device |= {"padded_bytes": 0, "fragmentation": 1.0, "padded_fragmentation": 1.0}
    (found,) = MemoryReport.from_json({"devices": [device]}).devices
    assert (found.fragmentation, found.kv_tokens_gained) == (1.0, None)


def test_layer_memory_refuses_a_run_outside_its_region() -> None:
    usage = SlotUsage(0, 0, 0, 0)
    for adapter_slot, run in [
        (0, range(7, 9)),
        (0, range(11, 13)),
        (1, range(8, 9)),
        (3, range(1)),
    ]:
        with pytest.raises(InvariantError):
            layer_memory(1, LAYOUT, SLOT, usage, {adapter_slot: run})
    assert layer_memory(1, LAYOUT, SLOT, usage, {0: range(0)}).runs == (SlotRun(0, 8, -1),)


def test_layer_memory_joins_neighbouring_slots_only() -> None:
    """On a device of several only some of the base's experts are there."""
    usage = SlotUsage(0, 0, 0, 0)
    found = layer_memory(1, LAYOUT, SLOT, usage, {0: (10, 8)}, base_slots=(5, 0, 1))
    assert found.runs == (
        SlotRun(0, 2, -1),
        SlotRun(5, 1, -1),
        SlotRun(8, 1, 0),
        SlotRun(10, 1, 0),
    )


def layer(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["devices"][0]["layers"][0]
    return found


MALFORMED: dict[str, Change] = {
    "no devices": lambda v: v.pop("devices"),
    "devices an object": lambda v: v.update(devices={}),
    "device a number": lambda v: v.update(devices=[3]),
    "unknown key": lambda v: v.update(more=1),
    "unknown key in a layer": lambda v: layer(v).update(more=1),
    "missing key": lambda v: layer(v).pop("num_slots"),
    "missing optional key": lambda v: v["devices"][0].pop("resident_bytes"),
    "missing derived key": lambda v: v["devices"][0].pop("fragmentation"),
    "derived number of another": lambda v: v["devices"][0].update(fragmentation=1.0),
    "sum of another": lambda v: v["devices"][0].update(mapped_bytes=1),
    "fraction of a byte": lambda v: layer(v).update(mapped_bytes=0.5),
    "whole number as float": lambda v: layer(v).update(layer_id=1.0),
    "truth for a count": lambda v: layer(v).update(layer_id=True),
    "text for a count": lambda v: layer(v).update(used_bytes="1"),
    "negative": lambda v: layer(v).update(shared_bytes=-1),
    "no slots": lambda v: layer(v).update(num_slots=0),
    "run beyond the slots": lambda v: layer(v)["runs"][-1].update(count=99),
    "runs overlap": lambda v: layer(v)["runs"][0].update(count=9),
    "empty run": lambda v: layer(v)["runs"][0].update(count=0),
    "owner of nobody": lambda v: layer(v)["runs"][0].update(owner=-2),
    "kind": lambda v: v["devices"][0].update(expert_memory="magic"),
    "device without a name": lambda v: v["devices"][0].update(device=None),
    "adapters a list": lambda v: v["devices"][0].update(adapters=["law"]),
    "adapter slot": lambda v: v["devices"][0]["adapters"].update(law="0"),
    "pool without pages": lambda v: v["devices"][0]["pool"].update(page_bytes=0),
    "pool a number": lambda v: v["devices"][0].update(pool=1),
    "KV of no size": lambda v: v["devices"][0]["kv"].update(bytes_per_token=0),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_answers(name: str) -> None:
    value = copy.deepcopy(memory_reports.report().to_json())
    MALFORMED[name](value)
    with pytest.raises(ServerAnswerError):
        MemoryReport.from_json(value)


@pytest.mark.parametrize("value", [None, 3, "devices", [], {"error": "x"}, {"devices": [None]}])
def test_answers_of_others(value: object) -> None:
    with pytest.raises(ServerAnswerError):
        MemoryReport.from_json(value)


def test_table() -> None:
    report = memory_reports.report()
    lines = list(report_lines(report))
    text = "\n".join(lines)
    virtual, padded = report.devices
    assert f"F_mem     {virtual.fragmentation:.3f} now, 1.667 with padding" in text
    assert "rank 1, cpu, padded expert memory" in text
    assert "pages     of 4,096 B" in text
    assert "no budget" in text
    assert f"{virtual.kv_tokens_gained:,} tokens' memory saved" in text
    for name, adapter_slot in ADAPTERS.items():
        assert f"adapter   slot {adapter_slot}: {name}, 0.06 MB" in text
    rows = [line.split() for line in lines if line.startswith("    ")]
    assert [row[0] for row in rows] == ["1", "2", "1", "2"]
    assert [row[-2:] for row in rows[::2]] == [["0:1", "2:4"]] * 2
    assert len([line for line in lines if line.startswith("pages")]) == 1
    assert padded.pool is None


def test_experts_in_tiers_are_told_and_shown() -> None:
    tiers = ExpertTiers("auto: lfu", 6, 513, 230, 283, 105, 36, 69, 2, 42_906_912, 0.8125)
    one = MemoryReport((replace(virtual_device(), tiers=tiers),))
    value = json.loads(json.dumps(one.to_json()))
    assert MemoryReport.from_json(value) == one
    assert value["devices"][0]["tiers"]["num_hits"] == 230
    lines = list(report_lines(one))
    assert any("auto: lfu, 6 rows a layer: 44.8% of 513 were there, 283 read" in x for x in lines)
    assert any(
        "105 read, 36 used; 42.91 MB read in all, 0.8 s stalled, 2 reads" in x for x in lines
    )
    value["devices"][0]["tiers"]["num_rows"] = 0
    with pytest.raises(ServerAnswerError):
        MemoryReport.from_json(value)
