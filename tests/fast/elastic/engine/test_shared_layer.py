"""Shared layers: fixed slots whatever is resident; planes that adopt what others have placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import InvariantError, NoFreeSlotError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import MoeSpec, read_moe_spec
from sgl_esft.weave import shared_layer as shared_layer_module
from sgl_esft.weave.moe_layer import ExpertWeights
from sgl_esft.weave.plane import AdapterPlane, AdapterSource, PlacedAdapter
from sgl_esft.weave.shared_layer import SharedLayer
from tests.support.random_layers import PADDED, FakeFusedMoE, RandomExperts, Rank
from tests.support.woven_device import Device

BASE = RandomExperts.draw(num_experts=8, hidden=6, width=4, seed=0, dtype=torch.float32)
OTHER = RandomExperts.draw(num_experts=8, hidden=6, width=4, seed=1, dtype=torch.float32)
EVERYTHING = range(8)
ELSEWHERE = -1


def fused_moe(**more: Any) -> FakeFusedMoE:
    return FakeFusedMoE(BASE, Rank(), layer_id=3, max_adapters=2, max_experts=3, **more)


def shared_layer(resident=EVERYTHING, num_shared: int = 0) -> SharedLayer:
    module = fused_moe(num_shared=num_shared, config=PADDED)
    layer = SharedLayer.bind(module, module.esft_layout)
    layer.rebind(resident, {})
    return layer


def test_every_expert_has_a_slot_for_good() -> None:
    layer = shared_layer([1, 2, 6])
    pointer = layer.expert_map.table.data_ptr()
    assert layer.expert_map.table.tolist() == [[-1, 1, 2, -1, -1, -1, 6, -1]] * 3
    layer.rebind([0, 6], {})
    assert layer.expert_map.table.tolist() == [[0, -1, -1, -1, -1, -1, 6, -1]] * 3
    assert layer.expert_map.table.data_ptr() == pointer, "captured graphs read it"
    layer.check_integrity()


def test_shared_experts_are_always_here() -> None:
    layer = shared_layer([0, 3], num_shared=2)
    assert layer.expert_map.base_row.tolist() == [0, -1, -1, 3, -1, -1, 6, 7]
    assert sorted(layer.base_slots) == [0, 3, 6, 7]


@pytest.mark.parametrize("resident", [EVERYTHING, (1, 6)], ids=["all", "some"])
def test_an_adapters_slots_count_the_experts_of_all_ranks(resident) -> None:
    """Expert 6 is its third by id: the third slot, though the second may be elsewhere."""
    layer = shared_layer(resident)
    here = [e for e in (1, 4, 6) if e in resident]
    layer.place(1, OTHER.chosen(*here), (1, 4, 6))
    expected = {1: 11, 4: 12, 6: 13}
    for expert, slot in expected.items():
        found = int(layer.expert_map.table[1, expert])
        assert found == (slot if expert in resident else ELSEWHERE)
    for expert in here:
        assert torch.equal(layer.w13[expected[expert]], OTHER.w13[expert])
        assert torch.equal(layer.w2[expected[expert]], OTHER.w2[expert])
    assert layer.mapped_slots == {*EVERYTHING, *(expected[e] for e in here)}
    assert sorted(layer.base_slots) == sorted(resident)
    assert {owner: sorted(slots) for owner, slots in layer.slots_by_adapter.items()} == {
        1: [expected[e] for e in here]
    }
    assert torch.equal(layer.expert_map.table[0], layer.expert_map.base_row)
    layer.check_integrity()


def test_with_every_expert_here_it_answers_as_a_woven_layer() -> None:
    layer = shared_layer()
    woven = fused_moe().woven()
    for each in (layer, woven):
        each.place(0, OTHER.chosen(2, 5), (2, 5))
        each.place(1, BASE.chosen(7), (7,))
        each.displace(1)
    assert torch.equal(layer.expert_map.table, woven.expert_map.table)
    assert layer.mapped_slots == woven.mapped_slots


def test_displace_takes_the_map_back_and_leaves_the_neighbour() -> None:
    layer = shared_layer([1, 2])
    layer.place(0, OTHER.chosen(1, 2), (1, 2, 3))
    layer.place(1, OTHER.chosen(1), (0, 1))
    layer.displace(0)
    assert torch.equal(layer.expert_map.table[0], layer.expert_map.base_row)
    assert layer.expert_map.table[1, 1] == 12
    assert layer.mapped_slots == {*EVERYTHING, 12}
    layer.displace(0)  # nobody is there
    layer.place(0, OTHER.chosen(2), (2,))
    assert layer.expert_map.table[0, 2] == 8


def test_displace_waits_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a woven layer does: memory must outlive the kernels that were started on it."""
    layer = shared_layer()
    layer.place(0, OTHER.chosen(1), (1,))
    seen: list[set[int]] = []
    monkeypatch.setattr(
        shared_layer_module, "wait_for_readers", lambda device: seen.append(layer.mapped_slots)
    )
    layer.displace(0)
    assert seen == [{*EVERYTHING, 8}], "once, before the memory goes"
    layer.displace(1)
    assert len(seen) == 1, "no memory, no wait"


SHORT = OTHER.chosen(1, 2)
SHORT[2] = ExpertWeights(SHORT[2].w13[:-1], SHORT[2].w2)


@pytest.mark.parametrize(
    ("experts", "ids", "error"),
    [
        (OTHER.chosen(1), (1, 2), InvariantError),  # 2 is missing
        (OTHER.chosen(1, 3), (1, 3), InvariantError),  # 3 is elsewhere
        (OTHER.chosen(0, 1, 2, 5), (0, 1, 2, 5), InvariantError),  # more than slots
        (SHORT, (1, 2), RuntimeError),  # the copy fails
    ],
)
def test_a_place_that_fails_changes_nothing(experts, ids, error) -> None:
    layer = shared_layer([0, 1, 2, 5])
    table = layer.expert_map.table.clone()
    with pytest.raises(error):
        layer.place(0, experts, ids)
    assert torch.equal(layer.expert_map.table, table)
    assert layer.mapped_slots == set(EVERYTHING)
    assert layer.slots_of(0) == {}, "displacing it would take memory that it never had"


def test_rebind_reads_and_writes_no_weight() -> None:
    layer = shared_layer()
    layer.place(0, OTHER.chosen(1, 4), (1, 4))
    weights = layer.w13.clone()
    layer.rebind([1, 2], {0: (1, 4), 1: (2, 5)})
    assert torch.equal(layer.w13.nan_to_num(), weights.nan_to_num())
    assert layer.expert_map.table.tolist() == [
        [-1, 8, 2, -1, -1, -1, -1, -1],
        [-1, 1, 11, -1, -1, -1, -1, -1],
        [-1, 1, 2, -1, -1, -1, -1, -1],
    ]
    assert layer.readable_shard.expert_ids == {1, 2}


# ---- the plane over such layers ----

MAX_EXPERTS = 3


@pytest.fixture
def device(root: Path) -> SharedDevice:
    return SharedDevice(read_moe_spec(root / "base"))


class SharedDevice(Device):
    """Layers whose memory outlives planes, as engines come and go."""

    def __init__(self, spec: MoeSpec) -> None:
        self.config = EsftConfig(2, MAX_EXPERTS)
        super().__init__(spec, self.config, Rank(), is_resident=True)
        self.new_engine().adopt([], EVERYTHING)

    def _layer(self, layer_id: int, config: EsftConfig) -> SharedLayer:
        woven = super()._layer(layer_id, config)
        fields = vars(woven)
        return SharedLayer(**{name: fields[name] for name in fields if name != "adapter_runs"})

    def new_engine(self) -> AdapterPlane:
        self.plane = AdapterPlane(self.layers, self.spec, self.config, is_resident=True)
        return self.plane


def test_the_next_engine_finds_the_adapters_where_they_are(
    device: SharedDevice, root: Path
) -> None:
    device.load(root / "math")
    device.load(root / "law", pinned=True)
    placed = device.plane.placed()
    assert [(p.source.name, p.adapter_slot, p.source.pinned) for p in placed] == [
        ("math", 0, False),
        ("law", 1, True),
    ]
    device.new_engine().adopt(placed, EVERYTHING)
    device.check(root / "math")
    device.check(root / "law")
    assert device.plane.placed() == placed
    assert device.plane.names == {n: str((root / n).resolve()) for n in ("math", "law")}
    device.plane.check_integrity()


def test_what_is_elsewhere_is_not_on_the_map(device: SharedDevice, root: Path) -> None:
    device.load(root / "math")
    placed = device.plane.placed()
    device.new_engine().adopt(placed, range(4))
    for layer_id, layer in device.layers.items():
        table = layer.expert_map.table
        assert (table[:, 4:] == ELSEWHERE).all()
        for expert in placed[0].experts.get(layer_id, ()):
            assert (table[0, expert] >= 8) == (expert < 4)
    device.plane.adopt(placed, EVERYTHING)
    device.check(root / "math")


def test_adopted_adapters_live_on(device: SharedDevice, root: Path) -> None:
    device.load(root / "math")
    device.load(root / "law")
    device.new_engine().adopt(_placed(device, root), EVERYTHING)
    with pytest.raises(NoFreeSlotError):
        device.load(root / "code")
    device.plane.unload("math")
    device.load(root / "code")
    assert device.slots() == {"law": 1, "code": 0}
    device.check(root / "code")
    device.check(root / "law")
    device.check_mapped_slots()


def _placed(device: SharedDevice, root: Path) -> list[PlacedAdapter]:
    """What `placed` says, made of the folders' own tables."""
    return [
        PlacedAdapter(
            AdapterSource(name, name, str(root / name)),
            slot,
            read_manifest(root / name, device.spec).experts,
        )
        for slot, name in enumerate(("math", "law"))
    ]


def test_adopting_forgets_what_was_loaded(device: SharedDevice, root: Path) -> None:
    device.load(root / "math")
    changes = device.plane.uses.num_changes
    device.plane.adopt([], EVERYTHING)
    assert device.plane.names == {}
    assert device.slots() == {}
    assert device.plane.uses.num_changes > changes
    for layer in device.layers.values():
        assert torch.equal(layer.expert_map.table[0], layer.expert_map.base_row)
    math, law = _placed(device, root)
    twice = PlacedAdapter(law.source, math.adapter_slot, law.experts)
    with pytest.raises(InvariantError, match="not distinct"):
        device.plane.adopt([math, twice], EVERYTHING)


def test_layers_with_memory_of_their_own_adopt_nothing(root: Path) -> None:
    spec = read_moe_spec(root / "base")
    device = Device(spec, EsftConfig(2, MAX_EXPERTS), Rank(), is_resident=True)
    with pytest.raises(InvariantError, match="has memory of its own"):
        device.plane.adopt([], EVERYTHING)
