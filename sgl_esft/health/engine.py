"""What the service asks of the engine behind it: a plain SGLang one, or the elastic runtime.

service.py, watch.py --> [Engine] <-- PlainEngine (here), sgl_elastic/front/readiness.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sgl_esft.health.heartbeat import MAX_RANKS, HeartbeatTable, rank_slot
from sgl_esft.health.processes import is_there
from sgl_esft.health.readiness import Loop

_END_S = 5.0  # a rank that was told to end releases its memory in so long, or never
_POLL_S = 0.05


class Engine(Protocol):
    """The ranks of a server."""

    # Whether lost ranks are replaced. If not, the server ends with the first of them.
    replaces_ranks: bool

    def ranks(self) -> Sequence[Loop]:
        """The loop of each rank that serves, by number."""

    def trouble(self) -> str | None:
        """Why requests cannot be computed now, where the ranks do not show it."""

    def begin(self) -> None:
        """The service runs, and looks after the processes from now on."""

    def children(self) -> Sequence[tuple[str, int]]:
        """(name, process id) of SGLang's own child processes, by which it is told that one died."""

    async def end(self) -> None:
        """End the ranks in an orderly way; bounded in time."""


class PlainEngine:
    """SGLang's own schedulers. `manager()` is its tokenizer manager, once it has started."""

    replaces_ranks = False

    def __init__(self, heartbeats: HeartbeatTable, manager: Callable[[], Any]) -> None:
        self._heartbeats = heartbeats
        self._manager = manager

    def ranks(self) -> Sequence[Loop]:
        from sgl_esft import sglang_api

        ranks = range(min(sglang_api.num_ranks(), MAX_RANKS))
        return [Loop(f"rank {rank}", self._heartbeats.read(rank_slot(rank))) for rank in ranks]

    def trouble(self) -> str | None:
        return None

    def begin(self) -> None:
        leave_children_to_us(self._manager())

    def children(self) -> Sequence[tuple[str, int]]:
        return children_of(self._manager())

    async def end(self) -> None:
        """Ranks release what they hold when they are told to end, not when they are killed."""
        from sgl_esft import sglang_api

        pids = [loop.beat.pid for loop in self.ranks() if loop.beat is not None]
        self._manager()._dispatch_to_scheduler(sglang_api.make_shutdown_request())
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline and any(map(is_there, pids)):
            await asyncio.sleep(_POLL_S)


def leave_children_to_us(manager: Any) -> None:
    """SGLang's watchdog would kill this process, and with it answers that are not sent yet."""
    watchdog = manager._subprocess_watchdog
    if watchdog is not None:
        watchdog._stop_event.set()


def children_of(manager: Any) -> Sequence[tuple[str, int]]:
    """What SGLang has started and watches: schedulers or their controller, the detokenizer."""
    watchdog = manager._subprocess_watchdog
    if watchdog is None:
        return ()
    processes = zip(watchdog._names, watchdog._processes, strict=True)
    return tuple((name, int(process.pid)) for name, process in processes)
