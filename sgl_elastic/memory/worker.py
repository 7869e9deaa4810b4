"""The process that owns one device's memory, and outlives every engine that uses it.

    DeviceClient --> Unix socket --> [one thread a connection] --lock--> DeviceMemory
                                              |
                                              +-- CopyFrom --> copying.py --> peer worker

    python -m sgl_elastic.memory.worker --socket PATH --device-id 0 --budget-bytes N

It ends by Stop, SIGTERM, or the death of the process named by --die-with-parent. Nothing a client
does or fails to do ends it: whatever is not a request closes that client's connection.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sgl_vmm

from sgl_elastic import wire
from sgl_elastic.errors import ElasticError, MemoryWorkerError, WireError
from sgl_elastic.memory import messages
from sgl_elastic.memory.copying import Copier
from sgl_elastic.memory.device import DeviceMemory
from sgl_elastic.memory.messages import Asked, Message, PageExport, PageRun, Pages, Reply, Request
from sgl_elastic.memory.request_fence import FencedRequest, RequestFence
from sgl_elastic.memory.runs import PART_BYTES
from sgl_elastic.memory.window import PageSpans
from sgl_elastic.wire import Channel

logger = logging.getLogger(__name__)

MESSAGE_TIMEOUT_S = 30.0  # for one message, once it has begun; between messages we wait for ever
MAX_RUN_PAGES = 1 << 20  # pages in one part of an answer, so that it stays below the payload cap


@dataclass
class _Client:
    """A connection, and how far its client has come by it."""

    channel: Channel[Asked]
    name: str = ""  # of the client, as its first request says
    number: int = 0  # of its last request
    answer: Reply | None = None  # to that request; None before it, and for pages
    sent_pages: set[int] = field(default_factory=set)

    def say(self, reply: Reply, fds: Sequence[int] = ()) -> None:
        """Answer the last request, or a part of it."""
        self.channel.send(messages.Answered(self.number, reply), fds)

    def begin(self, number: int) -> None:
        """This request is to be answered: it is the last one now."""
        if number != self.number:
            self.number, self.answer = number, None


class Worker:
    """Requests of all connections, over one DeviceMemory, one at a time."""

    def __init__(
        self, memory: DeviceMemory, info: messages.Hello, stop: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._info = info
        self._stop = stop
        self._fence = RequestFence()
        self._handlers: Mapping[type[Message], Callable[[Any], Reply]] = {
            messages.AskHello: lambda _: self._info,
            messages.Define: self._define,
            messages.MapSlots: lambda r: messages.Changed(memory.map_slots(r.slots)),
            messages.UnmapSlots: lambda r: messages.Changed(memory.unmap_slots(r.slots)),
            messages.MarkLoaded: self._mark_loaded,
            messages.AskUsage: lambda _: memory.usage(),
            messages.AskDigest: lambda r: messages.Digest(memory.digest(r.region, r.slot)),
            messages.AskExperts: lambda _: memory.expert_slots(),
            messages.Stop: lambda _: messages.Done(),
        }

    def serve(self, channel: Channel[Asked]) -> None:
        """Answer one client until it leaves, or does what a client would not."""
        client = _Client(channel)
        try:
            while True:
                channel.wait()
                asked, fds = channel.receive()
                fds.close()  # no request has any
                lock = self._fenced(client, asked)
                if lock is not None:
                    self._serve_one(client, asked.request, lock)
        except WireError as error:
            logger.warning("a connection is closed: %s", error)
        except ElasticError as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            channel.close()
            if client.name:
                self._fence.leave(client.name)

    def _fenced(self, client: _Client, asked: Asked) -> FencedRequest | None:
        """None, and it is refused, when its client has gone on since. Raises WireError."""
        if not client.name:
            client.name = asked.client
            self._fence.join(client.name)
        if asked.client != client.name:
            raise WireError(f"{client.name} and {asked.client} ask by one connection")
        try:
            lock = self._fence.next(client.name, asked.number, client.channel.has_left)
        except MemoryWorkerError as error:
            logger.warning("%s", error)
            client.channel.send(messages.Answered(asked.number, _failure(error)))
            return None
        client.begin(asked.number)
        return lock

    def _serve_one(self, client: _Client, request: Request, lock: FencedRequest) -> None:
        if isinstance(request, messages.AskPages | messages.AskScratch):
            self._send_pages(client, request, lock)
            return
        if isinstance(request, messages.AskBytes):
            self._send_bytes(client, request, lock)
            return
        if client.answer is None:  # else it comes a second time, and is not done a second time
            client.answer = self._answer(request, lock)
        client.say(client.answer)
        if isinstance(request, messages.Stop) and isinstance(client.answer, messages.Done):
            self._stop()

    def _answer(self, request: Request, lock: FencedRequest) -> Reply:
        try:
            if isinstance(request, messages.CopyFrom):
                return Copier(self._memory, lock).copy_from(request)
            with lock:
                return self._handlers[type(request)](request)
        except ElasticError as error:
            return _failure(error)

    def _define(self, request: messages.Define) -> Reply:
        self._memory.define(request.shape)
        return messages.Done()

    def _mark_loaded(self, request: messages.MarkLoaded) -> Reply:
        self._memory.mark_loaded(request.slots, is_loaded=request.is_loaded)
        return messages.Done()

    def _send_pages(
        self,
        client: _Client,
        request: messages.AskPages | messages.AskScratch,
        lock: FencedRequest,
    ) -> None:
        try:
            with lock:
                runs, handles = self._pages(request)
        except ElasticError as error:
            client.say(_failure(error))
            return
        sent = client.sent_pages
        new = [handle for page_id, handle in handles.items() if page_id not in sent]
        parts = [new[i : i + wire.MAX_FDS] for i in range(0, len(new), wire.MAX_FDS)] or [[]]
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            self._send_part(client, runs if is_last else (), part, is_last)
            sent.update(handle.value for handle in part)

    def _send_bytes(self, client: _Client, request: messages.AskBytes, lock: FencedRequest) -> None:
        """Part by part, so that others get the lock in between."""
        position, is_last = 0, False
        while not is_last:
            answer = self._part(request, position, lock)
            client.say(answer)
            if isinstance(answer, messages.Failure):
                return
            position, is_last = position + len(answer.data), answer.is_last

    def _part(
        self, request: messages.AskBytes, position: int, lock: FencedRequest
    ) -> messages.Part | messages.Failure:
        slots = request.slots
        try:
            with lock:
                total = self._memory.readable(slots, must_be_loaded=request.must_be_loaded)
                data = self._memory.read(slots, position, min(PART_BYTES, total - position))
        except ElasticError as error:
            return _failure(error)
        return messages.Part(position, data, position + len(data) == total)

    def _pages(
        self, request: messages.AskPages | messages.AskScratch
    ) -> tuple[tuple[PageRun, ...], dict[int, sgl_vmm.Handle]]:
        """Runs of pages, and each page's handle by its id."""
        spans: Mapping[str, PageSpans]
        if isinstance(request, messages.AskScratch):
            spans = {"": [(0, [self._memory.scratch])]}
        else:
            spans = self._memory.pages(request.slots, must_be_loaded=request.must_be_loaded)
        handles = {h.value: h for found in spans.values() for _, span in found for h in span}
        if len(handles) > MAX_RUN_PAGES:
            raise MemoryWorkerError(
                f"{len(handles)} pages in one request, at most {MAX_RUN_PAGES}: ask by region"
            )
        runs = tuple(
            PageRun(region, first, tuple(handle.value for handle in span))
            for region, found in spans.items()
            for first, span in found
        )
        return runs, handles

    def _send_part(
        self,
        client: _Client,
        runs: tuple[PageRun, ...],
        handles: Sequence[sgl_vmm.Handle],
        is_last: bool,
    ) -> None:
        fds = _SharedFds()
        try:
            try:
                exports = tuple(self._export(handle, fds) for handle in handles)
            except sgl_vmm.VmmError as error:
                client.say(_failure(MemoryWorkerError(f"cannot export a page: {error}")))
                raise WireError(f"an answer could not be finished: {error}") from error
            client.say(Pages(runs, exports, is_last), fds.fds)
        finally:
            fds.close()

    def _export(self, handle: sgl_vmm.Handle, fds: _SharedFds) -> PageExport:
        exported = self._memory.backend.export_handle(handle)
        index = fds.add(exported.fd)
        return PageExport(handle.value, exported.key, exported.num_bytes, index)


class _SharedFds:
    """Descriptors to send, each file once: all pages of the host backend are in one file."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._index_of: dict[tuple[int, int], int] = {}

    def add(self, fd: int) -> int:
        """Takes `fd` (-1 = the backend needs none); returns its index in `fds`, or -1."""
        if fd < 0:
            return -1
        info = os.fstat(fd)
        file = (info.st_dev, info.st_ino)
        # Vendors' descriptors are of one device node each, and yet of different pages.
        if stat.S_ISREG(info.st_mode) and file in self._index_of:
            os.close(fd)
            return self._index_of[file]
        self._index_of[file] = len(self.fds)
        self.fds.append(fd)
        return len(self.fds) - 1

    def close(self) -> None:
        """Close all of them; whoever received them has its own."""
        for fd in self.fds:
            os.close(fd)


def _accept_all(worker: Worker, listener: socket.socket, enders: set[int]) -> None:
    """Accept connections until one of `enders` is readable: told to stop, or the parent is gone."""
    poll = select.poll()
    for fd in (listener.fileno(), *enders):
        poll.register(fd, select.POLLIN)
    while not enders & {fd for fd, _ in poll.poll()}:
        try:
            _accept(worker, listener)
        except (OSError, WireError) as error:
            logger.warning("a connection is refused: %s", error)
            time.sleep(0.05)  # out of descriptors, most likely: let some be closed


def _accept(worker: Worker, listener: socket.socket) -> None:
    sock, _ = listener.accept()
    try:
        wire.check_peer(sock)
    except WireError:
        sock.close()
        raise
    channel = Channel(
        sock,
        messages.REQUESTS,
        peer="a client",
        failure=MemoryWorkerError,
        timeout_s=MESSAGE_TIMEOUT_S,
    )
    threading.Thread(target=worker.serve, args=(channel,), daemon=True).start()


def _failure(error: ElasticError) -> messages.Failure:
    return messages.Failure(type(error).__name__, str(error))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sgl_elastic.memory.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--device-id", type=int, required=True)
    parser.add_argument("--backend", choices=("host", "cuda", "acl"), default="host")
    parser.add_argument("--page-bytes", type=int, default=2 << 20)
    parser.add_argument("--budget-bytes", type=int, required=True)
    parser.add_argument("--library", default="", help="the vendor's, where it has another name")
    parser.add_argument("--die-with-parent", type=int, default=0, metavar="PID")
    return parser.parse_args(argv)


def _watch_parent(parent_pid: int) -> int:
    """A descriptor that is readable when the parent is gone; -1 without one to watch.

    Not PR_SET_PDEATHSIG: that fires at the end of the thread that started this process, and scales
    start workers from threads that end.
    """
    if not parent_pid:
        return -1
    try:
        fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        sys.exit(f"the parent, process {parent_pid}, is gone already")
    if os.getppid() != parent_pid:
        sys.exit(f"the parent is process {os.getppid()}, not {parent_pid}")
    return fd


def main(argv: Sequence[str] | None = None) -> None:
    """Serve one device until told to stop."""
    args = _parse(argv)
    logging.basicConfig(format=f"memory worker {args.device_id}: %(message)s")
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front, which then stops us
    signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(stop_fd, 1))
    parent_fd = _watch_parent(args.die_with_parent)
    try:
        memory = DeviceMemory(
            args.backend, args.device_id, args.page_bytes, args.budget_bytes, args.library
        )
        listener = wire.listen(args.socket)
    except ElasticError as error:
        sys.exit(f"memory worker {args.device_id}: {error}")
    info = messages.Hello(
        args.device_id, os.getpid(), args.backend, args.page_bytes, memory.budget_pages
    )
    worker = Worker(memory, info, stop=lambda: os.eventfd_write(stop_fd, 1))
    _accept_all(worker, listener, {stop_fd, parent_fd} - {-1})
    args.socket.unlink(missing_ok=True)
    sys.stderr.flush()
    os._exit(0)  # threads may be inside a copy; the system takes all memory back


if __name__ == "__main__":
    main()
