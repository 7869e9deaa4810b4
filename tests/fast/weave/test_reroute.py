"""Rerouting: the paper's figure, a loop in Python, and the layer's choice between the two ways."""

import pytest
import torch
from hypothesis import given, settings

from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.reroute import Rerouter
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import reroute_unfused
from tests.fast.kernels.cases import Case, naive, random_cases
from tests.support import figure4


@settings(max_examples=250)
@given(case=random_cases(max_tokens=133))
def test_equals_the_naive_loop(case: Case) -> None:
    topk_ids, tags, table = case.make()
    before = topk_ids.clone(), tags.clone(), table.clone()

    slot_ids = reroute_unfused(topk_ids, tags, table)

    assert slot_ids.tolist() == naive(*before)
    assert slot_ids.dtype == case.dtype
    assert slot_ids.shape == topk_ids.shape
    assert all(map(torch.equal, before, (topk_ids, tags, table))), "an input was changed"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_figure_4_of_the_paper(dtype: torch.dtype) -> None:
    slot_ids = reroute_unfused(
        figure4.TOPK_BEFORE.to(dtype), figure4.TOKEN_ADAPTER_SLOTS, figure4.expert_map_table()
    )
    assert torch.equal(slot_ids, figure4.TOPK_AFTER.to(dtype))


def rerouter_of_rank(rank: int, num_ranks: int) -> tuple[Rerouter, BatchTags, ExpertMap]:
    """Eight experts, two adapters; adapter 1 replaces experts 1 and 6."""
    per_rank = 8 // num_ranks
    layout = SlotLayout.plan(
        num_base=per_rank, num_routed=per_rank, num_adapters=2, max_experts_per_adapter=2
    )
    row = base_row(num_experts=8, num_routed_global=8, num_routed_local=per_rank, ep_rank=rank)
    expert_map = ExpertMap(row, layout, "cpu")
    own = [e for e in (1, 6) if row[e] >= 0]
    expert_map.write(1, dict(zip(own, layout.adapter_range(1), strict=False)))
    tags = BatchTags(8, "cpu")
    return Rerouter(expert_map, tags, reroute_unfused), tags, expert_map


TOPK_IDS = torch.tensor([[1, 6, 2], [6, -1, 1], [7, 0, -1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "expected"),
    [
        (0, 1, TOPK_IDS.tolist()),
        (0, 2, [[1, -1, 2], [-1, -1, 1], [-1, 0, -1]]),
        (1, 2, [[-1, 2, -1], [2, -1, -1], [3, -1, -1]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_all_base_batch(
    rank: int, num_ranks: int, expected: list[list[int]], dtype: torch.dtype
) -> None:
    """As SGLang's own mapping, and -1 stays -1 rather than counting from the end."""
    rerouter, tags, expert_map = rerouter_of_rank(rank, num_ranks)
    topk_ids = TOPK_IDS.to(dtype)
    table_before = expert_map.table.clone()
    assert rerouter(topk_ids).tolist() == expected
    tags.set(torch.full((3,), -1, dtype=torch.int32))
    assert rerouter(topk_ids).tolist() == expected
    assert torch.equal(topk_ids, TOPK_IDS.to(dtype))
    assert torch.equal(expert_map.table, table_before)


@pytest.mark.parametrize(
    ("rank", "num_ranks", "expected"),
    [
        (0, 1, [[10, 11, 2], [6, -1, 1], [7, 0, -1]]),
        (0, 2, [[6, -1, 2], [-1, -1, 1], [-1, 0, -1]]),
        (1, 2, [[-1, 6, -1], [2, -1, -1], [3, -1, -1]]),
    ],
)
def test_a_mixed_batch(rank: int, num_ranks: int, expected: list[list[int]]) -> None:
    """Tokens of adapter 1, of the base and of adapter 0, which replaces nothing."""
    rerouter, tags, _ = rerouter_of_rank(rank, num_ranks)
    tags.set(torch.tensor([1, -1, 0], dtype=torch.int32))
    assert rerouter(TOPK_IDS).tolist() == expected


def test_a_write_to_the_map_is_seen_at_once() -> None:
    rerouter, tags, expert_map = rerouter_of_rank(0, 1)
    tags.set(torch.tensor([0, 0, 0], dtype=torch.int32))
    assert rerouter(TOPK_IDS)[0].tolist() == [1, 6, 2]
    expert_map.write(0, {2: 9})
    assert rerouter(TOPK_IDS)[0].tolist() == [1, 6, 9]
    expert_map.clear(0)
    assert rerouter(TOPK_IDS)[0].tolist() == [1, 6, 2]
