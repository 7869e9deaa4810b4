"""Two replicas of a model as one placement, and back.

first, second --> [both] --> Placement --> [parts] --> first, second
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_elastic.types import Placement


def both(first: Placement, second: Placement) -> Placement:
    """Two replicas as one placement. `homes` are the first's."""
    return Placement(
        (*first.device_ids, *second.device_ids), first.homes, (*first.kv_tokens, *second.kv_tokens)
    )


def parts(placement: Placement) -> tuple[Placement, Placement | None]:
    """The first replica, and the second where there is one.

    Homes say which: a placement of one replica has experts on all of its devices.
    """
    num_ranks = placement.dp_size // 2
    if any(home in placement.device_ids[num_ranks:] for home in placement.homes):
        return placement, None
    first = Placement(
        placement.device_ids[:num_ranks], placement.homes, placement.kv_tokens[:num_ranks]
    )
    return first, replica_on(placement.device_ids[num_ranks:], first)


def replica_on(device_ids: Sequence[int], first: Placement) -> Placement:
    """The same layout on as many other devices, rank by rank."""
    twins = dict(zip(first.device_ids, device_ids, strict=True))
    homes = tuple(twins[home] for home in first.homes)
    return Placement(tuple(device_ids), homes, first.kv_tokens)
