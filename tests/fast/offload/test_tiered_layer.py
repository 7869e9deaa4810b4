"""Adapters over experts in tiers: loading registers places, routing brings experts, pins keep them.

The plane, the layers and the tier are the server's own; only SGLang's FusedMoE is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import AdapterNotFiniteError, NoFreeSlotError
from sgl_esft.formats.manifest import AdapterManifest, read_manifest
from sgl_esft.offload.source import ExpertPlace, ExpertSource
from sgl_esft.offload.stored_adapter import StoredAdapter, register
from sgl_esft.offload.tiered_layer import RowMemory, TieredLayer
from sgl_esft.platform.moe import FAILED, moe_forward
from sgl_esft.tools.merge import merge_adapter
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.expert_memory import PaddedMemory
from sgl_esft.weave.moe_layer import ExpertShard
from sgl_esft.weave.plane import AdapterPlane, AdapterSource
from sgl_esft.weave.slot_layout import SlotLayout
from tests.fast.offload.tiers import Rank, open_rank
from tests.support.adapter_factory import BAD_WEIGHTS, corrupt, write_random_adapter

CONFIG = EsftConfig(max_adapters=2, max_experts_per_adapter=4)


class Files:
    """As plugin/tiers.py's, without SGLang."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source

    def prepare(self, manifest: AdapterManifest, on_size: Any, on_read: Any) -> StoredAdapter:
        return StoredAdapter(manifest)

    def register(
        self, adapter_id: str, stored: StoredAdapter, shards: Mapping[int, ExpertShard]
    ) -> Mapping[int, Mapping[int, ExpertPlace]]:
        return register(self._source, adapter_id, stored, shards)

    def forget(self, adapter_id: str) -> None:
        self._source.forget(adapter_id)


@contextmanager
def woven(
    base: Path, num_rows: int, policy: str = "lru", **more: Any
) -> Iterator[tuple[Rank, AdapterPlane]]:
    """`more`: as of `open_rank`."""
    with open_rank(base, num_rows, policy, **more) as rank:
        layers = {}
        for index, rows in enumerate(rank.tier.layers):
            layer = _layer(rank, rows.w13, rows.w2, rows.layer_id)
            layer.join(rank.tier, index, {})
            layers[rows.layer_id] = layer
        files = Files(rank.source)
        yield rank, AdapterPlane(layers, rank.spec, CONFIG, is_resident=False, files=files)


def _layer(rank: Rank, w13: torch.Tensor, w2: torch.Tensor, layer_id: int) -> TieredLayer:
    num_experts = rank.spec.num_experts
    layout = SlotLayout.plan(
        num_base=num_experts, num_routed=num_experts, num_adapters=2, max_experts_per_adapter=4
    )
    rows = PaddedMemory(w13.shape[0], (1,))
    rows.map(range(w13.shape[0]))
    memory = RowMemory(layout.num_slots, rows)
    memory.map(range(layout.num_base))
    row = base_row(
        num_experts=num_experts,
        num_routed_global=num_experts,
        num_routed_local=num_experts,
        ep_rank=0,
    )
    shard = ExpertShard(range(num_experts), range(rank.spec.expert_intermediate_size))
    expert_map = ExpertMap(row, layout, "cpu")
    return TieredLayer(layer_id, shard, layout, w13, w2, expert_map, memory)


def _run(
    rank: Rank, plane: AdapterPlane, layer_id: int, slot: int, hidden: torch.Tensor
) -> torch.Tensor:
    """Every expert of the layer, as the adapter in `slot` (-1: the base) has it."""
    layer = plane.layers[layer_id]
    assert isinstance(layer, TieredLayer)
    ids = layer.expert_map.table[slot].repeat(hidden.shape[0], 1)
    weights = torch.linspace(0.1, 0.9, ids.shape[1]).repeat(hidden.shape[0], 1)
    arrivals = partial(rank.tier.arrivals, layer.index)
    return moe_forward(hidden, layer.w13, layer.w2, weights, ids, arrivals)


def _merged(root: Path, name: str, layer_id: int, hidden: torch.Tensor, out: Path) -> torch.Tensor:
    merge_adapter(root / "base", root / name, out)
    with open_rank(out, 2) as rank:
        index = rank.spec.moe_layer_ids.index(layer_id)
        ids = torch.arange(rank.spec.num_experts, dtype=torch.int32).repeat(hidden.shape[0], 1)
        weights = torch.linspace(0.1, 0.9, ids.shape[1]).repeat(hidden.shape[0], 1)
        return moe_forward(hidden, rank.w13[index], rank.w2[index], weights, ids)


@pytest.mark.parametrize("num_rows", [2, 5])
def test_an_adapter_is_the_merged_model_and_the_base_stays(
    root: Path, tmp_path: Path, num_rows: int
) -> None:
    with woven(root / "base", num_rows) as (rank, plane):
        hidden = torch.randn((3, rank.spec.hidden_size)).to(rank.w13[0].dtype)
        plane.load(AdapterSource("id-math", "math", str(root / "math")))
        plane.load(AdapterSource("id-law", "law", str(root / "law")))
        plane.ensure_on_device({"id-math", "id-law"})
        plane.check_integrity()
        for name in ("math", "law"):
            for layer_id in rank.spec.moe_layer_ids:
                rank.tier.begin(None)
                found = _run(rank, plane, layer_id, plane.slot_of(f"id-{name}"), hidden)
                out = tmp_path / f"{name}-{layer_id}"
                assert torch.equal(found, _merged(root, name, layer_id, hidden, out))
                index = rank.spec.moe_layer_ids.index(layer_id)
                rank.tier.begin(None)
                ids = torch.arange(rank.spec.num_experts, dtype=torch.int32).repeat(3, 1)
                weights = torch.linspace(0.1, 0.9, ids.shape[1]).repeat(3, 1)
                whole = moe_forward(hidden, rank.w13[index], rank.w2[index], weights, ids)
                assert torch.equal(_run(rank, plane, layer_id, -1, hidden), whole)


def test_loading_reads_no_weight(root: Path) -> None:
    with woven(root / "base", 4) as (rank, plane):
        before = rank.reader.counts.num_bytes
        plane.load(AdapterSource("id", "math", str(root / "math")))
        plane.ensure_on_device({"id"})
        assert rank.reader.counts.num_bytes == before
        assert plane.placements()["id"] == (plane.slot_of("id"), 0)


def test_a_slot_that_changes_hands_serves_the_new_adapter(root: Path, tmp_path: Path) -> None:
    with woven(root / "base", 6) as (rank, plane):
        hidden = torch.randn((2, rank.spec.hidden_size)).to(rank.w13[0].dtype)
        layer_id = next(iter(read_manifest(root / "law", rank.spec).experts))
        for number in range(3):
            for name in ("math", "law", "code"):
                adapter_id = f"{name}-{number}"
                plane.load(AdapterSource(adapter_id, name, str(root / name)))
                plane.ensure_on_device({adapter_id})
                rank.tier.begin(None)
                found = _run(rank, plane, layer_id, plane.slot_of(adapter_id), hidden)
                out = tmp_path / adapter_id
                assert torch.equal(found, _merged(root, name, layer_id, hidden, out))
                plane.unload(adapter_id)
                plane.check_integrity()


def test_pinned_experts_stay(root: Path) -> None:
    with woven(root / "base", 6) as (rank, plane):
        plane.load(AdapterSource("id", "math", str(root / "math"), pinned=True))
        plane.ensure_on_device({"id"})
        hidden = torch.randn((2, rank.spec.hidden_size)).to(rank.w13[0].dtype)
        for layer_id in rank.spec.moe_layer_ids:
            _run(rank, plane, layer_id, plane.slot_of("id"), hidden)
        kept = plane.placements()["id"][1]
        assert kept > 0
        for layer_id in rank.spec.moe_layer_ids:
            for _ in range(4):
                _run(rank, plane, layer_id, -1, hidden)
        assert plane.placements()["id"][1] == kept
        plane.set_pinned("id", False)
        for layer_id in rank.spec.moe_layer_ids:
            for _ in range(4):
                _run(rank, plane, layer_id, -1, hidden)
        assert plane.placements()["id"][1] < kept


def test_pins_leave_rows_for_others(root: Path) -> None:
    with (
        woven(root / "base", 2) as (_, plane),
        pytest.raises(NoFreeSlotError, match=r"would take 2 rows of layer \d+, and may have 1"),
    ):
        plane.load(AdapterSource("id", "math", str(root / "math"), pinned=True))


def test_a_weight_that_is_no_number_is_found_when_it_is_needed(root: Path, tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path / "bad", root / "base", seed=9, max_experts=2)
    corrupt(folder, next(iter(BAD_WEIGHTS)))
    with woven(root / "base", 4) as (rank, plane):
        plane.load(AdapterSource("id", "bad", str(folder)))
        plane.ensure_on_device({"id"})
        failed = []
        for layer_id in rank.spec.moe_layer_ids:
            layer = plane.layers[layer_id]
            assert isinstance(layer, TieredLayer)
            slots = sorted(set(layer.expert_map.table[plane.slot_of("id")].tolist()))
            failed += [s for s, row in rank.tier.arrivals(layer.index, slots) if row == FAILED]
        assert failed
        assert AdapterNotFiniteError.__name__ in str(rank.tier.failure)


def test_loading_takes_milliseconds(root: Path) -> None:
    """No more than reading headers, whatever the adapter's size."""
    with woven(root / "base", 4) as (_, plane):
        began = time.perf_counter()
        for number in range(20):
            plane.load(AdapterSource(str(number), "math", str(root / "math")))
            plane.unload(str(number))
        assert (time.perf_counter() - began) / 20 < 0.25
