"""Where experts live on any number of devices, and how much KV is left beside them.

    shape, devices, previous placement, budgets --> [place] --> Placement --> planner.py

Expert parallelism need not be even: each device gets the floor or the ceiling of its share. What
stays is chosen first, so that from one placement to the next as few experts move as can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from sgl_elastic.errors import BadScaleError, DoesNotFitError
from sgl_elastic.plan.pages import (
    device_pages,
    expert_bytes,
    group_size,
    max_kv_tokens,
    most_kv_tokens,
)
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement

MIN_KV_TOKENS = 256  # a rank with less KV than this cannot serve anything useful


def place(
    shape: MemoryShape,
    device_ids: Sequence[int],
    previous: Placement | None,
    budget_pages: Mapping[int, int],
    adapters: Sequence[AdapterEntry],
    kv_limit: int | None = None,
    *,
    min_kv_tokens: int = MIN_KV_TOKENS,
) -> Placement:
    """Homes of all experts on `device_ids` (any set, rank order), and KV in what is left.

    Experts move in groups of `group_size`, or one by one where `previous` has split groups. KV is
    all that fits, at most `kv_limit` tokens a rank. Raises BadScaleError for no device, one twice
    or one without a budget; DoesNotFitError when a rank would have less than `min_kv_tokens`.
    """
    _check_devices(device_ids, budget_pages)
    homes = _homes(shape, device_ids, previous, budget_pages)
    limit = most_kv_tokens(shape) if kv_limit is None else min(kv_limit, most_kv_tokens(shape))
    floor = min(min_kv_tokens, limit)
    kv_tokens = []
    for device_id in device_ids:
        here = [expert for expert, home in enumerate(homes) if home == device_id]
        fitting = max_kv_tokens(shape, budget_pages[device_id], here, adapters)
        if fitting < floor:
            needed = device_pages(shape, here, adapters, floor)
            raise _does_not_fit(shape, device_id, needed, budget_pages[device_id], adapters, floor)
        kv_tokens.append(min(fitting, limit))
    return Placement(tuple(device_ids), homes, tuple(kv_tokens))


def fewest_devices(
    shape: MemoryShape,
    budget_pages_per_device: int,
    adapters: Sequence[AdapterEntry],
    *,
    min_kv_tokens: int = MIN_KV_TOKENS,
) -> int:
    """The fewest equal devices that hold model, adapters and a little KV, laid out afresh.

    Raises DoesNotFitError when one device for each expert is not enough.
    """
    floor = min(min_kv_tokens, most_kv_tokens(shape))
    free_pages = budget_pages_per_device - device_pages(shape, (), (), floor)
    all_bytes = expert_bytes(shape, range(shape.num_experts), adapters)
    # Fewer than this cannot do even if no page were shared or split.
    least = -(-all_bytes // (free_pages * shape.page_bytes)) if free_pages > 0 else math.inf
    for count in range(max(int(min(least, shape.num_experts + 1)), 1), shape.num_experts + 1):
        if all(
            num <= budget_pages_per_device for num in _pages_afresh(shape, count, adapters, floor)
        ):
            return count
    largest = max(_pages_afresh(shape, shape.num_experts, adapters, floor))
    raise DoesNotFitError(
        f"No number of devices with {_size(shape, budget_pages_per_device)} each holds the model: "
        f"one for each of the {shape.num_experts} experts would need {_size(shape, largest)}. "
        "Give more memory to each."
    )


def _pages_afresh(
    shape: MemoryShape, num_devices: int, adapters: Sequence[AdapterEntry], kv_tokens: int
) -> Iterator[int]:
    """Pages of each device when the model is laid out afresh on so many equal ones."""
    devices = range(num_devices)
    homes = _homes(shape, devices, None, dict.fromkeys(devices, 0))
    for device in devices:
        here = [expert for expert, home in enumerate(homes) if home == device]
        yield device_pages(shape, here, adapters, kv_tokens)


def _check_devices(device_ids: Sequence[int], budget_pages: Mapping[int, int]) -> None:
    if not device_ids or len(set(device_ids)) != len(device_ids):
        raise BadScaleError(
            f"devices {list(device_ids)} must be at least one, and none of them twice."
        )
    unknown = sorted(set(device_ids) - set(budget_pages))
    if unknown:
        raise BadScaleError(
            f"no memory budget is known for devices {unknown}; use some of {sorted(budget_pages)}."
        )


def _homes(
    shape: MemoryShape,
    device_ids: Sequence[int],
    previous: Placement | None,
    budget_pages: Mapping[int, int],
) -> tuple[int, ...]:
    """Home of each expert: what a device held comes first, the rest is dealt out in runs."""
    unit = _unit_size(shape, len(device_ids), previous)
    num_units = shape.num_experts // unit
    held = _held_units(device_ids, previous, unit)
    quotas = _quotas(num_units, held, budget_pages)
    homes = {u: device for device in device_ids for u in held[device][: quotas[device]]}
    homeless = iter([u for u in range(num_units) if u not in homes])
    for device in device_ids:
        missing = quotas[device] - min(quotas[device], len(held[device]))
        homes.update(dict.fromkeys(islice(homeless, missing), device))
    return tuple(homes[expert // unit] for expert in range(shape.num_experts))


def _unit_size(shape: MemoryShape, num_devices: int, previous: Placement | None) -> int:
    """Experts that move together: a group, unless `previous` has torn groups apart already."""
    group = group_size(shape, num_devices)
    if previous is None:
        return group
    homes = previous.homes
    whole = all(home == homes[e - e % group] for e, home in enumerate(homes))
    return group if whole else 1


def _held_units(
    device_ids: Sequence[int], previous: Placement | None, unit: int
) -> dict[int, list[int]]:
    """Device -> the units that it holds now, ascending."""
    homes = () if previous is None else previous.homes[::unit]
    return {device: [u for u, home in enumerate(homes) if home == device] for device in device_ids}


def _quotas(
    num_units: int, held: Mapping[int, Sequence[int]], budget_pages: Mapping[int, int]
) -> dict[int, int]:
    """Device -> how many units it gets: the floor of its share, and some of them one more.

    One more goes first to devices that would lose that unit otherwise, the lightest of them
    first, so that heavy ones lose most; then to the largest budget, then to the lowest rank.
    """
    share, rest = divmod(num_units, len(held))

    def preference(device: int) -> tuple[bool, int, int]:
        num_held = len(held[device])
        would_lose = num_held > share
        return not would_lose, num_held if would_lose else 0, -budget_pages[device]

    favoured = set(sorted(held, key=preference)[:rest])
    return {device: share + (device in favoured) for device in held}


def _does_not_fit(
    shape: MemoryShape,
    device_id: int,
    needed_pages: int,
    budget_pages: int,
    adapters: Sequence[AdapterEntry],
    min_kv_tokens: int,
) -> DoesNotFitError:
    """The error of `place`, with the device count that would have done."""
    message = (
        f"device {device_id} would need {_size(shape, needed_pages)} for its experts, the trunk "
        f"and {min_kv_tokens} tokens of KV, but has {_size(shape, budget_pages)}."
    )
    try:
        count = fewest_devices(shape, budget_pages, adapters, min_kv_tokens=min_kv_tokens)
    except DoesNotFitError as error:
        return DoesNotFitError(f"{message} {error}")
    return DoesNotFitError(
        f"{message} Laid out afresh, the model fits on {count} or more devices of that size."
    )


def _size(shape: MemoryShape, num_pages: int) -> str:
    return f"{num_pages * shape.page_bytes:,} bytes"
