"""Faults are looked for all the time, and a lost instance is replaced.

    [Watchdog, thread 1] --check--> instances, memory workers  every 0.1 s
    [Watchdog, thread 2] --recover--> coordinator              when the serving instance is lost,
                                                               or memory that it uses

Two threads, because a replacement that must be started takes long, and may be lost too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import ElasticError
from sgl_elastic.types import OperationState

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """instance/table.py's InstanceTable."""

    def check(self, now_s: float, hang_s: float) -> Sequence[str]:
        """Find out who has died or hangs, and lose them. Returns their names."""

    def is_lost(self) -> bool:
        """Whether the instance that serves is gone."""


class Recovery(Protocol):
    """coordinator.py's Coordinator."""

    def is_memory_lost(self) -> bool:
        """Whether memory of a serving device is gone, and can be had elsewhere."""

    def recover(self, *, is_serving: bool) -> Operation | None:
        """What is lost is replaced; None while something else runs."""


class WatchedMemory(Protocol):
    """memory/control.py's Hmm."""

    def dead_workers(self) -> Sequence[int]:
        """Devices whose worker has ended although nobody removed it."""


@dataclass(frozen=True)
class WatchdogConfig:
    """How often is looked, and how long is waited."""

    hang_s: float = 20.0  # a rank or a supervisor that does nothing for so long is lost
    period_s: float = 0.1
    attempts: int = 5  # to replace the instance that serves
    first_pause_s: float = 0.5  # doubled after each failed attempt


class Watchdog:
    """`on_fault` hears "instance" or "memory" for each that is lost, "recovery" for each recovery.

    `on_hopeless` is called once, when every attempt to replace the serving instance has failed.
    """

    def __init__(
        self,
        instances: Watched,
        memory: WatchedMemory,
        recovery: Recovery,
        *,
        config: WatchdogConfig | None = None,
        on_fault: Callable[[str], None] = lambda kind: None,
        on_hopeless: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._memory = memory
        self._recovery = recovery
        self._config = config or WatchdogConfig()
        self._on_fault = on_fault
        self._on_hopeless = on_hopeless
        self._clock = clock
        self._stopping = threading.Event()
        self._dead_workers: frozenset[int] = frozenset()
        self._given_up: frozenset[int] | None = None  # the dead workers that stay lost

    def start(self) -> None:
        """From now on, until `stop`."""
        for name, turn in (("elastic-watch", self.look), ("elastic-recovery", self.replace)):
            threading.Thread(target=self._repeat, args=(turn,), name=name, daemon=True).start()

    def stop(self) -> None:
        """No new round begins."""
        self._stopping.set()

    def look(self) -> None:
        """One round: who is lost?"""
        for _ in self._instances.check(self._clock(), self._config.hang_s):
            self._on_fault("instance")
        dead = frozenset(self._memory.dead_workers())
        for device_id in sorted(dead - self._dead_workers):
            logger.error("elastic: the memory worker of device %d has died", device_id)
            self._on_fault("memory")
        self._dead_workers = dead

    def replace(self) -> None:
        """Replace what serves if it, or memory that it uses, is lost; gives up after some attempts.

        An instance that serves over lost memory goes on doing so then.
        """
        for attempt in range(self._config.attempts):
            if not self._is_hurt() or self._stopping.is_set():
                return
            operation = self._recovery.recover(is_serving=not self._instances.is_lost())
            if operation is None:
                return  # a scale runs; the next round asks again
            if operation.state is not OperationState.ROLLED_BACK:
                self._on_fault("recovery")
                return
            self._stopping.wait(self._config.first_pause_s * 2**attempt)
        if self._instances.is_lost() and not self._stopping.is_set():
            logger.critical("elastic: the lost instance cannot be replaced")
            self._stopping.set()
            self._on_hopeless()
        elif self._is_hurt():
            logger.error("elastic: what memory workers have lost cannot be had elsewhere")
            self._given_up = self._dead_workers

    def _is_hurt(self) -> bool:
        if self._instances.is_lost():
            return True
        return self._given_up != self._dead_workers and self._recovery.is_memory_lost()

    def _repeat(self, turn: Callable[[], None]) -> None:
        while not self._stopping.wait(self._config.period_s):
            try:
                turn()
            except ElasticError:
                logger.exception("elastic: a round of the watch failed")
