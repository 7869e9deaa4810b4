"""TLS on the non-blocking sockets of an event loop, with an end for each direction of its own.

    tunnel.py --> [TlsStream] ==TCP, encrypted==> [TlsStream] --> tunnel.py

asyncio's own streams copy every byte two more times, and over TLS cannot end one direction alone.
Here bytes go in frames, and an empty frame is a direction's end. So the other side has said the end
too, as it has every byte; a connection that just ends is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("<H")
# With its length a whole number of TLS's records of 16 KiB, and no length is too large.
MAX_FRAME_BYTES = (64 << 10) - _LENGTH.size


class TlsStream:
    """A connected TCP socket, which it takes over; at most one task reads, and one writes.

    The gateway's end if `host` is None, else the client's, which wants a certificate for `host`.
    Failures are OSErrors, ssl.SSLErrors among them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        host: str | None = None,
    ) -> None:
        self._loop = loop
        self._frame = memoryview(bytearray(_LENGTH.size + MAX_FRAME_BYTES))
        self._socket = context.wrap_socket(
            sock,
            server_side=host is None,
            server_hostname=host,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )

    @property
    def to_send(self) -> memoryview:
        """Where the bytes of the next frame go, for `send_frame`."""
        return self._frame[_LENGTH.size :]

    async def handshake(self) -> None:
        """The gateway's returns when both have proven who they are, the client's may be earlier."""
        while True:
            try:
                return self._socket.do_handshake()
            except ssl.SSLWantReadError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)

    async def receive(self, num_bytes: int) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(num_bytes)
        await self._receive_into(memoryview(data))
        return bytes(data)

    async def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except ssl.SSLWantWriteError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)

    async def receive_frame(self, buffer: memoryview) -> int:
        """The bytes of the next frame, into `buffer`: how many; 0 is the end."""
        (num_bytes,) = _LENGTH.unpack(await self.receive(_LENGTH.size))
        await self._receive_into(buffer[:num_bytes])
        return int(num_bytes)

    async def send_frame(self, num_bytes: int) -> None:
        """So many bytes of `to_send`; 0 is the end of this direction."""
        _LENGTH.pack_into(self._frame, 0, num_bytes)
        await self.send(self._frame[: _LENGTH.size + num_bytes])

    def close(self) -> None:
        """At once, and without a word. Harmless a second time."""
        self._socket.close()

    async def _receive_into(self, space: memoryview) -> None:
        while space:
            num_bytes = -1
            with contextlib.suppress(ssl.SSLWantReadError):
                num_bytes = self._socket.recv_into(space)
            if num_bytes == 0:
                raise ConnectionResetError("the other end of a tunnel has left")
            if num_bytes < 0:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
            else:
                space = space[num_bytes:]

    async def _until(self, watch: Callable[..., object], unwatch: Callable[[int], object]) -> None:
        """Wait until the loop says that this socket can be read, or written."""
        ready: asyncio.Future[None] = self._loop.create_future()
        fd = self._socket.fileno()
        watch(fd, _settle, ready)
        try:
            await ready
        finally:
            unwatch(fd)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():  # the loop says so again until it is told to stop
        ready.set_result(None)


def why(error: OSError) -> str:
    """A few words for what OpenSSL says."""
    found = getattr(error, "verify_message", None) or getattr(error, "reason", None) or str(error)
    return str(found).lower().replace("_", " ")
