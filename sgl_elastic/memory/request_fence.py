"""Which requests are carried out: not one that its client has given up.

    Asked(client, number) --> [RequestFence.next] --> FencedRequest
        --with--> the lock around the device's memory; raises once nobody waits for the answer

A client that gives a request up (its worker hung) goes on by another connection, and where one has
died somebody else tidies up. What was asked first still lies in the old connection then, or waits
for the lock there, and would undo what was asked for since: map what has been unmapped, or unmap
what is in use. So whenever the lock is taken it is looked whether the client is still there, and
whether it has asked for more: through a tunnel (nodes/) its end may come later than that.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sgl_elastic.errors import MemoryWorkerError


class RequestFence:
    """The last request of each client that has a connection. Safe for many threads."""

    def __init__(self) -> None:
        self.memory_lock = threading.Lock()
        self._lock = threading.Lock()  # around the two below
        self._last: dict[str, int] = {}
        self._num_connections: Counter[str] = Counter()

    def join(self, client: str) -> None:
        """This client has one more connection."""
        with self._lock:
            self._num_connections[client] += 1

    def leave(self, client: str) -> None:
        """A connection that joined has ended; with the last one its client is forgotten."""
        with self._lock:
            self._num_connections[client] -= 1
            if not self._num_connections[client]:
                del self._num_connections[client]
                self._last.pop(client, None)

    def next(self, client: str, number: int, has_left: Callable[[], bool]) -> FencedRequest:
        """The lock for a client's request. Raises MemoryWorkerError if it has asked for more.

        `has_left` says whether the connection that the request came by has been closed.
        """
        with self._lock:
            last = self._last.get(client, 0)
            _check(number, last)
            self._last[client] = number
            return FencedRequest(self, client, number, has_left)

    def check(self, client: str, number: int) -> None:
        """Raises MemoryWorkerError if the client has asked for more since."""
        with self._lock:
            _check(number, self._last.get(client, 0))


@dataclass(frozen=True)
class FencedRequest:
    """The lock around the memory, for one request: `with request:`, as often as it takes.

    Raises MemoryWorkerError, without the lock, once its client has left or asked for more.
    """

    fence: RequestFence
    client: str
    number: int
    has_left: Callable[[], bool]

    def __enter__(self) -> None:
        self.fence.memory_lock.acquire()
        try:
            if self.has_left():
                raise MemoryWorkerError(f"nobody waits for request {self.number} any more")
            self.fence.check(self.client, self.number)
        except MemoryWorkerError:
            self.fence.memory_lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.fence.memory_lock.release()


def _check(number: int, last: int) -> None:
    if number < last:
        raise MemoryWorkerError(
            f"request {number} comes after request {last}: it is not carried out"
        )
