"""Whose turn it is: a request that its client has given up is not carried out any more.

    Asked(client, number) --> [RequestFence.next] --> FencedRequest
        --with--> the lock around the device's memory; raises once nobody waits for the answer

A client that gives a request up (its worker hung) goes on by another connection, and where one has
died somebody else tidies up. What was asked first still lies in the old connection then, or waits
for the lock there, and would undo what was asked for since: map what has been unmapped, or unmap
what is in use. So whenever the lock is taken it is looked whether the client is still there, and
whether it has asked for more: through a tunnel (nodes/) its end may come later than that.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

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
        """The turn of a client's request. Raises MemoryWorkerError if it has asked for more.

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


class FencedRequest:
    """The lock around the memory, for one request: `with turn:`, as often as it takes.

    Raises MemoryWorkerError, without the lock, once its client has left or asked for more.
    """

    def __init__(
        self, fence: RequestFence, client: str, number: int, has_left: Callable[[], bool]
    ) -> None:
        self._fence = fence
        self._client = client
        self._number = number
        self._has_left = has_left

    def __enter__(self) -> None:
        self._fence.memory_lock.acquire()
        try:
            if self._has_left():
                raise MemoryWorkerError(f"nobody waits for request {self._number} any more")
            self._fence.check(self._client, self._number)
        except MemoryWorkerError:
            self._fence.memory_lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fence.memory_lock.release()


def _check(number: int, last: int) -> None:
    if number < last:
        raise MemoryWorkerError(
            f"request {number} comes after request {last}: it is not carried out"
        )


# Whether a memory worker is there at all, while an answer of its is awaited.
#
#     client.py, waiting --> [LivenessProbe] --connect, leave--> worker accepts, finds nobody there
#                                   ^---- end of the connection = a sign of life ----'
#
# No request does for this: all of them wait for the lock around the device's memory, and a worker
# that copies for minutes is well. Accepting and closing takes no lock, and a worker that is
# stopped,
# or stuck for good, does neither.


class LivenessProbe:
    """Asks the worker at `path` for signs of life, one at a time. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._asked_s: float | None = None  # since when no sign has come

    @property
    def is_asked(self) -> bool:
        """Whether a sign of life is awaited."""
        return self._asked_s is not None

    def silent_s(self, now_s: float, wait_s: float = 0.0) -> float:
        """Seconds for which the last question has waited; 0 when it is answered within `wait_s`.

        Also 0 when nobody listens any more: whoever waits for an answer sees its connection end.
        """
        if self._asked_s is None:
            self._asked_s = now_s
        if self._socket is None and not self._ask():
            return now_s - self._asked_s
        if self._socket is not None and not is_readable(self._socket.fileno(), wait_s):
            return now_s - self._asked_s
        self.close()
        return 0.0

    def close(self) -> None:
        """Forget the question."""
        self._asked_s = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self) -> bool:
        """False when the worker has not even accepted earlier connections; then ask again later."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(str(self._path))
        except BlockingIOError:
            sock.close()
            return False
        except OSError:
            sock.close()
            return True
        with contextlib.suppress(OSError):  # it may have ended since
            sock.shutdown(socket.SHUT_WR)
        self._socket = sock
        return True


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether something, its end too, can be received within the time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1000))
