"""Messages between processes: round trips, caps, deadlines, cut streams, descriptors, modes."""

import array
import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic import wire
from sgl_elastic.errors import ElasticConfigError, MemoryWorkerError, WireError
from sgl_elastic.wire import Channel
from tests.fast.elastic.memory_workers import count_fds, settle


class Ping(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    text: str = ""
    data: bytes = b""


class Pong(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True):
    number: int


PONG = msgspec.msgpack.encode(Pong(7))
DECODER: msgspec.msgpack.Decoder = msgspec.msgpack.Decoder(Ping | Pong)


def channel_of(sock, timeout_s=2.0):
    return Channel(sock, DECODER, peer="the peer", failure=MemoryWorkerError, timeout_s=timeout_s)


@contextlib.contextmanager
def connected(timeout_s=2.0):
    """A plain socket, and the channel at its other end."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(channel_of(right, timeout_s)) as channel, left:
        yield left, channel


@pytest.fixture
def raw():
    with connected(timeout_s=0.2) as found:
        yield found


@pytest.fixture
def pair():
    with connected() as (sock, channel), closing(channel_of(sock)) as other:
        yield other, channel


def header(magic=b"SGLE", version=1, num_fds=0, num_bytes=0):
    return struct.pack("<4sHHI", magic, version, num_fds, num_bytes)


@given(st.lists(st.builds(Ping, text=st.text(), data=st.binary(max_size=5000)), max_size=5))
def test_messages_arrive_whole_and_in_order(messages):
    with connected() as (sock, receiver):
        for message in messages:
            channel_of(sock).send(message)
        assert [receiver.receive()[0] for _ in messages] == messages


def test_a_large_message_goes_through_in_pieces(pair):
    message = Ping(data=os.urandom(5_000_000))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pair[0].send, message)
        assert pair[1].receive()[0] == message


def test_descriptors_arrive_are_closed_on_exec_and_are_taken_once(pair):
    fd = os.memfd_create("x")
    os.write(fd, b"hello")
    pair[0].send(Ping(), [fd, fd])
    os.close(fd)
    _, fds = pair[1].receive()
    with fds:
        assert len(fds) == 2
        os.close(fds.copy(1))
        taken = fds.take(1)
        for index in (1, 2, -1):
            with pytest.raises(WireError, match="no descriptor"):
                fds.take(index)
    assert os.pread(taken, 5, 0) == b"hello"
    assert not os.get_inheritable(taken)
    os.close(taken)


def test_descriptors_that_nobody_takes_are_closed(pair):
    before = settle(count_fds)
    with Path(os.devnull).open() as file:
        for _ in range(3):
            pair[0].send(Ping(), [file.fileno()] * wire.MAX_FDS)
            pair[1].receive()[1].close()
        pair[0].send(Ping(), [file.fileno()])
        pair[1].receive()  # dropped at once
        pair[0].send(Ping(), [file.fileno()])
    assert count_fds() <= before + 1  # the last one still lies in the socket
    pair[1].receive()
    assert count_fds() == before


def test_more_than_the_caps_is_refused_and_sends_nothing(pair):
    with pytest.raises(WireError, match="at most"):
        pair[0].send(Ping(data=bytes(wire.MAX_PAYLOAD_BYTES)))
    with pytest.raises(WireError, match="251 descriptors"):
        pair[0].send(Ping(), [0] * (wire.MAX_FDS + 1))
    pair[0].send(Pong(1))
    assert pair[1].receive()[0] == Pong(1)


def message(body):
    payload = msgspec.msgpack.encode(body)
    return header(num_bytes=len(payload)) + payload


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(magic=b"HTTP"), "not a message"),
        (header(version=2), "not a message"),
        (header(num_bytes=wire.MAX_PAYLOAD_BYTES + 1), "at most"),
        (header(num_fds=wire.MAX_FDS + 1), "at most"),
        (header(num_fds=1, num_bytes=1) + b"\xc0", "no known type"),
        (header(num_bytes=3) + b"\xff\xff\xff", "no known type"),
        (header(num_bytes=1) + b"\xc1", "no known type"),
        (header(), "no known type"),
        (header(num_fds=1, num_bytes=len(PONG)) + PONG, "1 descriptors, 0 came"),
        (message({"type": "Nothing"}), "no known type"),
        (message({"type": "Pong"}), "no known type"),
        (message({"type": "Pong", "number": "1"}), "no known type"),
        (message({"type": "Pong", "number": 1, "more": 2}), "no known type"),
        (message({"number": 1}), "no known type"),
        (message([1, 2]), "no known type"),
    ],
)
def test_what_our_side_would_not_write_is_a_wire_error_and_closes(raw, data, reason):
    sock, channel = raw
    sock.sendall(data)
    with pytest.raises(WireError, match=reason):
        channel.receive()
    assert channel.is_closed


def test_a_stream_that_is_cut_at_any_byte_is_named():
    data = message(Pong(7))
    for end in range(len(data)):
        with connected() as (sock, channel):
            sock.sendall(data[:end])
            sock.close()
            with pytest.raises(MemoryWorkerError, match="closed the connection"):
                channel.receive()
            assert channel.is_closed


def test_a_slow_peer_meets_the_deadline_although_it_keeps_sending(raw):
    sock, channel = raw
    stop = threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                sock.sendall(b"x")

    sock.sendall(header(num_bytes=100))
    threading.Thread(target=trickle, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(MemoryWorkerError, match=r"longer than 0\.2 s"):
        channel.receive()
    assert time.monotonic() - start < 1.0
    stop.set()


def test_a_peer_that_does_not_read_meets_the_deadline_and_one_that_is_gone_is_named(raw, pair):
    _, channel = raw
    with pytest.raises(MemoryWorkerError, match="took longer"):
        channel.send(Ping(data=bytes(20_000_000)), timeout_s=0.1)
    pair[1].close()
    for lost in (channel, pair[0]):
        with pytest.raises(MemoryWorkerError, match="lost"):
            lost.send(Ping())


RIGHTS = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))]


def test_descriptors_beside_the_payload_and_of_a_bad_message_are_closed(raw):
    sock, channel = raw
    before = settle(count_fds)
    sock.sendall(header(num_bytes=len(PONG)))
    sock.sendmsg([PONG], RIGHTS)
    assert channel.receive()[0] == Pong(7)
    assert count_fds() == before
    sock.sendmsg([header(num_fds=2, num_bytes=1) + b"\xc1"], RIGHTS)
    with pytest.raises(WireError):
        channel.receive()
    assert count_fds() == before - 1  # the channel's own socket is closed


def test_listen_makes_a_private_socket(tmp_path):
    path = tmp_path / "sockets" / "a.sock"
    with pytest.raises(MemoryWorkerError, match="nobody answers"):
        wire.connect(path, MemoryWorkerError, 1.0)
    with wire.listen(path) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with wire.connect(path, MemoryWorkerError, 1.0) as client:
            accepted, _ = server.accept()
            wire.check_peer(accepted)
            accepted.close()
            assert client.fileno() >= 0
        with pytest.raises(ElasticConfigError, match="cannot listen"):
            wire.listen(path)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o500])
def test_listen_refuses_an_open_directory(tmp_path, mode):
    directory = tmp_path / "sockets"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ElasticConfigError, match=f"mode {mode:04o}"):
        wire.listen(directory / "a.sock")


def test_a_path_too_long_is_refused_with_its_length(tmp_path):
    path = tmp_path / ("x" * 200)
    for call in (wire.listen, lambda p: wire.connect(p, MemoryWorkerError, 1.0)):
        with pytest.raises(ElasticConfigError, match="shorter"):
            call(path)


def test_another_users_process_is_refused(tmp_path, monkeypatch):
    # A process of another user cannot be started here; the kernel's answer is real, ours is moved.
    tmp_path.chmod(0o700)
    with wire.listen(tmp_path / "a.sock"):
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        before = settle(count_fds)
        with pytest.raises(WireError, match=f"runs as user {uid}"):
            wire.connect(tmp_path / "a.sock", MemoryWorkerError, 1.0)
        assert count_fds() == before
