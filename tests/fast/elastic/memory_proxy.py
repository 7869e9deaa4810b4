"""A proxy in front of a memory worker, which loses and doubles messages.

client --Asked--> [Proxy: a fault, once] --Asked--> worker --Answered--> [Proxy] --> client
"""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError
from sgl_elastic.memory import messages
from sgl_elastic.memory.messages import Answered, Asked

ANSWER_S = 30.0  # for each answer of the worker
CHANGING = (messages.MapSlots, messages.CopyFrom, messages.UnmapSlots)
PAGES = (messages.AskPages,)
Parts = list[tuple[Answered, wire.ReceivedFds]]  # of one answer


@dataclass(frozen=True)
class MessageFault:
    """What happens to one request and its answers."""

    num_requests: int = 1  # so often the worker is sent it
    answers: tuple[int, ...] = (0,)  # of these requests, what the client is sent at once
    late_answers: tuple[int, ...] = ()  # and what when its next request has come
    is_cut: bool = False  # the connection ends instead of the answer
    is_late: bool = False  # it comes when the client has asked for something else since

    @property
    def is_harmless(self) -> bool:
        """Whether the client has an answer in time."""
        return bool(self.answers)


FAULTS = {
    "lost request": MessageFault(num_requests=0, answers=()),
    "late request": MessageFault(num_requests=0, answers=(), is_late=True),
    "lost answer": MessageFault(answers=()),
    "cut answer": MessageFault(answers=(), is_cut=True),
    "doubled answer": MessageFault(answers=(0, 0)),
    "doubled answer, late": MessageFault(late_answers=(0,)),
    "doubled request": MessageFault(2, answers=(0, 1)),
    "doubled request, late": MessageFault(2, late_answers=(1,)),
    "doubled request, first answer lost": MessageFault(2, answers=(1,)),
}


class Proxy:
    """Does a fault to the next request of the given kinds; everything else goes through."""

    def __init__(
        self, upstream: Path, path: Path, how: str, kinds: tuple[type, ...] = CHANGING
    ) -> None:
        self.path, self._upstream, self._kinds = path, upstream, kinds
        self._fault: MessageFault | None = FAULTS[how]
        self._held: list[Parts] = []  # until the next request
        self._late: Asked | None = None  # until something else is answered
        self._sockets: list[socket.socket] = []
        self._listener = wire.listen(path)
        threading.Thread(target=self._accept_all, daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether the fault has happened, to its last late answer."""
        return self._fault is None and not self._held and self._late is None

    def close(self) -> None:
        """End all connections."""
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):  # it has ended already
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()

    def _accept_all(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with (
            suppress(ElasticError, OSError, ValueError),  # either end has left
            closing(channel_of(sock, messages.REQUESTS)) as down,
            closing(self._connect()) as up,
        ):
            while True:
                down.wait()
                asked, _ = down.receive()
                self._pass_on(asked, sock, up)

    def _connect(self) -> wire.Channel[Answered]:
        sock = wire.connect(self._upstream, MemoryWorkerError, ANSWER_S)
        return channel_of(sock, messages.REPLIES)

    def _pass_on(self, asked: Asked, down: socket.socket, up: wire.Channel[Answered]) -> None:
        held, self._held = self._held, []
        deliver(down, held)  # the client waits for another answer now
        fault = MessageFault()
        if self._fault is not None and isinstance(asked.request, self._kinds):
            fault, self._fault = self._fault, None
        answers = [exchange(up, asked) for _ in range(fault.num_requests)]
        if fault.is_late:
            self._late = asked
        elif self._late is not None and not isinstance(asked.request, messages.AskHello):
            late, self._late = self._late, None
            with closing(self._connect()) as other:
                exchange(other, late)
        if fault.is_cut:
            raise MemoryWorkerError("cut")
        self._held = [answers[i] for i in fault.late_answers]
        deliver(down, [answers[i] for i in fault.answers])


def channel_of(sock: socket.socket, decoder: Any) -> wire.Channel[Any]:
    return wire.Channel(
        sock, decoder, peer="proxied", failure=MemoryWorkerError, timeout_s=ANSWER_S
    )


def exchange(up: wire.Channel[Answered], asked: Asked) -> Parts:
    """All parts of an answer."""
    up.send(asked)
    parts = [up.receive()]
    while isinstance(pages := parts[-1][0].reply, messages.Pages) and not pages.is_last:
        parts.append(up.receive())
    return parts


def deliver(down: socket.socket, answers: list[Parts]) -> None:
    """In one piece where no descriptors are in between: all are there when the first is read."""
    parts = [part for answer in answers for part in answer]
    while parts:
        data, fds = frame(*parts.pop(0))
        while parts and not len(parts[0][1]):
            data += frame(*parts.pop(0))[0]
        socket.send_fds(down, [data], fds)


def frame(answered: Answered, fds: wire.ReceivedFds) -> tuple[bytes, list[int]]:
    payload = msgspec.msgpack.encode(answered)
    header = wire._HEADER.pack(wire._MAGIC, wire._VERSION, len(fds), len(payload))
    return header + payload, fds._fds
