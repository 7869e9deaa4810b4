"""The CPU platform's collectives between real gloo processes, against what one process computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sgl_esft.errors import InvariantError
from sgl_esft.platform import collectives, device_memory

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@dataclass(frozen=True)
class Group:
    """What the collectives read off SGLang's GroupCoordinator."""

    world_size: int
    rank_in_group: int
    device_group: dist.ProcessGroup

    def draw(self, rows: int | list[int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """Every rank's input: small whole numbers, whose sums are exact in any dtype and order."""
        sizes = [rows] * self.world_size if isinstance(rows, int) else rows
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(-9, 9, (n, 3), generator=generator).to(dtype) for n in sizes]


def check_all_gather_into_tensor(group: Group) -> None:
    for rows in (1, 4):
        for dtype in DTYPES:
            inputs = group.draw(rows, dtype)
            output = torch.empty(rows * group.world_size, 3, dtype=dtype)
            collectives.all_gather_into_tensor(group, output, inputs[group.rank_in_group])
            assert torch.equal(output, torch.cat(inputs))


def check_an_input_that_is_not_contiguous(group: Group) -> None:
    inputs = group.draw(4, torch.float32)
    output = torch.empty(3 * group.world_size, 4)
    collectives.all_gather_into_tensor(group, output, inputs[group.rank_in_group].T)
    assert torch.equal(output, torch.cat([tensor.T for tensor in inputs]))


def check_reduce_scatter_tensor(group: Group) -> None:
    for dtype in DTYPES:
        inputs = group.draw(2 * group.world_size, dtype)
        own = inputs[group.rank_in_group]
        before = own.clone()
        output = torch.empty(2, 3, dtype=dtype)
        collectives.reduce_scatter_tensor(group, output, own)
        assert torch.equal(output, sum(inputs).chunk(group.world_size)[group.rank_in_group])
        assert torch.equal(own, before), "the input is the caller's"


def uneven(group: Group) -> list[list[int]]:
    """Sizes by rank: growing, with an empty rank, all on one rank, equal, nothing at all."""
    world = group.world_size
    return [
        list(range(1, world + 1)),
        [0, *range(2, world + 1)],
        [*[0] * (world - 1), 5],
        [2] * world,
        [0] * world,
    ]


def check_reduce_scatterv(group: Group) -> None:
    for sizes in uneven(group):
        inputs = group.draw(sum(sizes), torch.float32)
        own = inputs[group.rank_in_group]
        before = own.clone()
        expected = sum(inputs).split(sizes)[group.rank_in_group]
        assert torch.equal(collectives.reduce_scatterv(group, own, sizes=sizes), expected)
        output = torch.full_like(expected, 99)
        returned = collectives.reduce_scatterv(group, own, output=output, sizes=sizes)
        assert returned is output
        assert torch.equal(output, expected)
        assert torch.equal(own, before)
        if len(set(sizes)) == 1:
            assert torch.equal(collectives.reduce_scatterv(group, own), expected), "the default"


def check_all_gatherv(group: Group) -> None:
    for sizes in uneven(group):
        for dtype in DTYPES:
            inputs = group.draw(sizes, dtype)
            (result,) = collectives.all_gatherv(group, inputs[group.rank_in_group], sizes=sizes)
            assert torch.equal(result, torch.cat(inputs))
            assert result.dtype == dtype


def check_all_gatherv_of_several_tensors(group: Group) -> None:
    sizes = list(range(1, group.world_size + 1))
    hidden = group.draw(sizes, torch.float32)
    ids = [tensor[:, 0] for tensor in group.draw(sizes, torch.int64, seed=1)]
    rank = group.rank_in_group
    results = collectives.all_gatherv(group, [hidden[rank], ids[rank]], sizes=sizes)
    assert torch.equal(results[0], torch.cat(hidden))
    assert torch.equal(results[1], torch.cat(ids))


def check_all_gatherv_into_an_output(group: Group) -> None:
    inputs = group.draw(3, torch.float32)
    output = torch.empty(3 * group.world_size, 3)
    results = collectives.all_gatherv(group, inputs[group.rank_in_group], output=output)
    assert results[0] is output
    assert torch.equal(output, torch.cat(inputs))


def check_rows_that_were_not_announced(group: Group) -> None:
    """Refused on the rank that has them, before any rank waits for another."""
    with pytest.raises(InvariantError, match=f"rank {group.rank_in_group} gathers 2 rows"):
        collectives.all_gatherv(group, torch.zeros(2, 3), sizes=[3] * group.world_size)


def check_the_least_memory_of_all_ranks(group: Group) -> None:
    """Bytes, exact where a float32 would not be."""
    own = (1 << 36) + 7 - group.rank_in_group
    with mock.patch.object(device_memory, "available_bytes", return_value=own):
        ask = partial(device_memory.least_available_bytes, 0, group.device_group)
        assert ask(over_ranks=False) == own
        assert ask(over_ranks=True) == (1 << 36) + 7 - (group.world_size - 1)


CHECKS: tuple[Callable[[Group], None], ...] = (
    check_all_gather_into_tensor,
    check_an_input_that_is_not_contiguous,
    check_reduce_scatter_tensor,
    check_reduce_scatterv,
    check_all_gatherv,
    check_all_gatherv_of_several_tensors,
    check_all_gatherv_into_an_output,
    check_rows_that_were_not_announced,
    check_the_least_memory_of_all_ranks,
)


def run_rank(rank: int, world_size: int, store: str) -> None:
    """One process: every check among all ranks, then among all but the first."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        for members in (range(world_size), range(1, world_size)):
            device_group = dist.new_group(list(members))
            if rank in members:
                group = Group(len(members), members.index(rank), device_group)
                for check in CHECKS:
                    check(group)
    finally:
        dist.destroy_process_group()


def test_among_three_ranks_and_among_two_of_them(tmp_path: Path) -> None:
    """In the group of two a rank's number is not its number in the world."""
    mp.spawn(run_rank, (3, str(tmp_path / "store")), nprocs=3)
