"""Work on a client's text, away from the event loop: in a process of its own, with a time limit.

    SGLang's middleware -> [TextJobs] --small body--> route
                              └--larger--> fork server --fork--> the same route, in a job's process

Parsers of tool calls, chat templates and tokenizers are SGLang's and others' code, some of it
quadratic in a text's length, and Python threads would hold up the event loop all the same. The fork
server is a fork of this process, made when it is first needed: it has every module, the tokenizer
and the application as they are, shares their memory, and has no thread but one. The kernel ends a
job at its time limit, by SIGALRM, whatever code it is in, and gives it MEMORY_BYTES of memory more
than the front has. Only routes that do not need the engine may be given here: a job has none of the
front's connections.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from msgspec import msgpack

from sgl_esft.errors import InternalError, TextBusyError, TextTimeoutError
from sgl_esft.http.answers import App, Message, Receive, Scope, Send, send_error
from sgl_esft.http.classes import routed_path
from sgl_esft.http.record import current

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S: Final = 5.0
SMALL_BYTES: Final = 4 << 10  # a quadratic parser needs 0.02 s for these, as long as a fork takes
MAX_JOBS: Final = 4
MAX_JOBS_OF_KEY: Final = 2
MEMORY_BYTES: Final = 1 << 30
_GRACE_S = 2.0  # for a job that the kernel ends to be seen as ended
_NICENESS = 10  # ranks and the front come first
_PR_SET_PDEATHSIG = 1
# What a job gets of a request's scope: values, no object of the front's.
_SENT = frozenset(
    {
        *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
        *("root_path", "headers", "client", "server"),
    }
)


class ForkServer:
    """Starts one process for each job. Its own process begins with the first one."""

    def __init__(self, app: App, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._pid: int | None = None
        self._control: socket.socket | None = None

    def start_job(self) -> socket.socket:
        """The connection to a new job: it reads (scope, body) to the end, then writes messages."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._connected(), [b"j"], [theirs.fileno()])
            except OSError:  # it was killed: the next one begins
                self.end()
                socket.send_fds(self._connected(), [b"j"], [theirs.fileno()])
        ours.setblocking(False)
        return ours

    def end(self) -> None:
        """Kill it, and its jobs with it."""
        if self._control is not None:
            self._control.close()
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        self._pid = self._control = None

    def _connected(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            parent = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                _never_return(_accept_jobs, self._app, theirs, self._timeout_s, parent)
            theirs.close()
        return self._control


def _never_return(function: Any, *args: Any) -> NoReturn:
    """In a forked process: nothing of the parent's may run after the function."""
    try:
        function(*args)
    except BaseException:
        logger.exception("a process that works on texts has failed")
        os._exit(1)
    os._exit(0)


def _accept_jobs(app: App, control: socket.socket, timeout_s: float, parent: int) -> None:
    """The fork server's process: one fork for each connection, until the front has gone."""
    _die_with(parent)
    gc.disable()  # nothing of the front's may be destroyed here, and its memory stays shared
    signal.set_wakeup_fd(-1)
    for ends_the_front in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ends_the_front, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # jobs leave no zombie
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads were not forked
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICENESS)
    own = os.getpid()
    while True:
        found, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not found:
            return
        for fd in fds:
            if os.fork() == 0:
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                control.close()
                _never_return(_do_job, app, socket.socket(fileno=fd), own)
            os.close(fd)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _do_job(app: App, connection: socket.socket, parent: int) -> None:
    _die_with(parent)
    with connection, connection.makefile("rb") as reader:
        scope, body = msgpack.decode(reader.read())
        _bound_memory()
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                messages = runner.run(_answered(app, scope, body))
        except MemoryError:
            messages = []  # nothing else answers so
        connection.sendall(msgpack.encode(messages))


def _bound_memory() -> None:
    """Of this process, whose forking gave it all of the front's."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


async def _answered(app: App, scope: Scope, body: bytes) -> list[Message]:
    messages: list[Message] = []
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return pending.pop() if pending else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)

    await app({**scope, "state": {}}, receive, send)
    return messages


class TextJobs:
    """An ASGI layer, the innermost: requests on `routes` are answered by a job's process."""

    def __init__(
        self, app: App, fastapi: Any, routes: Collection[str], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._app = app
        self._routes = routes
        self._timeout_s = timeout_s

        async def in_job(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "app": fastapi}, receive, send)

        self._server = ForkServer(in_job, timeout_s)
        self._places = asyncio.Semaphore(MAX_JOBS)
        self._of_key: dict[str | None, asyncio.Semaphore] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or routed_path(scope) not in self._routes:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        if len(body) <= SMALL_BYTES:
            await self._app(scope, _given(body, receive), send)
            return
        try:
            async with self._place():
                messages = await self._job(scope, body)
        except (TextBusyError, TextTimeoutError) as error:
            await send_error(send, error)
            return
        for message in messages:
            await send(message)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among all jobs and among the key's own. Raises TextBusyError."""
        record = current()
        key = None if record is None else record.key_name
        most = MAX_JOBS if key is None else MAX_JOBS_OF_KEY
        of_key = self._of_key.setdefault(key, asyncio.Semaphore(most))
        busy = "the server, or this key, works on as many texts as it may at once"
        async with _taken(of_key, self._timeout_s, busy), _taken(self._places, _GRACE_S, busy):
            yield

    async def _job(self, scope: Scope, body: bytes) -> list[Message]:
        """Raises TextTimeoutError, InternalError."""
        started = time.monotonic()
        sent = {name: value for name, value in scope.items() if name in _SENT}
        with self._server.start_job() as connection:
            try:
                async with asyncio.timeout(self._timeout_s + _GRACE_S):
                    answer = await _exchange(connection, msgpack.encode((sent, body)))
            except TimeoutError:  # the fork server hangs or is stopped
                self._server.end()
                answer = b""
        if answer:
            messages: list[Message] = msgpack.decode(answer)
            if messages:
                return messages
            raise TextTimeoutError(
                f"work on this text takes more than {MEMORY_BYTES >> 20} MiB: send a shorter one"
            )
        if time.monotonic() - started < self._timeout_s:
            raise InternalError("a process that worked on a text has failed; the log says why")
        raise TextTimeoutError(
            f"work on this text takes more than {self._timeout_s:g} s: send a shorter one; "
            "--text-timeout of the server sets this"
        )


@asynccontextmanager
async def _taken(places: asyncio.Semaphore, wait_s: float, busy: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(wait_s):
            await places.acquire()
    except TimeoutError:
        raise TextBusyError(busy) from None
    try:
        yield
    finally:
        places.release()


async def _exchange(connection: socket.socket, request: bytes) -> bytes:
    """What a job answers; nothing if it ended before."""
    loop = asyncio.get_running_loop()
    chunks: list[bytes] = []
    with suppress(ConnectionError):
        await loop.sock_sendall(connection, request)
        connection.shutdown(socket.SHUT_WR)
        while chunk := await loop.sock_recv(connection, 1 << 18):
            chunks.append(chunk)
        return b"".join(chunks)
    return b""


async def _body(receive: Receive) -> bytes | None:
    """The body, of a size that the gate has checked; None if the client left."""
    chunks: list[bytes] = []
    while (message := await receive())["type"] == "http.request":
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
    return None


def _given(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def given() -> Message:
        return pending.pop() if pending else await receive()

    return given
