"""What TLS costs the tunnels between nodes: bytes a second, and until a connection's first byte.

    a sender, a tunnel over loopback, a receiver; in turns with TLS and with its streams plain
    -> rates and times of one over the other, round by round -> bench/results

All of it is in this process, so that both ends of a tunnel share its cores with sender and
receiver: between two machines each end has its own. `plain` is the same code with nothing encrypted
and nobody asked who he is. No server can be started so.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from bench.common.pairing import Taken, interleave, ratios, timed
from bench.common.record import write_result
from sgl_elastic import wire
from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.nodes import tunnel
from sgl_elastic.nodes.certificates import Authority, own_identity
from sgl_elastic.nodes.tls import TlsStream
from sgl_elastic.nodes.tunnel import Tunnels

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
OPENED = 20  # connections of a round, one after the other


class PlainStream(TlsStream):
    """The same frames on the socket as it is."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        host: str | None = None,
    ) -> None:
        super().__init__(loop, sock.dup(), context, host)
        super().close()  # only the copy, which nothing has passed through
        self._plain = sock

    async def handshake(self) -> None:
        """Nobody proves anything."""

    def close(self) -> None:
        """At once."""
        self._plain.close()

    async def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        await self._loop.sock_sendall(self._plain, data)

    async def _receive_into(self, space: memoryview) -> None:
        while space:
            num_bytes = await self._loop.sock_recv_into(self._plain, space)
            if num_bytes == 0:
                raise ConnectionResetError
            space = space[num_bytes:]


@contextmanager
def plain() -> Iterator[None]:
    """Tunnels' connections that begin meanwhile are not encrypted."""
    tunnel.TlsStream = PlainStream  # type: ignore[misc]
    try:
        yield
    finally:
        tunnel.TlsStream = TlsStream  # type: ignore[misc]


def send(path: Path, num_bytes: int) -> None:
    """So many bytes to the sink behind `path`, until it has answered that it has them."""
    block = bytes(1 << 20)
    with closing(wire.connect(path, MemoryWorkerError, TIMEOUT_S)) as sock:
        for _ in range(num_bytes // len(block)):
            sock.sendall(block)
        sock.shutdown(socket.SHUT_WR)
        if sock.recv(1) != b"\x01":
            raise MemoryWorkerError("a tunnel broke")


def sink(listener: socket.socket) -> None:
    """Reads each connection to its end, then answers one byte."""
    buffer = bytearray(1 << 20)
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock:
            while sock.recv_into(buffer):
                pass
            sock.sendall(b"\x01")


@contextmanager
def sink_through_tunnel() -> Iterator[Path]:
    """A path that leads through a tunnel to a sink."""
    authority = Authority()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(wire.listen(directory / "far" / "sink"))
        threading.Thread(target=sink, args=(listener,), daemon=True).start()
        stack.callback(listener.shutdown, socket.SHUT_RDWR)
        far, near = (
            stack.enter_context(closing(Tunnels(own_identity(authority, HOST), HOST)))
            for _ in range(2)
        )
        far.offer("sink", directory / "far" / "sink")
        near.open(directory / "near" / "sink", "sink", far.address)
        yield directory / "near" / "sink"


def measured(work: Callable[[], None], is_plain: bool) -> Taken:
    """One run, of a connection or of several that begin and end in it."""
    if not is_plain:
        return timed(work)
    with plain():
        return timed(work)


def in_turns(work: Callable[[], None], rounds: int) -> dict[str, object]:
    """TLS over plain: how much faster or slower, and processor time of the whole process."""
    runs = {kind: partial(measured, work, kind == "plain") for kind in ("tls", "plain")}
    taken = interleave(runs, rounds)
    return {
        "rate": ratios(taken["plain"], taken["tls"])["wall"],
        "processor_time": ratios(taken["tls"], taken["plain"])["cpu"],
    }


def main() -> None:
    """Measure and write bench/results/tunnels.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--mebibytes", type=int, default=256, help="of one run")
    options = parser.parse_args()
    with sink_through_tunnel() as path:

        def open_many() -> None:
            for _ in range(OPENED):
                send(path, 0)

        rows = {
            "bytes": in_turns(partial(send, path, options.mebibytes << 20), options.rounds),
            "connections": in_turns(open_many, options.rounds),
        }
    for name, figures in rows.items():
        print(name, figures)
    result = write_result(
        "tunnels",
        {
            "what": "a tunnel between nodes with TLS over one without, both ends in one process",
            "rounds": options.rounds,
            "mebibytes": options.mebibytes,
            "rows": rows,
        },
    )
    print(f"wrote {result.name}")


if __name__ == "__main__":
    main()
