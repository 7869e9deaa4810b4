"""Which waiting request to try next, so that a step touches few distinct experts and none starves.

    waiting queue -> [ArrivalBook] -> waiting, by arrival, with overtakes --+
    adapter -> running requests --------------------------------------------+-> [plan_order]

A decode step reads each expert that any of its tokens selects, once. A token more costs least
where its adapter has the most tokens already. So requests of such adapters go first, with a bound.

An *overtake* of a waiting request is the admission of a later one while it waits. Each request is
overtaken at most B times. Of two requests that wait together the earlier has at least as many
overtakes, since whatever overtakes the later one overtakes it too. So it is enough to watch the
oldest: when it has no overtakes left, it goes first. Pure; docs/batching.md has the proof.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

AdapterId = str | None  # None = the base


@dataclass(frozen=True)
class Waiting:
    """A request in the waiting queue."""

    adapter_id: AdapterId
    num_overtakes: int = 0  # so far


def plan_order(
    waiting: Sequence[Waiting], num_running: Mapping[AdapterId, int], max_overtakes: int
) -> list[int]:
    """The order to admit `waiting` in, as indices into it.

    waiting: by arrival, oldest first. num_running: requests of each adapter, and of the base, in
    the running batch; none where missing. max_overtakes: B; 0 gives first come, first served.

    Semantics: next is a request of the adapter with the most running requests, those ordered
    before counted among them, or the oldest if it was overtaken B times. Ties go to the earliest.
    Wherever the order is cut, nobody behind the cut was overtaken more than B times, nor more
    often than before. A function of its arguments alone, so ranks in lockstep agree.
    O(Q log Q) for Q requests.
    """
    line = _Line(waiting, num_running)
    order: list[int] = []
    while len(order) < len(waiting):
        oldest = line.oldest()
        # All that came before the oldest are in the order, and nothing else there came before it.
        num_overtakes = waiting[oldest].num_overtakes + len(order) - oldest
        chosen = oldest if num_overtakes >= max_overtakes else line.preferred()
        line.take(chosen)
        order.append(chosen)
    return order


def may_join(
    adapter_id: AdapterId,
    running: Collection[AdapterId],
    oldest: AdapterId,
    fits: Callable[[set[AdapterId]], bool],
) -> bool:
    """Whether a request of `adapter_id` may join the batch while one of `oldest` has to be next.

    oldest: the adapter of the request that is to have the next slot; None if there is none, or if
    it is the base's, which needs no slot. fits: whether these adapters have slots at the same time.

    Requests of the running adapters would keep all slots for ever. So nobody takes or keeps a slot
    that the oldest lacks; it waits for the requests that run now, and not for later ones.
    """
    if oldest is None or adapter_id in (None, oldest):
        return True
    return fits({adapter_id, oldest, *running})


class _Line:
    """Requests that are not in the order yet, each adapter's by arrival."""

    def __init__(self, waiting: Sequence[Waiting], num_running: Mapping[AdapterId, int]) -> None:
        self._waiting = waiting
        self._num_running = dict(num_running)
        self._taken = [False] * len(waiting)
        self._oldest = 0
        self._queues: dict[AdapterId, list[int]] = {}  # each ends with the oldest
        for index in reversed(range(len(waiting))):
            self._queues.setdefault(waiting[index].adapter_id, []).append(index)
        self._heads: list[tuple[int, int]] = []  # (-running, index), stale where taken
        for adapter_id in self._queues:
            self._push_head(adapter_id)

    def oldest(self) -> int:
        while self._taken[self._oldest]:
            self._oldest += 1
        return self._oldest

    def preferred(self) -> int:
        while self._taken[self._heads[0][1]]:
            heapq.heappop(self._heads)
        return self._heads[0][1]

    def take(self, index: int) -> None:
        """Take an adapter's oldest request."""
        adapter_id = self._waiting[index].adapter_id
        self._taken[index] = True
        self._queues[adapter_id].pop()
        self._num_running[adapter_id] = self._num_running.get(adapter_id, 0) + 1
        self._push_head(adapter_id)

    def _push_head(self, adapter_id: AdapterId) -> None:
        if queue := self._queues[adapter_id]:
            entry = (-self._num_running.get(adapter_id, 0), queue[-1])
            heapq.heappush(self._heads, entry)


class ArrivalBook:
    """Who arrived when, and how often each waiting request was overtaken.

    Kept by looking at the queue: who is new arrived after all others, who is gone was admitted. A
    request that was aborted counts as admitted, which can only make the oldest go first earlier.
    """

    def __init__(self) -> None:
        self._arrivals: dict[Hashable, int] = {}  # of those waiting, by arrival
        self._overtakes: dict[Hashable, int] = {}
        self._next_arrival = 0
        self.num_admissions_that_overtook = 0  # since the book was opened

    def observe(self, keys: Sequence[Hashable]) -> None:
        """Take note of the waiting queue as it is now, new requests in the order they came in.

        keys: one for each request, the same as long as it waits, another when it comes back.
        """
        present = set(keys)
        gone = [a for key, a in self._arrivals.items() if key not in present]
        self._arrivals = {key: a for key, a in self._arrivals.items() if key in present}
        self._count_overtakes(gone)
        for key in keys:
            if key not in self._arrivals:
                self._arrivals[key] = self._next_arrival
                self._overtakes[key] = 0
                self._next_arrival += 1
        self._overtakes = {key: self._overtakes[key] for key in self._arrivals}

    def by_arrival(self) -> list[tuple[Hashable, int]]:
        """(key, overtakes so far) of every waiting request, oldest first."""
        return list(self._overtakes.items())

    def _count_overtakes(self, gone: Sequence[int]) -> None:
        """gone: arrival numbers, rising."""
        for key, arrival in self._arrivals.items():
            self._overtakes[key] += len(gone) - bisect_right(gone, arrival)
        if self._arrivals:
            oldest = next(iter(self._arrivals.values()))
            self.num_admissions_that_overtook += len(gone) - bisect_right(gone, oldest)
