"""What crosses a tunnel, seen from the network between; and who gets nothing there."""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from sgl_elastic import wire
from sgl_elastic.errors import ElasticConfigError
from sgl_elastic.nodes import certificates, tunnel
from sgl_elastic.nodes.certificates import Authority, Identity, NodeKey, own_identity
from tests.fast.elastic.memory_workers import (
    comes_to,
    digests,
    each,
    expected_digests,
    pattern,
    region_of,
)
from tests.fast.elastic.nodes.tunnel_ends import (
    AUTHORITY,
    HOST,
    Pair,
    ask,
    echo,
    read_all,
    send_all,
    tunnels,
)
from tests.support.waiting import wait_until

SLOTS = {"trunk": [(0, 1)], "experts.0.w13": [(0, 8)], "experts.0.w2": [(0, 8)]}
PRIVATE = b"what nobody else may read, " * 20
HOUR, DAY = datetime.timedelta(hours=1), datetime.timedelta(days=1)

# ---- somebody on the network between the nodes ----

Change = Callable[[bytes, int], bytes]  # bytes that go up, and how many went before


@dataclass
class Relay:
    """Carries TCP connections on to `target`, and keeps all that goes by, in both directions."""

    target: tuple[str, int] | str  # a gateway's address, or a Unix socket's
    change: Change = lambda data, _: data
    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                threading.Thread(target=self.join, args=(near,), daemon=True).start()

    def join(self, near: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET
        with near, socket.socket(family) as far, suppress(OSError):
            far.connect(self.target)
            up = threading.Thread(target=self.carry, args=(near, far, self.up, self.change))
            up.start()
            self.carry(far, near, self.down, None)
            up.join()

    @staticmethod
    def carry(
        source: socket.socket, target: socket.socket, seen: list[bytes], change: Change | None
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                count = sum(map(len, seen))
                seen.append(data)
                target.sendall(change(data, count) if change else data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    @property
    def all(self) -> bytes:
        return b"".join((*self.up, *self.down))


def relay_to(address: tuple[str, int], stack: ExitStack, **options: object) -> tuple[Relay, object]:
    """A relay to a gateway, and its own address."""
    listener = stack.enter_context(socket.create_server((HOST, 0)))
    relay = Relay(address, **options)
    threading.Thread(target=relay.serve, args=(listener,), daemon=True).start()
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    return relay, listener.getsockname()


def unix_relay_to(path: Path, at: Path, stack: ExitStack) -> Relay:
    listener = stack.enter_context(wire.listen(at))
    relay = Relay(str(path))
    threading.Thread(target=relay.serve, args=(listener,), daemon=True).start()
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
    return relay


@dataclass
class Relayed:
    """An echo behind a gateway, and a client's path to it that leads through a relay."""

    gateway: tuple[str, int]
    path: Path
    relay: Relay
    received: list[bytes]  # by the echo


def relayed(directory: Path, stack: ExitStack, **options: object) -> Relayed:
    received = echo(directory / "a" / "echo", stack)
    far, near = stack.enter_context(tunnels()), stack.enter_context(tunnels())
    far.offer("echo", directory / "a" / "echo")
    relay, address = relay_to(far.address, stack, **options)
    near.open(directory / "b" / "echo", "echo", address)
    return Relayed(far.address, directory / "b" / "echo", relay, received)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Relayed]:
    with ExitStack() as stack:
        yield relayed(tmp_path, stack)


def parts_of(data: bytes) -> set[bytes]:
    """16 bytes here and there: by chance none of them is anywhere else."""
    return {data[at : at + 16] for at in range(0, len(data) - 15, 64)}


def test_bytes_on_the_wire_are_not_the_weights(tmp_path: Path) -> None:
    """They are on the Unix socket behind the gateway, where the same look finds them all."""
    content = [pattern((0, *slot), region_of(slot[0]).slot_bytes) for slot in each(SLOTS)]
    parts = {part for slot in content for part in parts_of(slot.tobytes())}
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path)
        behind = unix_relay_to(pair.hmms[0].socket_path(0), tmp_path / "r" / "r", stack)
        pair.ends[0].offer("device-0", tmp_path / "r" / "r")
        wire_between, address = relay_to(pair.ends[0].address, stack)
        pair.ends[1].shut(pair.path)
        pair.ends[1].open(pair.path, "device-0", address)
        pair.fill(0, SLOTS)
        pair.copy(SLOTS)
        assert digests(pair.hmms[1], 1, SLOTS) == expected_digests(SLOTS)
        assert len(parts) > 500
        assert {part for part in parts if part in behind.all} == parts
        assert len(wire_between.all) > len(behind.all)
        assert [part for part in parts if part in wire_between.all] == []
        for name in (b"device-0", b"experts.0"):
            assert name not in wire_between.all


def test_a_recorded_connection_cannot_be_replayed(scene: Relayed) -> None:
    """Played to the gateway it opens nothing; and what the gateway said is no gateway."""
    assert ask(scene.path, PRIVATE) == PRIVATE
    up, down = list(scene.relay.up), list(scene.relay.down)
    answer = b""
    with socket.create_connection(scene.gateway, 10) as sock:
        sock.settimeout(0.5)
        for recorded in up:
            with suppress(OSError):  # it may have shown us out
                sock.sendall(recorded)
                answer += sock.recv(1 << 16)
        sock.settimeout(10)
        send_all(sock, b"")
        answer += read_all(sock)
    assert PRIVATE not in answer
    assert scene.received == [PRIVATE]  # from the first time
    assert heard_by_imposter(scene.path.parent, lambda sock: play(sock, down)) is None


def play(sock: socket.socket, recorded: list[bytes]) -> bytes | None:
    """As the gateway once did, whatever is said now."""
    said = b""
    with suppress(OSError):
        for data in recorded:
            said += sock.recv(1 << 16)
            sock.sendall(data)
        said += read_all(sock)
    return said if b"echo" in said or PRIVATE in said else None


def test_a_changed_byte_ends_the_connection(tmp_path: Path) -> None:
    """And is not delivered: what comes before it is right."""

    def flip(data: bytes, before: int) -> bytes:
        at = 50_000 - before
        if not 0 <= at < len(data):
            return data
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    sent = pattern("sent", 200_000).tobytes()
    with ExitStack() as stack:
        scene = relayed(tmp_path, stack, change=flip)
        assert ask(scene.path, sent) == b""
        wait_until(lambda: len(scene.received) == 1)
        assert len(scene.received[0]) < 50_000
        assert sent.startswith(scene.received[0])


# ---- somebody with other keys ----


def signed(authority: Authority = AUTHORITY, host: str = HOST) -> Identity:
    return own_identity(authority, host)


def of_other_times(patch: pytest.MonkeyPatch, before: object, after: object) -> Identity:
    with patch.context() as times:
        times.setattr(certificates, "CLOCKS_DIFFER_BY", before)
        times.setattr(certificates, "VALID_FOR", after)
        return signed()


def made_by_a_node() -> Identity:
    """A node signs for another, as if it were the authority; and shows its own certificate too."""
    node, other, rogue = NodeKey(), NodeKey(), Authority()
    own = AUTHORITY.sign(node.public, HOST)
    rogue._key, rogue._name = node._key, x509.load_pem_x509_certificate(own.encode()).subject
    return other.identity(rogue.sign(other.public, HOST) + own, AUTHORITY.certificate)


Patch = pytest.MonkeyPatch
KINDS: dict[str, tuple[Callable[[Patch], Identity | None], str]] = {
    "no certificate": (lambda _: None, ""),
    "another server's": (lambda _: signed(Authority()), ""),
    "expired": (lambda patch: of_other_times(patch, DAY, -HOUR), "expired"),
    "of tomorrow": (lambda patch: of_other_times(patch, -DAY, 2 * DAY), "not yet valid"),
    "signed by a node": (lambda _: made_by_a_node(), ""),
}


def client_of(identity: Identity | None) -> ssl.SSLContext:
    """Whoever is there, it will do: this one wants to get in."""
    context = identity.as_client if identity else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def gateway_of(identity: Identity | None) -> ssl.SSLContext:
    context = identity.as_gateway if identity else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_NONE
    return context


def said_to(gateway: tuple[str, int], context: ssl.SSLContext) -> tuple[bytes, bool]:
    """What the gateway answers to who asks for the echo; whether it gave a session to resume."""
    answer, has_session = b"", False
    frame = len(PRIVATE).to_bytes(2, "little") + PRIVATE
    with (
        suppress(OSError),
        socket.create_connection(gateway, 10) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as sock,
    ):
        sock.sendall(b"\x04echo" + frame + bytes(2))
        while more := sock.recv(1 << 16):
            answer += more
            has_session = has_session or bool(sock.session and sock.session.has_ticket)
    return answer, has_session


def heard_by_imposter(
    directory: Path, serve: Callable[[socket.socket], bytes | None]
) -> bytes | None:
    """What `serve` hears of a client of ours that is led to it."""
    heard: list[bytes | None] = []

    def accept() -> None:
        sock, _ = listener.accept()
        with sock:
            heard.append(serve(sock))

    with closing(socket.create_server((HOST, 0))) as listener, tunnels() as near:
        listener.settimeout(10)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        near.open(directory / "imposter", "echo", listener.getsockname())
        assert ask(directory / "imposter", PRIVATE) == b""
        thread.join(10)
    return heard[0]


def listen_as(context: ssl.SSLContext) -> Callable[[socket.socket], bytes | None]:
    def serve(sock: socket.socket) -> bytes | None:
        try:
            with context.wrap_socket(sock, server_side=True) as found:
                found.sendall(b"\x01")  # yes, what you ask for is here
                return found.recv(1 << 16) or None
        except OSError:
            return None

    return serve


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_without_a_certificate_of_this_server_gets_nothing(
    scene: Relayed, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = KINDS[kind]
    with caplog.at_level(logging.WARNING):
        assert said_to(scene.gateway, client_of(make(monkeypatch))) == (b"", False)
        found = f"{HOST} is refused, for it has no certificate of this server"
        assert comes_to(lambda: found in caplog.text, True)
    assert reason in caplog.text
    assert scene.received == []
    assert ask(scene.path, b"x") == b"x"


@pytest.mark.parametrize("kind", [*KINDS, "of another host"])
def test_a_gateway_without_a_certificate_of_this_server_hears_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even what is asked for."""
    other_host = (lambda _: signed(host="192.0.2.1"), "IP address mismatch")
    make, reason = KINDS.get(kind, other_host)
    context = gateway_of(make(monkeypatch))
    with caplog.at_level(logging.WARNING):
        assert heard_by_imposter(tmp_path, listen_as(context)) is None
        assert comes_to(lambda: "has no certificate of this server" in caplog.text, True)
    assert reason.lower() in caplog.text


def test_the_same_clients_and_gateways_with_the_right_one(scene: Relayed, tmp_path: Path) -> None:
    """So what the others miss is the certificate; and nobody gets a session to come back with."""
    answer, has_session = said_to(scene.gateway, client_of(signed()))
    assert answer == b"\x01" + len(PRIVATE).to_bytes(2, "little") + PRIVATE + bytes(2)
    assert not has_session
    heard = heard_by_imposter(tmp_path, listen_as(gateway_of(signed())))
    assert heard is not None
    assert heard.startswith(b"\x04echo")


def test_an_older_tls_is_refused(scene: Relayed) -> None:
    context = client_of(signed())
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert said_to(scene.gateway, context) == (b"", False)
    assert scene.received == []


def test_a_key_is_in_no_file_and_comes_with_its_own_certificate() -> None:
    one, other = NodeKey(), NodeKey()
    with pytest.raises(ElasticConfigError, match="no certificate for this node's key"):
        one.identity(AUTHORITY.sign(other.public, HOST), AUTHORITY.certificate)
    with pytest.raises(ElasticConfigError, match="no certificate for this node's key"):
        one.identity("", AUTHORITY.certificate)
    one.identity(AUTHORITY.sign(one.public, HOST), AUTHORITY.certificate)
    open_files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [name for name in open_files if "memfd:key" in name]
    assert "PRIVATE" not in one.public
    for wrong in ("", "no key", AUTHORITY.certificate):
        with pytest.raises(ElasticConfigError, match=r"192\.0\.2\.1 sent"):
            AUTHORITY.sign(wrong, "192.0.2.1")


class AlwaysReady:
    """A loop's sockets, and a stream, where nothing is ever waited for; 100 times."""

    def __init__(self) -> None:
        self.to_send, self.left = memoryview(bytearray(8)), 100

    async def more(self, *_: object) -> int:
        self.left -= 1
        return int(self.left > 0)

    async def done(self, *_: object) -> None:
        """At once."""

    sock_recv_into = receive_frame = more
    sock_sendall = send_frame = done


@pytest.mark.parametrize("carry", [tunnel._carry_out, tunnel._carry_in])
def test_bulk_leaves_others_their_turn(carry: Callable[..., Any]) -> None:
    """One thread carries all connections; encrypting, it may find no moment to wait in."""

    async def beside() -> int:
        ready = AlwaysReady()
        near, far = socket.socketpair()
        with near, far:
            task = asyncio.create_task(carry(ready, *two_ends(carry, near, ready)))
            turns = 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
        return turns

    assert asyncio.run(beside()) > 50


def two_ends(carry: object, sock: object, stream: object) -> tuple[object, object]:
    return (sock, stream) if carry is tunnel._carry_out else (stream, sock)
