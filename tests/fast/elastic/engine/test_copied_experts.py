"""Copies of experts on the ranks: each token's expert is computed once, by the merged model's bits.

Ranks are SharedLayers over the same slots; what the ranks compute is added up as SGLang's combine
does.
"""

from __future__ import annotations

import pytest
import torch

from sgl_elastic.plan.redundancy import computed_for, holders_of
from sgl_elastic.types import ExpertCopy, Placement
from sgl_esft.weave.batch_tags import BASE, rows_of_source
from sgl_esft.weave.expert_map import ExpertMap
from sgl_esft.weave.heat import HeatSampler
from sgl_esft.weave.shared_layer import SharedLayer
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import reroute_unfused
from sgl_esft_kernels.checks import check_values
from tests.support.random_layers import PADDED, FakeFusedMoE, RandomExperts, Rank

NUM_EXPERTS, NUM_ADAPTERS, NUM_RANKS = 8, 2, 3
MAX_SOURCES = 3  # as many as ranks: the last one's base is the map's last row
HOMES = (5, 5, 5, 7, 7, 7, 2, 2)  # devices
PLACEMENT = Placement((2, 5, 7), HOMES, (0, 0, 0))
COPIES = (ExpertCopy(3, 0, 7), ExpertCopy(3, 0, 2), ExpertCopy(3, 4, 2), ExpertCopy(4, 1, 2))
ADAPTERS = {0: (0, 4), 1: (1, 4, 6)}  # adapter slot -> expert ids
BASES = RandomExperts.draw(num_experts=NUM_EXPERTS, hidden=6, width=4, seed=0, dtype=torch.float32)


def rank_layer(rank: int, copies: tuple[ExpertCopy, ...]) -> SharedLayer:
    module = FakeFusedMoE(
        BASES, Rank(), layer_id=3, max_adapters=NUM_ADAPTERS, max_experts=3, config=PADDED
    )
    layer = SharedLayer.bind(module, module.esft_layout)
    layer.expert_map = ExpertMap(
        torch.full((NUM_EXPERTS,), -1, dtype=torch.int32), layer.layout, "cpu", MAX_SOURCES
    )
    holders = holders_of(PLACEMENT, copies, 3)
    resident = [e for e, ranks in enumerate(holders) if rank in ranks]
    computed = [computed_for(s % NUM_RANKS, rank, holders) for s in range(MAX_SOURCES)]
    layer.rebind(resident, ADAPTERS, computed)
    return layer


def slots_by_rank(copies: tuple[ExpertCopy, ...], source: int) -> list[torch.Tensor]:
    """Of each rank: its slots for every (adapter or base, expert) of a source's tokens."""
    tags = torch.tensor([BASE, 0, 1], dtype=torch.int32)
    rows = rows_of_source(tags, source, NUM_ADAPTERS, MAX_SOURCES)
    topk_ids = torch.arange(NUM_EXPERTS, dtype=torch.int32).repeat(3, 1)
    tables = [rank_layer(rank, copies).expert_map.table for rank in range(NUM_RANKS)]
    for table in tables:
        check_values(topk_ids, rows, table)  # native rerouting refuses what fails this
    return [reroute_unfused(topk_ids, rows, table) for table in tables]


@pytest.mark.parametrize("source", range(NUM_RANKS))
def test_each_expert_is_computed_once_and_with_the_same_weights(source: int) -> None:
    found = torch.stack(slots_by_rank(COPIES, source))
    assert ((found >= 0).sum(dim=0) == 1).all()
    without = torch.stack(slots_by_rank((), source))
    assert torch.equal(found.max(dim=0).values, without.max(dim=0).values), "other slots are used"
    moved = (found >= 0) != (without >= 0)
    copied = {copy.expert_id for copy in COPIES if copy.layer_id == 3}
    assert set(moved.any(dim=0).any(dim=0).nonzero().flatten().tolist()) <= copied


def test_adapters_go_where_the_bases_go() -> None:
    """So an adapter's answer is added up in the same order as its merged model's."""
    for source in range(NUM_RANKS):
        for found in slots_by_rank(COPIES, source):
            is_here = found >= 0
            assert torch.equal(is_here[0], is_here[1])
            assert torch.equal(is_here[0], is_here[2])


def test_a_token_uses_the_copy_of_its_own_rank() -> None:
    for source, device_id in enumerate(PLACEMENT.device_ids):
        own = slots_by_rank(COPIES, source)[source]
        held = {e for e, home in enumerate(HOMES) if home == device_id}
        held |= {c.expert_id for c in COPIES if c.layer_id == 3 and c.device_id == device_id}
        assert set((own[0] >= 0).nonzero().flatten().tolist()) == held


def test_an_adapter_that_leaves_is_the_base_for_every_source() -> None:
    layer = rank_layer(0, COPIES)
    layer.expert_map.clear(1)
    table = layer.expert_map.table.view(MAX_SOURCES, NUM_ADAPTERS + 1, NUM_EXPERTS)
    assert torch.equal(table[:, 1], table[:, -1])
    assert not torch.equal(table[:, 0], table[:, -1])


def test_one_source_is_the_map_of_old() -> None:
    layout = SlotLayout.plan(
        num_base=8, num_routed=8, num_adapters=NUM_ADAPTERS, max_experts_per_adapter=3
    )
    row = torch.tensor([0, 1, -1, 3, 4, 5, 6, 7], dtype=torch.int32)
    old = ExpertMap(row, layout, "cpu")
    assert old.table.shape == (NUM_ADAPTERS + 1, NUM_EXPERTS)
    old.write(1, {2: 12, 3: 13})
    assert old.table[1].tolist() == [0, 1, 12, 13, 4, 5, 6, 7]
    tags = torch.tensor([BASE, 0, 1], dtype=torch.int32)
    assert rows_of_source(tags, 0, NUM_ADAPTERS, 1).tolist() == [BASE, 0, 1]
    assert rows_of_source(tags, 2, NUM_ADAPTERS, 4).tolist() == [8, 6, 7]


def test_heat_counts_by_adapter_whatever_rank_a_token_is_of() -> None:
    sampler = HeatSampler([3], NUM_ADAPTERS, NUM_EXPERTS, 1, dict, "cpu")
    tags = torch.tensor([BASE, 0, 1, 0], dtype=torch.int32)
    ids = torch.tensor([[1, 2], [1, 3], [1, 4], [7, 7]], dtype=torch.int32)
    for source in range(MAX_SOURCES):
        sampler.begin_step(3)  # the fourth is padding
        sampler.count(0, ids, rows_of_source(tags, source, NUM_ADAPTERS, MAX_SOURCES))
    found = sampler.report()["adapters"]
    assert found["base"][0] == [0, 3, 3, 0, 0, 0, 0, 0]
    assert sampler.by_expert() == {3: [0, 9, 3, 3, 3, 0, 0, 0]}
