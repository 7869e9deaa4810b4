"""Whether a memory worker is there at all, while an answer of its is awaited.

    client.py, waiting --> [Pulse] --connect, leave--> worker accepts, sees that nobody is there
                              ^---- end of the connection = a sign of life ----'

No request does for this: all of them wait for the lock around the device's memory, and a worker
that copies for minutes is well. Accepting and closing takes no lock, and a worker that is stopped,
or stuck for good, does neither.
"""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path


class Pulse:
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
