"""A rank's KV, handed to the next rank on the same device: only the books move, the KV stays.

    old rank: prefix cache --> [sequences_of] --> KvSequence... --> front
    new rank: front --> [take_over] --> prefix cache, free slots

A frozen rank has retracted its requests into the prefix cache, so the cache's tree names every
slot that is in use. Rebuilt in another rank over the same pages, it is as if that rank had
computed it.

Slots are on the host while they travel; in the prefix cache and the allocator they are tensors on
the KV pool's device, as SGLang's own are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sgl_elastic.engine import sglang_api
from sgl_elastic.instance.rank_messages import KvSequence


def sequences_of(scheduler: Any) -> tuple[KvSequence, ...]:
    """The rank's prefix cache as paths from root to leaf, the one used longest ago first."""
    found = []
    for path, leaf in sglang_api.prefix_paths(scheduler):
        token_ids = array("q")
        for node in path:
            token_ids.extend(node.key.raw_token_ids())
        slots = torch.cat([node.value for node in path])
        found.append(
            KvSequence(
                token_ids=token_ids.tobytes(),
                slots=_to_bytes(slots),
                extra_key=path[0].key.extra_key,
                cache_salt=path[0].key.cache_salt,
                last_access=float(leaf.last_access_time),
            )
        )
    return tuple(sorted(found, key=lambda sequence: sequence.last_access))


def num_slots(scheduler: Any) -> int:
    """KV slots that the prefix cache holds."""
    return sum(node.value.numel() for node in _nodes(scheduler))


def take_over(scheduler: Any, sequences: Iterable[KvSequence]) -> int:
    """Make the prefix cache what `sequences` say, and everything else free.

    Sequences that reach beyond the rank's capacity are left out: they are computed again.
    Returns the number of tokens taken over.
    """
    sglang_api.reset_prefix_cache(scheduler)
    capacity = sglang_api.kv_capacity(scheduler)
    used = [_no_slots(scheduler)]
    for sequence in sequences:
        on_host = slots_of(sequence)
        if on_host.numel() and int(on_host.max()) > capacity:
            continue
        slots = on_host.to(_device(scheduler))
        _insert(scheduler, sequence, slots)
        used.append(slots)
    all_used = torch.cat(used).unique()
    sglang_api.set_free_slots(scheduler, all_used)
    return int(all_used.numel())


def take_moved(
    scheduler: Any,
    sequences: Iterable[KvSequence],
    copy: Callable[[list[tuple[int, int]]], None],
) -> int:
    """Bring sequences from another device: `copy` moves (source slot, own slot) pairs.

    Parts that the prefix cache has already are not copied. Returns the number of tokens copied;
    what finds no room is computed again.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    num_copied = 0
    for sequence in sequences:
        theirs = slots_of(sequence)
        own = allocator.alloc(theirs.numel())
        if own is None:
            continue
        num_known = _insert(scheduler, sequence, own)
        allocator.free(own[:num_known])
        pairs = zip(theirs[num_known:].tolist(), own[num_known:].tolist(), strict=True)
        copy(list(pairs))
        num_copied += theirs.numel() - num_known
    return num_copied


def compact(scheduler: Any, num_tokens: int, copy: Callable[[list[tuple[int, int]]], None]) -> int:
    """Make room above `num_tokens`: evict what is too much, move the rest down by `copy`.

    For a frozen rank, whose prefix cache holds everything. Returns the number of tokens moved.
    """
    sglang_api.evict_all_but(scheduler, num_tokens)
    used = used_slots(scheduler).cpu()
    is_free = torch.ones(num_tokens + 1, dtype=torch.bool, device="cpu")
    is_free[0] = False
    is_free[used[used <= num_tokens]] = False
    room = iter(is_free.nonzero().flatten().tolist())
    pairs = [(slot, next(room)) for slot in used[used > num_tokens].tolist()]
    copy(pairs)
    target = dict(pairs)
    for node in _nodes(scheduler):
        slots = [target.get(slot, slot) for slot in node.value.tolist()]
        node.value = torch.tensor(slots, dtype=torch.int64, device=_device(scheduler))
    return len(pairs)


def used_slots(scheduler: Any) -> torch.Tensor:
    """Slots that the prefix cache holds, on the pool's device."""
    nodes = _nodes(scheduler)
    return torch.cat([_no_slots(scheduler), *(node.value for node in nodes)])


def slots_of(sequence: KvSequence) -> torch.Tensor:
    """[num_tokens] int64 on the host."""
    slots = array("q")
    slots.frombytes(sequence.slots)
    return torch.tensor(slots, dtype=torch.int64, device="cpu")


def _device(scheduler: Any) -> torch.device:
    return torch.device(scheduler.token_to_kv_pool_allocator.device)


def _no_slots(scheduler: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=_device(scheduler))


def _insert(scheduler: Any, sequence: KvSequence, slots: torch.Tensor) -> int:
    token_ids = array("q")
    token_ids.frombytes(sequence.token_ids)
    return sglang_api.insert_prefix(
        scheduler, token_ids, slots, sequence.extra_key, sequence.cache_salt
    )


def _nodes(scheduler: Any) -> list[Any]:
    seen = {}
    for path, _ in sglang_api.prefix_paths(scheduler):
        for node in path:
            seen[id(node)] = node
    return list(seen.values())


def _to_bytes(slots: torch.Tensor) -> bytes:
    return array("q", slots.tolist()).tobytes()
