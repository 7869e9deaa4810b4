"""Room for one more adapter: who leaves, who waits, and in which order.

    a load --[Room.taken_by]--> idle adapters leave (plan_evictions) --> it runs, no other beside it
                          \\--> none is idle: one that is in use stops taking requests, and leaves

Loads that find no room take turns: first come, first served. Where all that could leave is in use,
the adapter that has been there longest takes no new requests and leaves when those it has have
ended; who asks for it queues like the others. So none waits for ever, however busy the others are:
at most, for each load before it, a stay (`LoadTimeouts.stay_s`) and the longest request of one
adapter. The load whose turn it is reads meanwhile, where host memory has room for both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from sgl_esft.errors import AdapterTooLargeError, OutOfHostMemoryError
from sgl_esft.lifecycle.registry import Registry
from sgl_esft.lifecycle.tenants import Tenants

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1


@dataclass(frozen=True)
class LoadTimeouts:
    """How long one waits for another."""

    wait_s: float = 30.0  # a load, for others to leave
    stay_s: float = 2.0  # an adapter that others wait for, at least
    turn_s: float = 10.0  # a load whose turn it is, at least: those before it may take long


class Room:
    """The room of one engine. All methods belong to its event loop."""

    def __init__(
        self, registry: Registry, tenants: Tenants, limits: HostLimits, timeouts: LoadTimeouts
    ) -> None:
        self.num_evictions = 0  # adapters that left for others
        self.loading = asyncio.Lock()  # one adapter is read at a time, and none leaves meanwhile
        self._registry = registry
        self._tenants = tenants
        self._limits = limits
        self._timeouts = timeouts
        self._knows_slots = False
        self._queue = asyncio.Lock()  # fair: who came first is first
        self._leaving: asyncio.Task[None] | None = None  # of one that was in use

    @property
    def keeps_slots(self) -> bool:
        """Whether a loaded adapter keeps its slot: under DP attention, and in elastic engines."""
        return self._limits.max_slots is not None

    @property
    def max_names(self) -> int | None:
        """Adapters that can be loaded at a time, as far as is known; None = no limit."""
        limits = (self._limits.max_names, self._limits.max_slots)
        return min((limit for limit in limits if limit is not None), default=None)

    @asynccontextmanager
    async def taken_by(
        self, name: str, num_bytes: int, read_ahead: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Be the one load that runs, with room for it.

        read_ahead: called while others leave, perhaps more than once, or not at all.
        Raises AdapterTooLargeError when it is its turn, OutOfHostMemoryError after a wait.
        """
        came_s = time.monotonic()
        async with self._queue:
            await self._learn_about_slots()
            deadline = max(came_s + self._timeouts.wait_s, time.monotonic() + self._timeouts.turn_s)
            while True:
                async with self.loading:
                    if await self._has_room(name, num_bytes, deadline):
                        yield
                        return
                await self._let_one_leave(name)
                if self._may_read_ahead(num_bytes):
                    await read_ahead()
                await self._somebody_leaves()

    async def evict_one(self, coming: str) -> bool:
        """Let the idle adapter that was used longest ago leave; False if there is none."""
        for name, ref in self._registry.refs().items():
            if name != coming and self._is_idle(ref) and await self._evict(name):
                return True
        return False

    def _may_read_ahead(self, num_bytes: int) -> bool:
        """What waits for a slot or a name may be in host memory beside all others."""
        return _fits(self._entries(""), num_bytes, HostLimits(self._limits.budget_bytes))

    async def _somebody_leaves(self) -> None:
        """Until then, or for a moment."""
        leaving = self._leaving
        if leaving is None or leaving.done():
            await asyncio.sleep(_POLL_S)
        else:
            await asyncio.wait([leaving], timeout=_POLL_S)

    async def _learn_about_slots(self) -> None:
        if not self._knows_slots:
            self._limits = replace(self._limits, max_slots=await self._tenants.num_kept_slots())
            self._knows_slots = True

    async def _has_room(self, name: str, num_bytes: int, deadline: float) -> bool:
        try:
            await self._make_room(name, num_bytes)
        except OutOfHostMemoryError:
            if time.monotonic() >= deadline:
                raise
            return False
        return True

    async def _make_room(self, name: str, num_bytes: int) -> None:
        """Of idle adapters."""
        if self._limits.is_unlimited:
            return
        for leaving in plan_evictions(self._entries(name), name, num_bytes, self._limits):
            await self._evict(leaving)
        # Whoever was asked for meanwhile has stayed.
        if plan_evictions(self._entries(name), name, num_bytes, self._limits):
            await self._make_room(name, num_bytes)

    def _entries(self, coming: str) -> list[HostEntry]:
        size_of = self._tenants.num_bytes_of
        draining = [
            HostEntry(ref.lora_name, size_of(ref), is_evictable=False, has_name=False)
            for ref in self._tenants.draining_refs()
        ]
        return draining + [
            HostEntry(
                name,
                size_of(ref),
                is_evictable=name != coming and self._is_idle(ref),
                has_name=name != coming,
            )
            for name, ref in self._registry.refs().items()
        ]

    def _is_idle(self, ref: Any) -> bool:
        return not (ref.pinned or self._registry.is_busy(ref.lora_id) or self._is_expected(ref))

    def _is_expected(self, ref: Any) -> bool:
        """Whether the request that it was loaded for may still be on its way to it."""
        is_used = self._registry.last_used_s(ref.lora_id) is not None
        return not is_used and self._tenants.age_s(ref) < self._timeouts.stay_s

    async def _evict(self, name: str) -> bool:
        """Unload an adapter that is still idle; its name stays known."""
        ref = await self._registry.take(name, only_idle=True)
        if ref is None:
            return False
        logger.info("adapter %s leaves host memory for another one", name)
        await self._tenants.unload_when_idle(ref)
        self.num_evictions += 1
        return True

    async def _let_one_leave(self, coming: str) -> None:
        """Nothing is idle: of what has had its turn, the one that has been there longest."""
        if self._leaving is not None and not self._leaving.done():
            return
        others = [ref for name, ref in self._registry.refs().items() if name != coming]
        stayed_s = self._timeouts.stay_s
        had_turn = [
            ref for ref in others if not ref.pinned and self._tenants.age_s(ref) >= stayed_s
        ]
        oldest = max(had_turn, key=self._tenants.age_s, default=None)
        if oldest is None or await self._registry.take(oldest.lora_name) is None:
            return
        logger.info("adapter %s makes room for %s after its requests", oldest.lora_name, coming)
        self._leaving = self._tenants.unload_when_idle(oldest)
        self.num_evictions += 1


# Which idle adapters leave host memory so that another one fits. Pure; decided in the one process
# that serves HTTP, so that all ranks hold the same adapters.


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
