"""The benches of the virtual expert tensor, at sizes at which only their shape can be checked."""

from __future__ import annotations

import pytest
import torch

from bench.common.layers import ExpertShape, Subject
from bench.expertweave import adapter_load, expert_memory
from bench.kernels import moe_layer, vmm

TINY = ExpertShape(hidden=64, width=48)
SMALL_PAGES = Subject(page_bytes=4096)


def test_vmm_has_a_row_for_every_operation_as_a_ratio() -> None:
    rows = vmm.measure("host", 64 << 10, num_pages=4, rounds=2)
    found = {(row["kind"], row["operation"], row["per"]) for row in rows}
    assert len(found) == len(vmm.RAW) + len(vmm.POOLED)
    raw = {"reserve", "create", "map", "set_access", "unmap", "destroy", "release"}
    assert {operation for kind, operation, _ in found if kind == "raw"} == raw
    assert ("pooled", "map_slots_cold", "page of a run") in found
    assert all("over_memcpy" in row and "microseconds" not in row for row in rows)


def test_a_call_on_a_run_counts_for_each_of_its_pages() -> None:
    timer = vmm.Timer()
    assert timer.call("x", lambda: "result", pages=4) == "result"
    timer.seconds = {vmm.MEMCPY: [2.0, 4.0, 6.0], "map": [1.0]}
    unit, figures = vmm._figures([timer])
    assert (unit, figures["map"]) == ("over_memcpy", [0.25])


def test_loading_puts_the_experts_there_and_unloading_takes_them_back() -> None:
    adapter = adapter_load.make_adapter(SMALL_PAGES, TINY, 1, 3)
    place = adapter_load.make_place(SMALL_PAGES, TINY, 1, 3)
    layer = place.layers[0]
    place._place(adapter)
    run = layer.adapter_runs[0]
    assert torch.equal(layer.w13[run.start + 1], adapter[0][1].w13)
    layer.check_integrity()
    place._displace()
    assert layer.mapped_slots == set(range(adapter_load.NUM_BASE))
    cold = adapter_load.make_place(SMALL_PAGES, TINY, 1, 3, is_cold=True)
    assert cold.arena is not None
    cold.load(adapter)
    created = cold.arena.pool.state().num_created
    cold.load(adapter)
    assert cold.arena.pool.state().num_created > created


def test_moe_layer_has_holes_and_equal_outputs_on_every_kind_of_memory() -> None:
    figures = moe_layer.measure(SMALL_PAGES, TINY, batch_sizes=[1, 5], rounds=2)
    assert len(figures["mapped_slots"]) < figures["num_slots"]
    assert [row["num_tokens"] for row in figures["rows"]] == [1, 5]
    kinds = {"virtual", "virtual_small_pages", "plain_small_pages", "plain_huge_pages"}
    assert all(set(row["over_plain"]) == kinds for row in figures["rows"])


def test_moe_layer_refuses_to_time_unequal_outputs() -> None:
    layers = moe_layer.make_layers(SMALL_PAGES, TINY, moe_layer.SMALL)
    layers["virtual"].w13[0].zero_()
    batch = moe_layer.make_batch(4, [0, 1, 2, 3, 4, 5], TINY.hidden, "cpu")
    with pytest.raises(RuntimeError, match="other outputs than the plain tensor's on virtual"):
        moe_layer.compare(
            layers, lambda layer: moe_layer.cpu_forward(layer, batch), 2, wait=lambda: None
        )


def test_expert_memory_is_figure_9_and_the_published_configs() -> None:
    rows = expert_memory.measure(counts=[10])
    assert [(r["adapters"], r["num_adapters"], r["max_experts"]) for r in rows] == [
        ("table1", 10, 13),
        ("published", 4, 11),
    ]
    assert rows[0]["padded"]["fragmentation"] > 1.5
    assert rows[0]["virtual"]["fragmentation"] < 1.01
