"""The way to each instance: SGLang's own messages, over a socket each.

    manager.py --connect, warm_up, pause, disconnect--> [InstanceLinks] --> wire --> ranks
    router.py --send-----------------------------------------^

Any thread may call anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_elastic.coordinator.ports import Wire
from sgl_elastic.errors import EngineFailedError

_WARM_UP_POLL_S = 0.2


@dataclass(frozen=True)
class _Link:
    socket: Any
    wake: Callable[[], None]


class InstanceLinks:
    """Sockets by the name of their instance."""

    def __init__(self, wire: Wire, clock: Callable[[], float] = time.monotonic) -> None:
        self._wire = wire
        self._clock = clock
        self._lock = threading.RLock()
        self._links: dict[str, _Link] = {}
        self._warmed: dict[str, threading.Event] = {}  # by the id of the warm-up's request

    def connect(self, instance: str, input_ipc: str, wake: Callable[[], None]) -> None:
        with self._lock:
            self._links[instance] = _Link(self._wire.open(input_ipc), wake)

    def disconnect(self, instance: str) -> None:
        with self._lock:
            link = self._links.pop(instance, None)
            if link is not None:
                self._wire.close(link.socket)

    def pause(self, instance: str) -> None:
        self.send(instance, self._wire.pause())

    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None:
        """All ranks at once: they compute each step together, with a request or without."""
        deadline = self._clock() + timeout_s
        rids = [f"{instance}-{rank}-{id(self):x}" for rank in range(num_ranks)]
        messages = [self._wire.warm_up(rid, rank) for rank, rid in enumerate(rids)]
        answered = {message.rid: threading.Event() for message in messages}
        self._warmed |= answered
        try:
            for message in messages:
                self.send(instance, message)
            for rank, message in enumerate(messages):
                self._wait_for_warm_up(instance, rank, answered[message.rid], deadline)
        finally:
            for rid in answered:
                self._warmed.pop(rid, None)

    def _wait_for_warm_up(
        self, instance: str, rank: int, answered: threading.Event, deadline: float
    ) -> None:
        while not answered.wait(min(max(deadline - self._clock(), 0), _WARM_UP_POLL_S)):
            if instance not in self._links:
                raise EngineFailedError(f"{instance} ended while it warmed up")
            if self._clock() >= deadline:
                raise EngineFailedError(f"rank {rank} of {instance} did not warm up in time")

    def note_warm(self, rid: str) -> None:
        """An output has come back; it may be a warm-up's."""
        if rid in self._warmed:
            self._warmed[rid].set()

    def send(self, instance: str, message: Any) -> None:
        """Raises EngineFailedError when the instance has ended."""
        with self._lock:
            self._wire.send(self._link_to(instance).socket, message)

    def wake(self, instance: str) -> None:
        """Its ranks are idle, and a request is about to be sent. Nothing when it has ended."""
        link = self._links.get(instance)
        if link is not None:
            link.wake()

    def _link_to(self, instance: str) -> _Link:
        link = self._links.get(instance)
        if link is None:
            raise EngineFailedError(f"there is no way to instance {instance}")
        return link
