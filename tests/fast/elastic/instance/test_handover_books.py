"""KV's books over SGLang's own radix tree and allocator: handed over, moved, compacted.

`kv` stands for the pages: each slot holds what its token's KV would depend on, the whole prefix.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_elastic.engine import kv_handover, sglang_api
from sgl_elastic.errors import ElasticInternalError

CONTEXT = 512
Kv = dict[int, Any]  # slot -> what is in it


class Rank:
    """What the books touch of a scheduler, over `kv`, the memory of its device."""

    def __init__(self, capacity: int, kv: Kv | None = None) -> None:
        self.kv = {} if kv is None else kv
        pool = SimpleNamespace(size=0)
        allocator = TokenToKVPoolAllocator(4, torch.float32, "cpu", pool, need_sort=False)
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=1,
        )
        self.scheduler = SimpleNamespace(
            tree_cache=RadixCache(parameters),
            token_to_kv_pool_allocator=allocator,
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace()),
            model_config=SimpleNamespace(context_len=CONTEXT),
            pool_stats_observer=SimpleNamespace(),
            invariant_checker=SimpleNamespace(),
            kv_events_publisher=SimpleNamespace(),
            load_inquirer=SimpleNamespace(),
        )
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """As rank.py does."""
        sglang_api.set_kv_capacity(self.scheduler, capacity)
        sglang_api.set_free_slots(self.scheduler, kv_handover.used_slots(self.scheduler))

    def compute(self, tokens: list[int], extra_key: str | None = None) -> None:
        """A request that ran and left its KV in the cache."""
        known = self.match(tokens, extra_key)
        fresh = self.allocator.alloc(len(tokens) - len(known))
        for position, slot in enumerate(fresh.tolist(), start=len(known)):
            self.kv[slot] = content(tokens, position, extra_key)
        slots = torch.cat((torch.tensor(known, dtype=torch.int64), fresh))
        sglang_api.insert_prefix(self.scheduler, array("q", tokens), slots, extra_key, None)

    def match(self, tokens: list[int], extra_key: str | None = None) -> list[int]:
        """Slots of the longest known prefix."""
        return matched(self.scheduler.tree_cache, RadixKey(array("q", tokens), extra_key))

    def check(self) -> None:
        """Used and free slots are all slots, once each, and the KV of every path is its own."""
        used = kv_handover.used_slots(self.scheduler).tolist()
        free = self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist()
        assert sorted(used + free) == list(range(1, self.allocator.size + 1))
        for sequence in kv_handover.sequences_of(self.scheduler):
            tokens = array("q")
            tokens.frombytes(sequence.token_ids)
            for position, slot in enumerate(kv_handover.slots_of(sequence).tolist()):
                assert self.kv[slot] == content(list(tokens), position, sequence.extra_key)

    def copy_within(self, pairs: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in pairs} & {target for _, target in pairs}
        for source, target in pairs:
            self.kv[target] = self.kv.pop(source)

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator


def matched(tree: RadixCache, key: RadixKey) -> list[int]:
    """Slots of the longest known prefix."""
    found = tree.match_prefix(MatchPrefixParams(key=key))
    return tree.path_device_indices(found.last_device_node).tolist()


def content(tokens: list[int], position: int, extra_key: str | None) -> Any:
    return (extra_key, tuple(tokens[: position + 1]))


PROMPTS = [
    ([1, 2, 3, 4, 5], None),
    ([1, 2, 3, 9], None),
    ([1, 2, 3, 4, 5], "math"),
    ([7, 8], "law"),
    ([1, 2, 3, 9, 9, 9], None),
]


@pytest.fixture
def old() -> Rank:
    rank = Rank(40)
    for tokens, extra_key in PROMPTS:
        rank.compute(tokens, extra_key)
    rank.check()
    return rank


def test_the_next_rank_finds_the_same_kv_at_the_same_slots(old: Rank) -> None:
    new = Rank(40, old.kv)
    num_tokens = kv_handover.take_over(new.scheduler, kv_handover.sequences_of(old.scheduler))
    assert num_tokens == 5 + 3 + 5 + 2, "shared prefixes count once"
    for tokens, extra_key in PROMPTS:
        found = new.match(tokens, extra_key)
        assert found == old.match(tokens, extra_key)
        assert len(found) == len(tokens)
    assert new.match([1, 2, 3, 4, 5], "law") == [], "another adapter's KV is nobody's"
    assert sorted(new.allocator.free_pages.tolist()) == sorted(old.allocator.free_pages.tolist())
    new.check()
    new.compute([1, 2, 3, 4, 5, 6], "math")
    new.check()


def test_salts_stay_apart() -> None:
    old, new = Rank(8), Rank(8)
    for salt, slot in (("mine", 1), ("yours", 2), (None, 3)):
        slots = torch.tensor([slot])
        sglang_api.insert_prefix(old.scheduler, array("q", [5]), slots, None, salt)
    kv_handover.take_over(new.scheduler, kv_handover.sequences_of(old.scheduler))
    for salt, found in (("mine", [1]), ("yours", [2]), (None, [3]), ("other", [])):
        key = RadixKey(array("q", [5]), None, cache_salt=salt)
        assert matched(new.scheduler.tree_cache, key) == found


def test_what_does_not_fit_is_left_out(old: Rank) -> None:
    """Slots from 13 on are beyond the new capacity; those of the first prompts are not."""
    new = Rank(12, old.kv)
    kv_handover.take_over(new.scheduler, kv_handover.sequences_of(old.scheduler))
    assert len(new.match([1, 2, 3, 4, 5])) == 5
    assert len(new.match([7, 8], "law")) == 0
    new.check()
    kv_handover.take_over(new.scheduler, ())
    assert new.match([1, 2, 3, 4, 5]) == [], "what the rank had before is forgotten"
    assert sorted(new.allocator.free_pages.tolist()) == list(range(1, 13))


def test_what_was_used_longest_ago_comes_first_and_is_evicted_first(old: Rank) -> None:
    old.match([7, 8], "law")
    old.match([1, 2, 3, 4, 5], "math")
    old.match([1, 2, 3, 4, 5])
    keys = [(s.extra_key, len(s.slots) // 8) for s in kv_handover.sequences_of(old.scheduler)]
    assert keys == [(None, 6), ("law", 2), ("math", 5), (None, 5)]
    old.match([7, 8], "law")
    old.match([1, 2, 3, 4, 5], "math")
    kv_handover.compact(old.scheduler, 7, old.copy_within)
    old.resize(7)
    old.check()
    assert len(old.match([7, 8], "law")) == 2
    assert len(old.match([1, 2, 3, 4, 5], "math")) == 5
    assert old.match([1, 2, 3, 4, 5]) == []


def test_an_empty_rank_has_nothing_to_say() -> None:
    rank = Rank(4)
    assert kv_handover.sequences_of(rank.scheduler) == ()
    assert kv_handover.used_slots(rank.scheduler).tolist() == []
    assert kv_handover.compact(rank.scheduler, 2, rank.copy_within) == 0
    rank.scheduler.tree_cache = object()  # another kind of prefix cache
    with pytest.raises(ElasticInternalError, match="prefix cache object"):
        kv_handover.sequences_of(rank.scheduler)


def copy_from(source: Rank, target: Rank, copied: list[tuple[int, int]]):
    def copy(pairs: list[tuple[int, int]]) -> None:
        copied.extend(pairs)
        for theirs, own in pairs:
            target.kv[own] = source.kv[theirs]

    return copy


def test_sequences_move_from_another_device(old: Rank) -> None:
    new, small = Rank(40), Rank(7)
    new.compute([1, 2, 3, 4])
    new.compute([50, 51])
    copied: list[tuple[int, int]] = []
    sequences = kv_handover.sequences_of(old.scheduler)
    num = kv_handover.take_moved(new.scheduler, sequences, copy_from(old, new, copied))
    assert num == len(copied) == (5 + 3 + 5 + 2) - 4, "what the device has is not copied"
    new.check()
    for tokens, extra_key in PROMPTS:
        assert len(new.match(tokens, extra_key)) == len(tokens)
    assert len(new.match([50, 51])) == 2
    copied.clear()
    kv_handover.take_moved(small.scheduler, sequences, copy_from(old, small, copied))
    small.check()
    assert len(copied) == len(kv_handover.used_slots(small.scheduler))
    assert 0 < len(copied) <= 7, "what finds no room does not move"


def test_compact_moves_kv_below_the_new_capacity() -> None:
    rank = Rank(40)
    rank.compute(list(range(100, 110)))  # slots 1 to 10, soon free again
    rank.compute([1, 2, 3, 4, 5, 6], "math")  # 11 to 16
    rank.compute([1, 2, 9], "math")
    sglang_api.evict_all_but(rank.scheduler, 7)
    rank.check()
    assert min(rank.match([1, 2, 3, 4, 5, 6], "math")) > 10
    assert kv_handover.compact(rank.scheduler, 12, rank.copy_within) == 5
    rank.resize(12)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 9]):
        found = rank.match(tokens, "math")
        assert len(found) == len(tokens)
        assert max(found) <= 12
    rank.check()


def test_growing_adds_free_slots(old: Rank) -> None:
    sglang_api.set_kv_capacity(old.scheduler, 44)
    sglang_api.add_free_slots(old.scheduler, 41, 44)
    old.check()
    assert old.scheduler.max_req_len == 43
    assert sglang_api.kv_capacity(old.scheduler) == 44


@pytest.mark.parametrize("seed", range(10))
def test_a_random_life_keeps_the_books(seed: int) -> None:
    """Computing, shrinking, growing, handing over and moving, in any order."""
    rng = random.Random(seed)
    rank = Rank(60)
    for _ in range(25):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        room = rank.allocator.available_size()
        if room >= len(tokens):
            rank.compute(tokens, rng.choice([None, "math"]))
        action = rng.randrange(4)
        if action == 0:
            target = rng.randint(10, 60)
            kv_handover.compact(rank.scheduler, target, rank.copy_within)
            rank.resize(target)
        elif action == 1:
            following = Rank(rank.allocator.size, rank.kv)
            kv_handover.take_over(following.scheduler, kv_handover.sequences_of(rank.scheduler))
            rank = following
        elif action == 2:
            elsewhere = Rank(60)
            elsewhere.compute([rng.randrange(3) for _ in range(4)])
            sequences = kv_handover.sequences_of(rank.scheduler)
            kv_handover.take_moved(elsewhere.scheduler, sequences, copy_from(rank, elsewhere, []))
            rank = elsewhere
        rank.check()
