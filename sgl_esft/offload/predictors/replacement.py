"""Who leaves a full map store for a new map. Pure.

    cosines with each entry --[redundancy_of]--.
    when each was added ------[ages_of]--------+--[victims]--> an entry for each new map, each once
    owners ------------------------------------'

FineMoE (section 4.4) gives up the entry most like the new map. Alone, that keeps a store what it
was when it filled up: after a shift of the workload the new task's maps are most like each other,
so they replace each other, and the old task's stay for ever. So age counts too, in maps that were
added since: what is redundant leaves first, and of what is not, the oldest in the end.

Where maps are kept by owner, each owner that still adds has an equal share. Who has less takes the
oldest entry of the others; who has more replaces its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sgl_esft.offload.routing import Floats, Ints

AGE_WEIGHT: Final = 1.0  # an entry as old as the store is large counts as one that is the same
OLD: Final = 1.0  # an age, in sizes of the store: no older counts for more; such an owner has left


def redundancy_of(semantic: Floats, trajectories: Floats, semantic_share: float) -> Floats:
    """RDY of section 4.4, [n, size]: of both cosines [n, size], by the share of a model's layers
    that embeddings predict.
    """
    share = np.float32(semantic_share)
    return share * semantic + (1 - share) * trajectories


def ages_of(born: Ints, num_added: int, capacity: int) -> Floats:
    """[size]: how many maps were added after each entry, in sizes of the store.

    `born` [size]: how many had been, with it, when it was.
    """
    ages: Floats = (num_added - born).astype(np.float32)
    return ages / np.float32(capacity)


def victims(
    redundancy: Floats,
    ages: Floats,
    owners: Ints,
    new_owners: Ints,
    age_weight: float = AGE_WEIGHT,
) -> Ints:
    """[n] entries, in turn, none twice.

    `redundancy` [n, size], of n <= size new maps; `ages` [size], in sizes of the store; `owners`
    [size]; `new_owners` [n]. age_weight 0 is the paper's rule.
    """
    ages = np.minimum(ages, np.float32(OLD))
    scores = redundancy + np.float32(age_weight) * ages
    sharing = {*owners[ages < OLD].tolist(), *new_owners.tolist()}
    share = len(owners) / len(sharing)
    owners, is_left = owners.copy(), np.ones(len(owners), np.bool_)
    found = np.empty(len(scores), np.int64)
    for row, owner in enumerate(new_owners.tolist()):
        is_own = owners == owner
        replaces_own = is_own.sum() >= share
        worst = scores[row] if replaces_own else ages
        allowed = is_left & (is_own if replaces_own else ~is_own)
        if not allowed.any():  # this batch has taken all of them
            allowed = is_left
        found[row] = np.where(allowed, worst, -np.inf).argmax()
        is_left[found[row]] = False
        owners[found[row]] = owner
    return found
