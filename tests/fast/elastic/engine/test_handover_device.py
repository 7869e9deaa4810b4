"""KV's books name the pool's device in everything they make.

Here the pool is on the CPU and torch's default device is another one, as on an accelerator the pool
is there and the default is the CPU: a tensor made without a device cannot be mixed with the pool's.
"""

from __future__ import annotations

import torch

from sgl_elastic.engine import kv_handover
from tests.fast.elastic.instance.test_handover_books import PROMPTS, Rank, copy_from

ELSEWHERE = torch.device("meta")


def filled(capacity: int = 40) -> Rank:
    rank = Rank(capacity)
    for tokens, extra_key in PROMPTS:
        rank.compute(tokens, extra_key)
    return rank


def devices(rank: Rank) -> set[str]:
    """Where the books' tensors are."""
    nodes = kv_handover._nodes(rank.scheduler)
    tensors = [rank.allocator.free_pages, rank.allocator.release_pages]
    return {str(tensor.device) for tensor in [*tensors, *(node.value for node in nodes)]}


def test_taking_over() -> None:
    old, new = filled(), Rank(40)
    with ELSEWHERE:
        assert kv_handover.take_over(new.scheduler, kv_handover.sequences_of(old.scheduler)) == 15
        assert devices(new) == {"cpu"}
        assert kv_handover.take_over(new.scheduler, ()) == 0
        assert devices(new) == {"cpu"}


def test_bringing_from_another_device() -> None:
    old, new = filled(), Rank(40)
    copied: list[tuple[int, int]] = []
    with ELSEWHERE:
        sequences = kv_handover.sequences_of(old.scheduler)
        kv_handover.take_moved(new.scheduler, sequences, copy_from(old, new, copied))
    assert devices(new) == {"cpu"}
    assert len(copied) == 15
    new.check()


def test_compacting() -> None:
    rank = Rank(40)
    rank.compute(list(range(100, 110)))
    rank.compute([1, 2, 3, 4, 5, 6])
    with ELSEWHERE:
        kv_handover.compact(rank.scheduler, 8, rank.copy_within)
        rank.resize(8)
    assert devices(rank) == {"cpu"}
    rank.check()
    assert max(rank.match([1, 2, 3, 4, 5, 6])) <= 8
    empty = Rank(4)
    with ELSEWHERE:
        empty.resize(6)
    assert devices(empty) == {"cpu"}
    assert sorted(empty.allocator.free_pages.tolist()) == [1, 2, 3, 4, 5, 6]
