"""The expert map: the paper's entries, a base row that stays, and nothing written by halves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.errors import InvariantError
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.slot_layout import SlotLayout
from tests.support import figure4


def make_map(layout: SlotLayout = figure4.LAYOUT) -> ExpertMap:
    """The map of a rank that holds every expert."""
    return ExpertMap(torch.arange(layout.num_base, dtype=torch.int32), layout, "cpu")


def test_entries_of_the_papers_figure_come_and_go_by_adapter() -> None:
    expert_map = make_map()
    for adapter_slot, experts in figure4.EXPERT_TO_SLOT.items():
        expert_map.write(adapter_slot, experts)
    assert torch.equal(expert_map.table, figure4.expert_map_table())
    assert expert_map.table.dtype == torch.int32
    assert expert_map.table[0, [3, 14, 47, 5]].tolist() == [64, 65, 66, 5]
    assert expert_map.table[1, [3, 5, 59]].tolist() == [3, 72, 78]
    expert_map.clear(0)
    assert torch.equal(expert_map.table[0], expert_map.base_row)
    assert torch.equal(expert_map.table[1], figure4.expert_map_table()[1])


def test_starts_as_base_and_keeps_its_base_row() -> None:
    expert_map = make_map()
    identity = torch.arange(64, dtype=torch.int32)
    assert torch.equal(expert_map.table, identity.repeat(3, 1))
    expert_map.write(0, {0: 64, 63: 71})
    expert_map.write(1, {e: 72 + e for e in range(8)})
    assert torch.equal(expert_map.base_row, identity)


def test_updates_happen_in_place() -> None:
    expert_map = make_map()
    table, address = expert_map.table, expert_map.table.data_ptr()
    expert_map.write(1, {5: 72})
    assert table[1, 5] == 72
    expert_map.clear(1)
    assert table[1, 5] == 5
    assert expert_map.table is table
    assert table.data_ptr() == address
    assert table.is_contiguous()


def test_a_second_write_forgets_the_first() -> None:
    expert_map = make_map()
    expert_map.write(0, {3: 64, 14: 65})
    expert_map.write(0, {7: 64})
    expected = expert_map.base_row.clone()
    expected[7] = 64
    assert torch.equal(expert_map.table[0], expected)
    expert_map.write(0, {})
    assert torch.equal(expert_map.table[0], expert_map.base_row)


@pytest.mark.parametrize(
    ("adapter_slot", "slot"),
    [(0, 63), (0, 72), (0, -1), (0, 80), (1, 71), (1, 64), (1, 0)],
)
def test_a_stray_slot_is_refused_and_changes_nothing(adapter_slot: int, slot: int) -> None:
    expert_map = make_map()
    expert_map.write(0, {3: 64})
    before = expert_map.table.clone()
    own = figure4.LAYOUT.adapter_range(adapter_slot)
    with pytest.raises(InvariantError, match=rf"{{9: {slot}}} are not in"):
        expert_map.write(adapter_slot, {8: own[0], 9: slot})
    assert torch.equal(expert_map.table, before)


@pytest.mark.parametrize("adapter_slot", [-1, 2])
def test_an_adapter_slot_that_is_not_there_is_refused(adapter_slot: int) -> None:
    """-1 above all: as an index it would be the base's row."""
    expert_map = make_map()
    before = expert_map.table.clone()
    with pytest.raises(InvariantError, match="adapter slot"):
        expert_map.write(adapter_slot, {3: 64})
    with pytest.raises(InvariantError, match="adapter slot"):
        expert_map.clear(adapter_slot)
    assert torch.equal(expert_map.table, before)


def test_integrity_check_finds_an_unmapped_slot() -> None:
    expert_map = make_map()
    mapped = set(range(64))
    expert_map.check_integrity(mapped)
    expert_map.write(1, {5: 72, 13: 73})
    with pytest.raises(InvariantError, match=r"\[72, 73\]"):
        expert_map.check_integrity(mapped)
    with pytest.raises(InvariantError, match=r"\[73\]"):
        expert_map.check_integrity(mapped | {72})
    expert_map.check_integrity(mapped | {72, 73})
    with pytest.raises(InvariantError, match=r"\[0\]"):
        expert_map.check_integrity((mapped | {72, 73}) - {0})


@given(
    per_rank=st.integers(1, 9),
    num_ranks=st.integers(1, 5),
    num_shared=st.integers(0, 2),
)
def test_every_routed_expert_is_on_one_rank(per_rank: int, num_ranks: int, num_shared: int) -> None:
    routed = per_rank * num_ranks
    rows = torch.stack(
        [
            base_row(
                num_experts=routed + num_shared,
                num_routed_global=routed,
                num_routed_local=per_rank,
                ep_rank=rank,
            )
            for rank in range(num_ranks)
        ]
    )
    assert (rows[:, :routed] >= 0).sum(dim=0).tolist() == [1] * routed
    assert rows.dtype == torch.int32
    for rank, row in enumerate(rows):
        own = range(rank * per_rank, (rank + 1) * per_rank)
        assert row[list(own)].tolist() == list(range(per_rank))
        assert row[routed:].tolist() == [per_rank + i for i in range(num_shared)]


def test_an_expert_parallel_adapter_keeps_the_other_ranks_experts_away() -> None:
    layout = SlotLayout.plan(num_base=4, num_routed=4, num_adapters=2, max_experts_per_adapter=2)
    row = base_row(num_experts=8, num_routed_global=8, num_routed_local=4, ep_rank=1)
    expert_map = ExpertMap(row, layout, "cpu")
    expert_map.write(1, {5: 6, 7: 7})
    assert expert_map.table.tolist() == [
        [-1, -1, -1, -1, 0, 1, 2, 3],
        [-1, -1, -1, -1, 0, 6, 2, 7],
        [-1, -1, -1, -1, 0, 1, 2, 3],
    ]
    expert_map.check_integrity({0, 1, 2, 3, 6, 7})
