"""The elastic runtime as sgl_esft's health service sees it.

    ranks --beat--> DIRECTORY/INSTANCE.beats --> [ElasticEngine] --> GET /readyz
    coordinator, instance table ------------------'

A lost rank is the watchdog's (recovery.py): the server goes on, and is not ready until a
replacement serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sgl_elastic.instance.state import Instance, serving
from sgl_esft.health.engine import children_of, leave_children_to_us
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot
from sgl_esft.health.readiness import Loop


class Serving(Protocol):
    """What is asked of the runtime."""

    def instances(self) -> Sequence[Instance]:
        """All of them, the serving one first; none before the engine starts."""

    def is_lost(self) -> bool:
        """Whether the instance that serves is gone."""


@dataclass
class ElasticEngine:
    """The ranks of whichever instance serves."""

    directory: Path
    serving: Serving
    close: Callable[[], None]
    manager: Callable[[], Any]
    replaces_ranks: bool = True
    _heartbeats: dict[str, HeartbeatTable] = field(default_factory=dict)

    def ranks(self) -> Sequence[Loop]:
        """Of those that serve; one that hands over is silent for much less than it may be."""
        known = self.serving.instances()
        self._forget_others({each.instance_id for each in known})
        return [
            self._loop(each.instance_id, rank)
            for each in serving(known)
            for rank in range(each.num_ranks)
        ]

    def trouble(self) -> str | None:
        if not self.serving.instances():
            return "no instance serves"
        if self.serving.is_lost():
            return "the instance that served is lost; a replacement is on its way"
        return None

    def begin(self) -> None:
        leave_children_to_us(self.manager())

    def children(self) -> Sequence[tuple[str, int]]:
        return children_of(self.manager())

    async def end(self) -> None:
        """Instances, memory workers, the watchdog that would replace them."""
        await asyncio.to_thread(self.close)

    def _loop(self, instance: str, rank: int) -> Loop:
        heartbeats = self._table_of(instance)
        return Loop(
            f"rank {rank} of instance {instance}",
            heartbeats.read(rank_slot(rank)) if heartbeats is not None else None,
        )

    def _table_of(self, instance: str) -> HeartbeatTable | None:
        path = heartbeat_path(self.directory, instance)
        if instance not in self._heartbeats and path.exists():
            self._heartbeats[instance] = HeartbeatTable.open(path)
        return self._heartbeats.get(instance)

    def _forget_others(self, known: set[str]) -> None:
        for name in self._heartbeats.keys() - known:
            self._heartbeats.pop(name).close()


def heartbeat_path(directory: Path, instance: str) -> Path:
    """Where the ranks of an instance beat."""
    return directory / f"{instance}.beats"
