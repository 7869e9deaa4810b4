"""Two folders that stand for two nodes, and tunnels between: to memory workers, and to an echo."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from sgl_elastic import wire
from sgl_elastic.errors import MemoryWorkerError
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.control import Hmm
from sgl_elastic.nodes.certificates import Authority, own_identity
from sgl_elastic.nodes.tunnel import Tunnels
from tests.fast.elastic.memory_workers import fill, hmm_of

HOST = "127.0.0.1"
AUTHORITY = Authority()
Echoing = tuple[Tunnels, Tunnels, Path]  # the far end, the near end, a path that echoes


@contextmanager
def tunnels(authority: Authority = AUTHORITY) -> Iterator[Tunnels]:
    with closing(Tunnels(own_identity(authority, HOST), HOST)) as found:
        yield found


class Pair:
    """Node 0 has device 0, node 1 has device 1; on node 1 is `device-0.sock`, a tunnel."""

    def __init__(self, stack: ExitStack, directory: Path, **options: object) -> None:
        self.hmms: list[Hmm] = []
        for node in (0, 1):
            hmm = stack.enter_context(hmm_of(directory / f"{node}", 2, add=False, **options))
            hmm.add_device(node)
            self.hmms.append(hmm)
        self.ends = [stack.enter_context(tunnels()) for _ in (0, 1)]
        self.ends[0].offer("device-0", self.hmms[0].socket_path(0))
        self.path = self.hmms[1].socket_path(0)
        self.ends[1].open(self.path, "device-0", self.ends[0].address)

    def client(self, node: int) -> DeviceClient:
        return self.hmms[node].client(node)

    def fill(self, node: int, slots: object, seed: int = 0) -> None:
        self.client(node).map_slots(slots)
        fill(self.hmms[node], node, slots, seed)

    def copy(self, slots: object) -> None:
        self.client(1).map_slots(slots)
        self.client(1).copy_from(self.path, slots, verify=True, by_bytes=True)


def echo(path: Path, stack: ExitStack) -> list[bytes]:
    """Answers each connection with what it got, once that has ended; what each got, as it ends."""
    listener = stack.enter_context(wire.listen(path))
    received: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, suppress(OSError):  # nobody waits for the answer
                received.append(read_all(sock))
                sock.sendall(received[-1])

    threading.Thread(target=serve, daemon=True).start()
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    return received


def ask(path: Path, data: bytes) -> bytes:
    with wire.connect(path, MemoryWorkerError, 10.0) as sock:
        thread = threading.Thread(target=send_all, args=(sock, data))
        thread.start()
        answer = read_all(sock)
        thread.join(10)
        return answer


def send_all(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # it is not read to its end
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


def read_all(sock: socket.socket) -> bytes:
    """What comes until the end, also the end of somebody who did not read what was sent."""
    data = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            data += more
    return data


def echo_through(directory: Path, stack: ExitStack) -> Echoing:
    echo(directory / "a" / "echo", stack)
    far, near = stack.enter_context(tunnels()), stack.enter_context(tunnels())
    far.offer("echo", directory / "a" / "echo")
    near.open(directory / "b" / "echo", "echo", far.address)
    return far, near, directory / "b" / "echo"
