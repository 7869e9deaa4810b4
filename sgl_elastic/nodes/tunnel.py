"""Unix stream connections carried to a socket on another node, over TLS.

    client --> PATH [Tunnels.open] ==TLS==> [the gateway there] --> the socket offered as NAME
                      each has a certificate of this server

Bytes pass unchanged, and so does the end of each direction; descriptors do not. A gateway listens
on its node's address only, leads to nothing but what was offered by name, and lets nobody in who
has no certificate of this start of the server (certificates.py); nor does a client tell its name,
or send a byte, to a gateway without one. There is no way without TLS. One thread serves all
connections of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from sgl_elastic import wire
from sgl_elastic.errors import ElasticConfigError, ElasticError, NodeLostError
from sgl_elastic.nodes.certificates import Identity
from sgl_elastic.nodes.tls import MAX_FRAME_BYTES, TlsStream, why

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0  # for all of it, the connection to the gateway included
MAX_STRANGERS = 64  # connections that have not yet said who they are

# After TLS's handshake the client sends the name's length and the name, the gateway one byte.
_IS_THERE, _IS_NOT_THERE = b"\x01", b"\x00"
_MAX_NAME_BYTES = 64
_CALL_S = 10.0  # for the thread to do what another one asks
# A node that has gone without a word is noticed after about so many seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 11_000

Address = tuple[str, int]
Serve = Callable[[socket.socket], Awaitable[None]]


class _NotThereError(NodeLostError):
    """The way is fine, but nobody listens at its end: as usual while a worker starts."""


class Tunnels:
    """All tunnels that begin or end in this process. Safe to use from any thread.

    `host` is this node's address, the only one at which others come in. Raises ElasticConfigError
    when nothing can listen there.
    """

    def __init__(self, identity: Identity, host: str) -> None:
        self._identity = identity
        self._offers: dict[str, Path] = {}
        self._entrances: dict[Path, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_strangers = 0
        self._changing = threading.RLock()  # one thread at a time opens, shuts or closes
        self._gateway = _listen(host)
        self._loop = asyncio.new_event_loop()
        self.address: Address = self._gateway.getsockname()[:2]
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="elastic-tunnels", daemon=True
        )
        self._thread.start()
        self._run(self._enter(self._gateway, self._admit))

    def offer(self, name: str, path: Path) -> None:
        """Others may reach the socket at `path` by this name, whether it listens yet or not."""
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise ElasticConfigError(f"{name!r} has not 1 to {_MAX_NAME_BYTES} bytes")
        self._offers[name] = path

    def withdraw(self, name: str) -> None:
        """No new connections by this name; harmless when it was not offered."""
        self._offers.pop(name, None)

    def open(self, path: Path, name: str, address: Address) -> None:
        """Listen at `path`; what connects there is led to `name` at that gateway.

        Raises ElasticConfigError when something is at `path`, NodeLostError after `close`.
        """

        async def lead(sock: socket.socket) -> None:
            await self._lead(sock, name, address)

        with self._changing:
            if self._loop.is_closed():
                raise NodeLostError(f"{name} cannot be reached: the tunnels here are closed")
            listener = wire.listen(path)
            listener.setblocking(False)
            self._entrances[path] = listener
            self._run(self._enter(listener, lead))

    def shut(self, path: Path) -> None:
        """End a listener of `open`; connections go on. Harmless a second time."""
        with self._changing:
            listener = self._entrances.pop(path, None)
            if listener is not None:
                self._run(self._leave(listener))
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """End everything, connections too. Harmless a second time, also while another one runs."""
        with self._changing:
            if self._loop.is_closed():
                return
            for path in list(self._entrances):
                self.shut(path)
            self._run(self._leave(self._gateway))
            self._run(_cancelled(self._tasks))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_S)
            self._loop.close()

    # ---- in the thread ----

    def _run(self, todo: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(todo, self._loop).result(_CALL_S)

    async def _enter(self, listener: socket.socket, serve: Serve) -> None:
        self._watch(listener, serve)

    def _watch(self, listener: socket.socket, serve: Serve) -> None:
        """Accept from now on: not by a task, which could be cancelled with a new socket in hand."""
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener, serve)

    async def _leave(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)
        listener.close()

    def _accept(self, listener: socket.socket, serve: Serve) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # whoever it was has left
            return
        except OSError as error:  # out of descriptors, most likely: let some be closed
            logger.warning("tunnel: a connection is refused: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(0.05, self._watch, listener, serve)
            return
        # Not only by itself: a task that is cancelled before it began closes nothing.
        task = self._loop.create_task(_served(sock, serve))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: sock.close())

    async def _lead(self, sock: socket.socket, name: str, address: Address) -> None:
        """From a client of this node to the other node's gateway."""
        wire.check_peer(sock)
        with contextlib.closing(socket.socket(_family(address[0]))) as out:
            _tune(out)
            async with asyncio.timeout(HANDSHAKE_S) as limit:
                await self._loop.sock_connect(out, address)
                context = self._identity.as_client
                with contextlib.closing(TlsStream(self._loop, out, context, address[0])) as stream:
                    await _introduce(stream, name, address)
                    limit.reschedule(None)
                    await _joined(self._loop, sock, stream)

    async def _admit(self, sock: socket.socket) -> None:
        """From another node to a socket of this one."""
        _tune(sock)
        host = sock.getpeername()[0]
        with contextlib.closing(TlsStream(self._loop, sock, self._identity.as_gateway)) as stream:
            with self._stranger():
                async with asyncio.timeout(HANDSHAKE_S):
                    inner = await self._connect(await _let_in(stream, host))
            if inner is None:
                await stream.send(_IS_NOT_THERE)
                raise _NotThereError("what was asked for does not listen")
            with contextlib.closing(inner):
                await stream.send(_IS_THERE)
                await _joined(self._loop, inner, stream)

    @contextlib.contextmanager
    def _stranger(self) -> Iterator[None]:
        if self._num_strangers >= MAX_STRANGERS:
            raise NodeLostError("too many connections that have not said who they are")
        self._num_strangers += 1
        try:
            yield
        finally:
            self._num_strangers -= 1

    async def _connect(self, name: str) -> socket.socket | None:
        """A connection to what is offered by this name; None where nobody listens."""
        path = self._offers.get(name)
        if path is None:
            return None
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.setblocking(False)
        try:
            await self._loop.sock_connect(inner, str(path))
        except OSError:
            inner.close()
            return None
        return inner


async def _let_in(stream: TlsStream, host: str) -> str:
    """The gateway's part of the handshake: the name that is asked for. Raises NodeLostError."""
    try:
        await stream.handshake()
    except ssl.SSLError as error:
        raise NodeLostError(
            f"{host} is refused, for it has no certificate of this server: {why(error)}"
        ) from error
    (num_bytes,) = await stream.receive(1)
    name = await stream.receive(min(num_bytes, _MAX_NAME_BYTES))
    return name.decode(errors="replace")


async def _introduce(stream: TlsStream, name: str, address: Address) -> None:
    """The client's part of the handshake. Raises NodeLostError when it is not let in."""
    try:
        await stream.handshake()
    except ssl.SSLError as error:
        raise NodeLostError(
            f"the gateway at {address} has no certificate of this server: {why(error)}"
        ) from error
    try:
        await stream.send(bytes([len(name.encode())]) + name.encode())
        answer = await stream.receive(1)
    except (ssl.SSLError, ConnectionError) as error:  # only now the gateway has seen ours
        raise NodeLostError(f"the gateway at {address} refuses us: {why(error)}") from error
    if answer != _IS_THERE:
        raise _NotThereError(f"nothing listens as {name} behind {address}")


async def _served(sock: socket.socket, serve: Serve) -> None:
    """One connection, whatever becomes of it: the other end sees its end."""
    with contextlib.closing(sock):
        sock.setblocking(False)
        try:
            await serve(sock)
        except _NotThereError as error:
            logger.debug("tunnel: %s", error)
        except (ElasticError, OSError) as error:  # TimeoutError is one of them
            reason = str(error) or type(error).__name__
            logger.warning("tunnel: a connection has ended: %s", reason)


async def _joined(loop: asyncio.AbstractEventLoop, inner: socket.socket, stream: TlsStream) -> None:
    """Carry both directions until each has ended; when one breaks, both do."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry_out(loop, inner, stream))
            group.create_task(_carry_in(loop, stream, inner))
    except* OSError as broken:
        logger.debug("tunnel: a connection broke: %s", broken.exceptions[0])


async def _carry_out(
    loop: asyncio.AbstractEventLoop, inner: socket.socket, stream: TlsStream
) -> None:
    while num_bytes := await loop.sock_recv_into(inner, stream.to_send):
        await stream.send_frame(num_bytes)
        await asyncio.sleep(0)  # who encrypts seldom waits by itself: others have their turn
    await stream.send_frame(0)


async def _carry_in(
    loop: asyncio.AbstractEventLoop, stream: TlsStream, inner: socket.socket
) -> None:
    buffer = memoryview(bytearray(MAX_FRAME_BYTES))
    while num_bytes := await stream.receive_frame(buffer):
        await loop.sock_sendall(inner, buffer[:num_bytes])
        await asyncio.sleep(0)
    with contextlib.suppress(OSError):  # it may have ended too
        inner.shutdown(socket.SHUT_WR)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)


def _listen(host: str) -> socket.socket:
    try:
        sock = socket.create_server((host, 0), family=_family(host), backlog=128)
    except OSError as error:
        raise ElasticConfigError(f"cannot listen at this node's address {host}: {error}") from error
    sock.setblocking(False)
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _tune(sock: socket.socket) -> None:
    """Small messages go at once, and an end that is silent for good is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
