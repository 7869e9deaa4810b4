"""A woven layer: what it takes from FusedMoE, and the order in which experts come and go."""

import pytest
import torch

from sgl_esft.config import EsftConfig
from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights, WovenLayer, plan_layout
from tests.support.random_layers import PADDED, FakeFusedMoE, RandomExperts, Rank, cut, share_of

BASE = RandomExperts.draw(num_experts=8, hidden=6, width=4, seed=0, dtype=torch.float32)
OTHER = RandomExperts.draw(num_experts=8, hidden=6, width=4, seed=1, dtype=torch.float32)


def fused_moe(
    rank: Rank | None = None,
    *,
    max_adapters: int = 2,
    num_shared: int = 0,
    config: EsftConfig = PADDED,
) -> FakeFusedMoE:
    return FakeFusedMoE(
        BASE,
        rank or Rank(),
        layer_id=3,
        max_adapters=max_adapters,
        max_experts=3,
        num_shared=num_shared,
        config=config,
    )


def test_binds_one_rank() -> None:
    module = fused_moe()
    layer = module.woven()
    assert layer.layer_id == 3
    assert layer.shard == ExpertShard(expert_ids=range(8), intermediate=range(4))
    assert layer.layout.num_slots == 8 + 2 * 3
    assert layer.w13.data_ptr() == module.w13_weight.data_ptr(), "SGLang's own memory, not a copy"
    assert layer.w2.data_ptr() == module.w2_weight.data_ptr()
    assert layer.mapped_slots == set(range(8))
    assert layer.expert_map.base_row.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("rank", "expert_ids", "rows", "base_row"),
    [
        (Rank(ep_rank=1, ep_size=2), range(4, 8), range(4), [-1, -1, -1, -1, 0, 1, 2, 3]),
        (Rank(tp_rank=1, tp_size=2), range(8), range(2, 4), list(range(8))),
        (
            Rank(ep_rank=1, ep_size=4, tp_rank=1, tp_size=2),
            range(2, 4),
            range(2, 4),
            [-1, -1, 0, 1, -1, -1, -1, -1],
        ),
    ],
)
def test_binds_a_rank_of_several(
    rank: Rank, expert_ids: range, rows: range, base_row: list[int]
) -> None:
    layer = fused_moe(rank).woven()
    assert layer.shard == ExpertShard(expert_ids, rows)
    assert layer.expert_map.base_row.tolist() == base_row
    slots_per_adapter = min(3, len(expert_ids))
    assert layer.layout.num_slots == len(expert_ids) + 2 * slots_per_adapter


def test_fused_shared_experts_are_base_slots_that_no_adapter_gets() -> None:
    layer = fused_moe(Rank(ep_rank=1, ep_size=3), num_shared=2).woven()
    assert layer.shard.expert_ids == range(2, 4)
    assert layer.layout.num_base == 4
    assert layer.layout.slots_per_adapter == 2
    assert layer.expert_map.base_row.tolist() == [-1, -1, 0, 1, -1, -1, 2, 3]
    assert layer.mapped_slots == {0, 1, 2, 3}


def test_refuses_a_weight_of_another_length() -> None:
    module = fused_moe()
    planned = plan_layout(module, 8, num_adapters=3, max_experts_per_adapter=3)
    with pytest.raises(InvariantError, match="layer 3: 14 slots, planned 17"):
        WovenLayer.bind(module, planned)
    module.w2_weight = torch.nn.Parameter(module.w2_weight[:-1], requires_grad=False)
    with pytest.raises(InvariantError):
        module.woven()


@pytest.mark.parametrize(
    "attribute", ["num_experts", "num_global_routed_experts", "moe_ep_rank", "layer_id"]
)
def test_refuses_a_layer_that_describes_itself_otherwise(attribute: str) -> None:
    module = fused_moe()
    setattr(module, attribute, None)
    with pytest.raises(UnsupportedModelError, match="None, not a number"):
        module.woven()


def test_place_copies_and_publishes() -> None:
    layer = fused_moe().woven()
    adapter = OTHER.chosen(6, 1)
    layer.place(1, adapter)
    assert layer.expert_map.table[1].tolist() == [0, 11, 2, 3, 4, 5, 12, 7]
    for expert, slot in ((1, 11), (6, 12)):
        assert torch.equal(layer.w13[slot], OTHER.w13[expert])
        assert torch.equal(layer.w2[slot], OTHER.w2[expert])
    assert torch.equal(layer.w13[:8], BASE.w13)
    assert torch.equal(layer.w2[:8], BASE.w2)
    assert layer.w13[8:11].isnan().all(), "the other adapter's slots are untouched"
    assert layer.w13[13].isnan().all()
    assert layer.mapped_slots == {*range(8), 11, 12}
    layer.expert_map.check_integrity(layer.mapped_slots)


def test_place_casts_to_the_dtype_that_is_served() -> None:
    layer = fused_moe().woven()
    weights = OTHER.chosen(2)[2]
    half = ExpertWeights(weights.w13.bfloat16(), weights.w2.bfloat16())
    layer.place(0, {2: half})
    assert torch.equal(layer.w13[8], half.w13.float())


def test_displace_takes_the_map_back_and_leaves_the_neighbour() -> None:
    layer = fused_moe().woven()
    layer.place(0, OTHER.chosen(1, 2, 3))
    layer.place(1, OTHER.chosen(1))
    layer.displace(0)
    assert torch.equal(layer.expert_map.table[0], layer.expert_map.base_row)
    assert layer.expert_map.table[1, 1] == 11
    assert layer.mapped_slots == {*range(8), 11}
    layer.expert_map.check_integrity(layer.mapped_slots)
    layer.place(0, OTHER.chosen(7))  # the slots are used again
    assert layer.expert_map.table[0].tolist() == [*range(7), 8]
    assert torch.equal(layer.w13[8], OTHER.w13[7])
    assert layer.mapped_slots == {*range(8), 8, 11}


def test_more_experts_than_slots_change_nothing() -> None:
    layer = fused_moe().woven()
    table = layer.expert_map.table.clone()
    with pytest.raises(InvariantError, match="4 experts for 3 slots"):
        layer.place(0, OTHER.chosen(0, 1, 2, 3))
    assert torch.equal(layer.expert_map.table, table)
    assert layer.w13[8:].isnan().all()
    assert layer.mapped_slots == set(range(8))


def test_a_rank_takes_its_experts_and_its_rows() -> None:
    layer = fused_moe(Rank(ep_rank=1, ep_size=2, tp_rank=1, tp_size=2)).woven()
    layer.place(0, share_of(OTHER.chosen(1, 4, 6), layer.shard))
    assert layer.expert_map.table[0].tolist() == [-1, -1, -1, -1, 4, 1, 5, 3]
    part = cut(OTHER.chosen(4)[4], range(2, 4))
    assert torch.equal(layer.w13[4], part.w13)
    assert torch.equal(layer.w2[4], OTHER.w2[4][:, 2:])
