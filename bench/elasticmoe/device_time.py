"""Devices that were held, and for how long, as the scale operations themselves say.

    GET /v1/scale --[holdings]--> Holding: so many devices from then on --[device_seconds]--> number

A device that joins is held from the operation's beginning, since its memory is filled before it
serves; one that leaves is held until the operation's end, when its last request is gone. So an
operation costs the devices of both configurations for as long as it takes, whatever was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Operation: TypeAlias = Mapping[str, Any]  # as GET /v1/scale tells it

_OPEN = ("pending", "running", "degraded")  # has devices of both configurations still


@dataclass(frozen=True)
class Holding:
    """From `at_s` on, until the next one, so many devices are held."""

    at_s: float
    num_devices: int


def holdings(operations: Iterable[Operation], begin_s: float, num_devices: int) -> list[Holding]:
    """Of a server that has `num_devices` at `begin_s`; operations in any order, Unix seconds."""
    found = [Holding(begin_s, num_devices)]
    for each in sorted(operations, key=lambda operation: operation["created_s"]):
        if not each["plan"]:
            continue  # it was refused
        old, new = (set(each["plan"][side]["device_ids"]) for side in ("old", "new"))
        found.append(Holding(each["created_s"], len(old | new)))
        if each["state"] not in _OPEN:
            left = new if each["switched"] else old
            found.append(Holding(each["finished_s"], len(left)))
    return found


def device_seconds(held: Sequence[Holding], begin_s: float, end_s: float) -> float:
    """Devices times seconds within a span. What precedes the first holding counts for nothing."""
    ends = [*(each.at_s for each in held[1:]), end_s]
    spans = (
        (each.num_devices, min(end, end_s) - max(each.at_s, begin_s))
        for each, end in zip(held, ends, strict=True)
    )
    return sum(count * max(0.0, seconds) for count, seconds in spans)


def devices_over_time(
    held: Sequence[Holding], begin_s: float, end_s: float
) -> list[tuple[float, int]]:
    """(seconds from `begin_s`, devices) at each change within the span, for a picture."""
    inside = [each for each in held if each.at_s < end_s]
    return [(max(0.0, each.at_s - begin_s), each.num_devices) for each in inside]
