"""The switchboard of horizontal scaling: two instances of equal size serve at once.

    dispatch --> [ReplicaSwitchboard] --> the first replica: ranks 0 to N - 1
                                     '--> the second: ranks N to 2 N - 1

A group of two is named `first+second`. What is no request goes to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sgl_elastic.coordinator.switchboard import Switchboard
from sgl_elastic.errors import EngineFailedError
from sgl_elastic.types import Placement

_POLL_S = 0.01


class ReplicaSwitchboard(Switchboard):
    """`ReplicaFront` of strategy_replicas.py."""

    def __init__(self, *args: Any, wake: Callable[[str], None], **options: Any) -> None:
        super().__init__(*args, wake=self._wake_all, **options)
        self._wake_one = wake
        self._num_open: int | None = None  # ranks that new requests may go to; None = all

    def spread(self, group: str, placement: Placement) -> None:
        """From now on requests go to both; those that run stay where they are."""
        self._regroup(group, placement)

    def narrow(self, num_ranks: int, timeout_s: float) -> None:
        """New requests go to the first `num_ranks`; returns when the others have none left.

        Raises EngineFailedError at the time-out; new requests then still go to the first.
        """
        with self._lock:
            self._num_open = num_ranks
        deadline = time.monotonic() + timeout_s
        while self._num_between(num_ranks, 2 * num_ranks):
            if time.monotonic() > deadline:
                raise EngineFailedError(f"the second replica still runs after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def unite(self, instance: str, placement: Placement) -> None:
        """The first serves alone; the second has no requests."""
        self._regroup(instance, placement)

    def _regroup(self, name: str, placement: Placement) -> None:
        with self._lock:
            former = self.routing.table
            if former.instance_id == name:
                return
            kept = {r: r for r in range(min(former.placement.dp_size, placement.dp_size))}
            self._book.rebase(kept, placement.dp_size, placement.kv_tokens)
            self._on_switch(placement)
            self.routing.swap(name, placement, self._clock())
            self._num_open = None

    def _num_between(self, first: int, end: int) -> int:
        with self._lock:
            return sum(first <= request.rank < end for request in self._requests.values())

    def _choose_rank(self, request: Any) -> int:
        rank = super()._choose_rank(request)
        return rank if self._num_open is None else rank % self._num_open

    def _send(self, instance: str, message: Any) -> None:
        members = instance.split("+")
        if len(members) > 1 and self._wire.is_request(message):
            self._send_to_one(members, message)
            return
        for member in members:
            super()._send(member, message)

    def _send_to_one(self, members: list[str], request: Any) -> None:
        size = self.routing.table.placement.dp_size // len(members)
        place, rank = divmod(request.routed_dp_rank, size)
        if self._num_between(place * size, (place + 1) * size) <= 1:  # this one: they may sleep
            self._wake_one(members[place])
        super()._send(members[place], self._wire.with_rank(request, rank))

    def _wake_all(self, instance: str) -> None:
        for member in instance.split("+"):
            self._wake_one(member)
