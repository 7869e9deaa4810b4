"""Which idle adapters leave host memory so that another one fits. Pure.

    loaded adapters, budget, the new one --> [plan_evictions] --> names to unload, in this order

Decided in the one process that serves HTTP, so that all ranks hold the same adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_esft.errors import AdapterTooLargeError, OutOfHostMemoryError


@dataclass(frozen=True)
class HostEntry:
    """One loaded adapter, or an old version that still drains."""

    name: str
    num_bytes: int
    is_evictable: bool  # idle, not pinned, and a name still means it
    has_name: bool = True  # which no other one is about to take


@dataclass(frozen=True)
class HostLimits:
    """None = no limit."""

    budget_bytes: int | None = None
    max_names: int | None = None  # --max-loaded-loras
    max_slots: int | None = None  # where a loaded adapter keeps a slot, old versions too

    @property
    def is_unlimited(self) -> bool:
        return self == HostLimits()


def plan_evictions(
    entries: Sequence[HostEntry], name: str, num_bytes: int, limits: HostLimits
) -> list[str]:
    """Adapters to unload, least recently used first, until one of `num_bytes` has room.

    `entries` are in that order. Raises AdapterTooLargeError if it never fits, and
    OutOfHostMemoryError while what would have to leave is pinned or in use.
    """
    budget = limits.budget_bytes
    if budget is not None and num_bytes > budget:
        raise AdapterTooLargeError(
            f"adapter {name!r} has {num_bytes} bytes of experts, and all adapters together may "
            f"take {budget} of host memory: raise --adapter-host-memory"
        )
    leaving: list[str] = []
    staying = list(entries)
    while not _fits(staying, num_bytes, limits):
        entry = next((entry for entry in staying if entry.is_evictable), None)
        if entry is None:
            taken = sum(entry.num_bytes for entry in staying)
            raise OutOfHostMemoryError(
                f"no room for adapter {name!r} ({num_bytes} bytes) beside {len(staying)} others "
                f"({taken} bytes) that are pinned or in use; {_described(limits)}: try again, "
                "unpin or unload one, or raise the limit"
            )
        leaving.append(entry.name)
        staying.remove(entry)
    return leaving


def _fits(staying: Sequence[HostEntry], num_bytes: int, limits: HostLimits) -> bool:
    """Whether one more fits."""
    total = sum(entry.num_bytes for entry in staying) + num_bytes
    if limits.budget_bytes is not None and total > limits.budget_bytes:
        return False
    if limits.max_names is not None and sum(e.has_name for e in staying) >= limits.max_names:
        return False
    return limits.max_slots is None or len(staying) < limits.max_slots


def _described(limits: HostLimits) -> str:
    parts = []
    if limits.budget_bytes is not None:
        parts.append(f"--adapter-host-memory is {limits.budget_bytes} bytes")
    if limits.max_names is not None:
        parts.append(f"--max-loaded-loras is {limits.max_names}")
    if limits.max_slots is not None:
        parts.append(f"--max-adapters is {limits.max_slots}, and each keeps its slot")
    return ", ".join(parts)
