"""A client's way to one memory worker: requests and answers by number, and whether it lives.

    DeviceClient --> [WorkerConnection] --Asked--> Unix socket --> worker
                            |           <--Answered--
                            '--> [LivenessProbe] --connect, leave--> it accepts, finds nobody there
                                       ^---- end of that connection = a sign of life ----'

No request does as a sign of life: all of them wait for the lock around the device's memory, and a
worker that copies for minutes is well. Accepting and closing takes no lock, and a worker that is
stopped, or stuck for good, does neither.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sgl_elastic import errors, wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError, WireError
from sgl_elastic.memory import messages
from sgl_elastic.memory.messages import Message, Reply, Request

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)

# A worker that gives no sign of life for so long hangs. Shorter than any useful --hang-timeout: a
# rank that waits for a worker is silent itself, and must not be taken for the one that hangs.
HANG_S = 3.0
_LOOK_S = 0.25  # how often is looked for a sign of life while an answer is awaited


class WorkerConnection:
    """The connection to the worker at `path`; one thread at a time.

    `timeout_s` bounds every answer that is not given another limit. A broken connection is made
    anew by the next `send`. Raises MemoryWorkerError if nobody answers.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._liveness_probe = LivenessProbe(path)
        self._name = uuid.uuid4().hex
        self._number = 0  # of the last request; a new connection goes on counting
        self.info = self._connect()

    @property
    def is_closed(self) -> bool:
        """Whether it broke: the worker may have done the last request all the same."""
        return self._channel.is_closed

    def drop(self) -> None:
        """Break the connection; the next `send` makes another, which is sent all pages again."""
        self._channel.close()

    def close(self) -> None:
        """Close it for good."""
        self._channel.close()
        self._liveness_probe.close()

    def ask(self, request: Request, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        """The one answer to a request. Raises as `receive` does."""
        self.send(request, timeout_s)
        answer, fds = self.receive(kind, timeout_s)
        fds.close()
        return answer

    def send(self, request: Request, timeout_s: float | None = None) -> None:
        """Ask, by a new connection if the last one broke. MemoryWorkerError for another worker."""
        if self._liveness_probe.is_asked:  # it hung, and would do what it is asked who knows when
            self._check_alive(_LOOK_S)
        if not self._channel.is_closed and is_readable(self._channel.fileno()):
            self._channel.close()  # its end, or an answer that nobody awaits
        if self._channel.is_closed:
            info = self._connect()
            if info.pid != self.info.pid:
                self._channel.close()
                raise MemoryWorkerError(
                    f"the memory worker at {self.path} was process {self.info.pid} and is "
                    f"{info.pid} now: its memory is lost, start what used it again"
                )
        self._send(request, timeout_s)

    def receive(
        self, kind: type[Answer], timeout_s: float | None = None
    ) -> tuple[Answer, wire.ReceivedFds]:
        """The next answer to the last request, or the next part of it, with its descriptors.

        Raises the error that the worker names; MemoryWorkerError when it is gone, slow or hangs (a
        worker that hangs is given up long before a copy's time is over); WireError for an answer of
        another kind.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        answer, fds = self._next_answer(limit_s)
        if isinstance(answer, kind):
            return answer, fds
        fds.close()
        if isinstance(answer, messages.Failure):
            raise _error_of(answer)
        self._channel.close()  # who knows what the worker has done
        raise WireError(f"the worker answered {type(answer).__name__}, not {kind.__name__}")

    def _connect(self) -> messages.Hello:
        self._channel = wire.Channel(
            wire.connect(self.path, MemoryWorkerError, self._timeout_s),
            messages.REPLIES,
            peer=f"the memory worker at {self.path}",
            failure=MemoryWorkerError,
            timeout_s=self._timeout_s,
        )
        try:
            self._send(messages.AskHello(), None)
            return self.receive(messages.Hello)[0]
        except ElasticError:
            self.close()
            raise

    def _send(self, request: Request, timeout_s: float | None) -> None:
        self._number += 1
        asked = messages.Asked(self._name, self._number, request)
        self._channel.send(asked, timeout_s=timeout_s)

    def _next_answer(self, limit_s: float) -> tuple[Reply, wire.ReceivedFds]:
        deadline = time.monotonic() + limit_s
        while True:
            if is_readable(self._channel.fileno(), min(_LOOK_S, deadline - time.monotonic())):
                answer = self._take()
                if answer is not None:
                    return answer
            if time.monotonic() >= deadline:
                self._channel.close()
                raise MemoryWorkerError(
                    f"the memory worker at {self.path} took longer than {limit_s:g} s to answer"
                )
            self._check_alive()

    def _take(self) -> tuple[Reply, wire.ReceivedFds] | None:
        """What has come; None when it answers an earlier request. Raises MemoryWorkerError."""
        answered, fds = self._channel.receive(self._timeout_s)
        if answered.number == self._number:
            return answered.reply, fds
        fds.close()
        if answered.number > self._number:
            self._channel.close()
            raise MemoryWorkerError(
                f"the memory worker at {self.path} answered request {answered.number}; "
                f"{self._number} was the last"
            )
        logger.warning(
            "dropped a late or doubled answer to request %d of %d from the memory worker at %s: %s",
            answered.number,
            self._number,
            self.path,
            type(answered.reply).__name__,
        )
        return None

    def _check_alive(self, wait_s: float = 0.0) -> None:
        """Raises MemoryWorkerError, with the connection closed, for a worker that hangs.

        One that goes on again has `wait_s` to show it.
        """
        if self._liveness_probe.silent_s(time.monotonic(), wait_s) >= HANG_S:
            self._channel.close()
            raise MemoryWorkerError(
                f"the memory worker at {self.path} hangs: no sign of life for {HANG_S:g} s"
            )


def _error_of(failure: messages.Failure) -> ElasticError:
    error_class = getattr(errors, failure.error, None)
    if isinstance(error_class, type) and issubclass(error_class, ElasticError):
        return error_class(failure.text)
    return MemoryWorkerError(f"{failure.error}: {failure.text}")


@dataclass
class LivenessProbe:
    """Asks the worker at `path` for signs of life, one at a time. Used by one thread at a time."""

    path: Path
    _socket: socket.socket | None = None
    _asked_s: float | None = None  # since when no sign has come

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
            sock.connect(str(self.path))
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
