"""An engine and a server around a Service, without processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sgl_esft.health.heartbeat import DETOKENIZER, HeartbeatTable, rank_slot
from sgl_esft.health.readiness import Loop
from sgl_esft.health.service import Service, Times


@dataclass
class Engine:
    """Two ranks in a heartbeat table; `events` is what was asked of it."""

    heartbeats: HeartbeatTable
    replaces_ranks: bool = False
    is_bad: str | None = None
    events: list[str] = field(default_factory=list)
    end_s: float = 0.0

    def ranks(self) -> Sequence[Loop]:
        return [Loop(f"rank {n}", self.heartbeats.read(rank_slot(n))) for n in range(2)]

    def trouble(self) -> str | None:
        return self.is_bad

    def begin(self) -> None:
        self.events.append("begin")

    def children(self) -> Sequence[tuple[str, int]]:
        return ()

    async def end(self) -> None:
        await asyncio.sleep(self.end_s)
        self.events.append("end")


@dataclass
class Harness:
    """A service in an event loop."""

    service: Service
    engine: Engine
    statuses: list[int]  # of exits that were forced

    def beat(self) -> None:
        for index in (DETOKENIZER, rank_slot(0), rank_slot(1)):
            self.engine.heartbeats.slot(index).beat()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def stopped(self) -> None:
        await self.until(lambda: "stop" in self.engine.events)


@asynccontextmanager
async def serving(drain_s: float = 30.0, *, has_started: bool = True) -> AsyncIterator[Harness]:
    """A service that has begun and, if not told else, started."""
    engine = Engine(HeartbeatTable.create())
    statuses: list[int] = []
    service = Service(
        Times(ready_s=2.0, drain_s=drain_s, hang_s=60.0),
        engine.heartbeats,
        engine,
        lambda: engine.events.append("stop"),
        exit_=statuses.append,
    )
    harness = Harness(service, engine, statuses)
    harness.beat()
    service.begin()
    try:
        if has_started:
            service.started()
        await asyncio.sleep(0)
        yield harness
    finally:
        service.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            asyncio.get_running_loop().remove_signal_handler(number)


def send(number: int) -> None:
    os.kill(os.getpid(), number)
