"""Which parked instances to keep ready: a pure table, least recently used first out.

    placement now --> [likely_next] --> start these
    scale --> [Standbys.take] --> a warm instance, or None: one must be started

A standby costs host memory and a process a rank, so the capacity is counted in ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from sgl_elastic.errors import ElasticConfigError

DeviceIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Standbys:
    """Parked instances, the one used longest ago first; at most one for each `device_ids`."""

    capacity_ranks: int
    parked: tuple[tuple[DeviceIds, str], ...] = ()  # (device ids, instance id)

    def __post_init__(self) -> None:
        if self.capacity_ranks < 0:
            raise ElasticConfigError(
                f"room for {self.capacity_ranks} standby ranks makes no sense: use 0 for none"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of all parked instances."""
        return _ranks(self.parked)

    def find(self, device_ids: DeviceIds) -> str | None:
        """The instance parked for exactly these devices in this order, or None."""
        return dict(self.parked).get(device_ids)

    def take(self, device_ids: DeviceIds) -> tuple[Standbys, str | None]:
        """The table without the instance for `device_ids`, and that instance, or None."""
        rest = tuple(entry for entry in self.parked if entry[0] != device_ids)
        return replace(self, parked=rest), self.find(device_ids)

    def park(self, device_ids: DeviceIds, instance_id: str) -> tuple[Standbys, tuple[str, ...]]:
        """The table with this instance as its newest, and the instances that must stop for it.

        An instance larger than the whole capacity is itself the one that must stop.
        """
        if len(device_ids) > self.capacity_ranks:
            return self, (instance_id,)
        others, former = self.take(device_ids)
        evicted = [former] if former not in (None, instance_id) else []
        entries = list(others.parked)
        while entries and _ranks(entries) + len(device_ids) > self.capacity_ranks:
            evicted.append(entries.pop(0)[1])
        parked = (*entries, (device_ids, instance_id))
        return replace(self, parked=parked), tuple(name for name in evicted if name)


def likely_next(device_ids: DeviceIds, max_devices: int) -> tuple[DeviceIds, ...]:
    """The configurations a server on `device_ids` is likely to go to, the likeliest first.

    One device up, one down, double, half, then the others, the nearest first. Up takes the lowest
    ids that are free below `max_devices`, down gives the highest ids back: what the planner does
    without other wishes, and like its answers these are ascending.
    """
    now = len(device_ids)
    others = sorted(range(1, max_devices + 1), key=lambda size: (abs(size - now), -size))
    sizes = dict.fromkeys((now + 1, now - 1, 2 * now, now // 2, *others))
    wanted = [size for size in sizes if 1 <= size <= max_devices and size != now]
    return tuple(_resized(device_ids, size, max_devices) for size in wanted)


def without_one(device_ids: DeviceIds) -> tuple[DeviceIds, ...]:
    """What is left when one device is lost, whichever it is; nothing of a single one."""
    if len(device_ids) == 1:
        return ()
    return tuple(tuple(d for d in device_ids if d != lost) for lost in device_ids)


def _resized(device_ids: DeviceIds, size: int, max_devices: int) -> DeviceIds:
    free = [each for each in range(max_devices) if each not in device_ids]
    return tuple(sorted([*sorted(device_ids), *free][:size]))


def _ranks(entries: Iterable[tuple[DeviceIds, str]]) -> int:
    return sum(len(device_ids) for device_ids, _ in entries)
