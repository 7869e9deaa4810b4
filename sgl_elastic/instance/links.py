"""The instance manager's end of the ranks' connections.

    ranks --RankHello--> [RankServer] --> RankLink (instance, rank) --> manager.py
                          '--AdapterTable, HeatReport--> on_adapters, on_heat

One thread accepts, one thread a rank reads; answers wait in the link until the manager takes them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, EngineFailedError, MemoryWorkerError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.types import AdapterEntry

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 10.0
_PONG_POLL_S = 0.002
_DECODER: msgspec.msgpack.Decoder[m.FromRank] = msgspec.msgpack.Decoder(m.FromRank)
Answer = TypeVar("Answer", bound=m.FromRank)
OnAdapters: TypeAlias = Callable[["RankLink", tuple[AdapterEntry, ...]], None]
OnHeat: TypeAlias = Callable[["RankLink", m.HeatReport], None]


class RankLink:
    """One rank, as the manager talks to it. Thread-safe."""

    def __init__(
        self, hello: m.RankHello, channel: wire.Channel[m.FromRank], sock: socket.socket
    ) -> None:
        self.instance = hello.instance
        self.rank = hello.rank
        self.pid = hello.pid
        self._channel = channel
        self._socket = sock  # the channel's
        self._lock = threading.Lock()  # a channel is one thread's at a time
        self._num_sent = 0
        self._instruction = 0  # `_num_sent` at the last message that is answered in the inbox
        self._answered = 0  # the number of the last instruction that it has answered
        self._pinged_s: float | None = None  # when the Ping went that has no Pong yet
        self._lost = ""
        self._all_read = threading.Event()  # nothing more can come
        self.is_awaited = False  # somebody waits for an answer, with a deadline
        self._inbox: queue.Queue[m.FromRank | ElasticError] = queue.Queue()

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"rank {self.rank} of instance {self.instance}"

    @property
    def lost(self) -> str:
        """Why the rank is gone; "" while it is there."""
        return self._lost

    def send(self, message: m.ToRank) -> None:
        """Raises EngineFailedError when the rank is gone."""
        with self._lock:
            self._channel.send(m.Told(self._num_sent + 1, message))
            self._num_sent += 1
            if not isinstance(message, m.Ping | m.Wake):
                self._instruction = self._num_sent

    def ping(self, now_s: float) -> None:
        """Ask whether it is there, unless it still has to answer that."""
        if self._pinged_s is None and not self._lost:
            self._pinged_s = now_s
            self.send(m.Ping())

    def silent_s(self, now_s: float) -> float:
        """Seconds for which the last Ping has waited for its Pong; 0 when it has come."""
        pinged_s = self._pinged_s
        return 0.0 if pinged_s is None else now_s - pinged_s

    def drain_messages(self, deadline: float) -> bool:
        """Wait until all that the rank has sent so far is read; False if it says nothing more."""
        for _ in range(2):  # a Ping may be on its way that was sent before
            with contextlib.suppress(EngineFailedError):
                self.ping(time.monotonic())
            while self._pinged_s is not None:
                if self._lost or time.monotonic() >= deadline:
                    return False
                time.sleep(_PONG_POLL_S)
        return not self._lost

    def finish(self, deadline: float) -> bool:
        """Wait until the last instruction is answered; False if it is not: it may be at it yet."""
        while self._answered < self._instruction:
            if self._lost or time.monotonic() >= deadline:
                return False
            time.sleep(_PONG_POLL_S)
        return True

    def read_to_the_end(self, deadline: float) -> bool:
        """Of a rank that has ended: wait until all that it sent is read; False if it is not."""
        return self._all_read.wait(max(deadline - time.monotonic(), 0.0))

    def fail(self, reason: str) -> None:
        """Give the rank up: whoever waits for it, now or later, hears the reason."""
        if not self._lost:
            self._lost = reason
            self._inbox.put(EngineFailedError(reason))

    def expect(self, kind: type[Answer], deadline: float) -> Answer:
        """The next message, which must be of this kind, by `time.monotonic()` at `deadline`.

        Raises EngineFailedError when the rank fails, dies, is late or says something else, and
        MemoryWorkerError when it could not do what was asked because of its memory worker.
        """
        self.is_awaited = True
        try:
            message = self._next_answer(kind, deadline)
        finally:
            self.is_awaited = False
        if isinstance(message, ElasticError):
            self._inbox.put(message)  # every later call fails alike
            raise EngineFailedError(f"{self.name}: {message}") from message
        if isinstance(message, m.Failed):
            is_memory = message.error == MemoryWorkerError.__name__
            failed = MemoryWorkerError if is_memory else EngineFailedError
            raise failed(f"{self.name}: {message.error}: {message.message}")
        if not isinstance(message, kind):
            raise EngineFailedError(
                f"{self.name} sent {type(message).__name__}, not {kind.__name__}"
            )
        return message

    def _next_answer(self, kind: type[Answer], deadline: float) -> m.FromRank | ElasticError:
        """The next message that does not answer an earlier instruction."""
        # A pause does not come by this connection: whatever is numbered was before it.
        first = self._num_sent + 1 if kind is m.Frozen else self._instruction
        while True:
            try:
                message = self._inbox.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise EngineFailedError(f"{self.name} gave no {kind.__name__} in time") from None
            number = getattr(message, "number", 0)
            if not 0 < number < first:
                return message
            logger.warning("elastic: %s answered late: %s", self.name, message)

    def forget_answers(self) -> None:
        """Drop what came too late for whoever waited."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, ElasticError):
                self._inbox.put(message)
                return

    def close(self) -> None:
        """End the connection; the rank then ends too."""
        _shut(self._socket)
        self._channel.close()

    def read_all(self, on_adapters: OnAdapters, on_heat: OnHeat) -> None:
        """Read until the rank is gone."""
        try:
            while True:
                self._read_next(on_adapters, on_heat)
        except (ElasticError, OSError, ValueError) as error:
            self.fail(str(error) or type(error).__name__)
        finally:
            self._all_read.set()

    def _read_next(self, on_adapters: OnAdapters, on_heat: OnHeat) -> None:
        self._channel.wait()
        with self._lock:
            message, fds = self._channel.receive()
        fds.close()
        if isinstance(message, m.Pong):
            self._pinged_s = None
        elif isinstance(message, m.AdapterTable):
            on_adapters(self, message.adapters)
        elif isinstance(message, m.HeatReport):
            on_heat(self, message)
        else:
            self._answered = max(self._answered, getattr(message, "number", 0))
            self._inbox.put(message)


def send_all(links: Sequence[RankLink], messages: Sequence[m.ToRank]) -> None:
    """One message for each rank, in order. Raises EngineFailedError when one is gone."""
    for link, message in zip(links, messages, strict=True):
        link.send(message)


def expect_all(links: Sequence[RankLink], kind: type[Answer], timeout_s: float) -> list[Answer]:
    """What each rank answers, all of them within the time. Raises EngineFailedError."""
    deadline = time.monotonic() + timeout_s
    for link in links:
        link.is_awaited = True
    try:
        return [link.expect(kind, deadline) for link in links]
    finally:
        for link in links:
            link.is_awaited = False


class RankServer:
    """Where ranks connect."""

    def __init__(
        self, path: Path, on_adapters: OnAdapters, on_heat: OnHeat = lambda link, heat: None
    ) -> None:
        self._socket = wire.listen(path)
        self._path = path
        self._on_adapters = on_adapters
        self._on_heat = on_heat
        self._links: dict[tuple[str, int], RankLink] = {}
        self._arrived = threading.Condition()
        threading.Thread(target=self._accept_all, name="elastic-ranks", daemon=True).start()

    def wait_for(
        self, instance: str, num_ranks: int, deadline: float, is_alive: Callable[[], bool]
    ) -> list[RankLink]:
        """The instance's links, by rank. Raises EngineFailedError when they do not come."""
        with self._arrived:
            while True:
                links = [self._links.get((instance, rank)) for rank in range(num_ranks)]
                if all(links):
                    return [link for link in links if link is not None]
                if not is_alive():
                    raise EngineFailedError(f"instance {instance} ended while it started")
                if time.monotonic() > deadline:
                    raise EngineFailedError(f"instance {instance} did not start in time")
                self._arrived.wait(0.2)

    def forget(self, instance: str) -> None:
        """Close the instance's connections."""
        with self._arrived:
            for key in [key for key in self._links if key[0] == instance]:
                self._links.pop(key).close()

    def close(self) -> None:
        """Close everything."""
        _shut(self._socket)
        self._socket.close()
        with self._arrived:
            for link in self._links.values():
                link.close()
            self._links.clear()
        self._path.unlink(missing_ok=True)

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # closed
            channel = wire.Channel(
                sock,
                _DECODER,
                peer="an engine rank",
                failure=EngineFailedError,
                timeout_s=_SEND_TIMEOUT_S,
            )
            threading.Thread(
                target=self._serve, args=(sock, channel), name="elastic-rank", daemon=True
            ).start()

    def _serve(self, sock: socket.socket, channel: wire.Channel[m.FromRank]) -> None:
        try:
            wire.check_peer(sock)
            hello, fds = channel.receive()
            fds.close()
        except ElasticError as error:
            logger.warning("elastic: a connection was refused: %s", error)
            channel.close()
            return
        if not isinstance(hello, m.RankHello):
            logger.warning("elastic: a rank began with %s", type(hello).__name__)
            channel.close()
            return
        link = RankLink(hello, channel, sock)
        with self._arrived:
            self._links[(hello.instance, hello.rank)] = link
            self._arrived.notify_all()
        link.read_all(self._on_adapters, self._on_heat)


def _shut(sock: socket.socket) -> None:
    """Wake the thread that waits on this socket: until it does, closing would not end anything."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
