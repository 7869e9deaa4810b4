"""Tunnels between two folders that stand for two nodes: real sockets, real memory workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sgl_elastic import wire
from sgl_elastic.errors import (
    ElasticConfigError,
    MemoryWorkerError,
    NodeLostError,
    PeerCopyError,
    WireError,
)
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.nodes import tunnel
from sgl_elastic.nodes.certificates import own_identity
from sgl_elastic.nodes.tunnel import Tunnels
from tests.fast.elastic.memory_workers import (
    PAGE,
    comes_to,
    count_fds,
    digests,
    expected_digests,
    settle,
    shape_of_one_region,
    stopped,
)
from tests.fast.elastic.nodes.tunnel_ends import (
    AUTHORITY,
    HOST,
    Echoing,
    Pair,
    ask,
    echo_through,
    read_all,
    send_all,
)

W13, W2 = "experts.0.w13", "experts.0.w2"
SLOTS = {"trunk": [(0, 1)], W13: [(0, 2), (5, 3)], W2: [(7, 1), (1, 2)]}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path)


def test_slots_are_copied_by_bytes(pair: Pair) -> None:
    pair.fill(0, SLOTS)
    pair.copy(SLOTS)
    assert digests(pair.hmms[1], 1, SLOTS) == expected_digests(SLOTS)
    usage = pair.client(1).usage()
    assert usage.loaded_slots == {"trunk": 1, "expert": 8, "kv": 0}


def test_a_region_of_several_parts(tmp_path: Path) -> None:
    shape = shape_of_one_region(2500)  # about 10 MB: three parts, the last one short
    slots = {"trunk": [(0, 1)]}
    with ExitStack() as stack:
        pair = Pair(stack, tmp_path, budget_bytes=2600 * PAGE, shape=shape)
        pair.client(0).map_slots(slots)
        pair.client(0).mark_loaded(slots)
        pair.copy(slots)  # compares digests
        assert pair.client(1).digest("trunk", 0) == pair.client(0).digest("trunk", 0)


def test_what_is_not_there_is_not_copied(pair: Pair) -> None:
    pair.client(0).map_slots({W13: [(0, 2)]})
    with pytest.raises(PeerCopyError, match="no valid content"):
        pair.copy({W13: [(0, 2)]})
    with pytest.raises(PeerCopyError, match="no pages"):
        pair.copy({W13: [(4, 1)]})
    assert pair.client(1).usage().loaded_slots["expert"] == 0
    pair.fill(0, {W13: [(0, 2)]})
    pair.copy({W13: [(0, 2)]})  # the connection is in step again


def test_pages_do_not_come_through(pair: Pair) -> None:
    """Never by guessing: a copy that should have said `by_bytes` is an error."""
    pair.fill(0, {W13: [(0, 2)]})
    pair.client(1).map_slots({W13: [(0, 2)]})
    with pytest.raises(WireError, match="descriptors"):
        pair.client(1).copy_from(pair.path, {W13: [(0, 2)]})


def test_a_killed_tunnel_is_a_named_error_in_time(pair: Pair) -> None:
    pair.fill(0, SLOTS)
    with stopped(pair.client(0).info.pid):  # the copy waits
        threading.Timer(0.5, pair.ends[0].close).start()
        began = time.monotonic()
        with pytest.raises(PeerCopyError, match=r"closed the connection|is lost|nobody answers"):
            pair.copy(SLOTS)
        assert time.monotonic() - began < 3.0
    with pytest.raises(PeerCopyError):
        pair.copy(SLOTS)  # nothing leads there any more


def test_a_worker_that_hangs_or_dies_is_noticed_through_a_tunnel(pair: Pair) -> None:
    """Its sign of life is the end of a connection, which has to come through as such."""
    with DeviceClient(pair.path, 20.0) as client:
        with stopped(client.info.pid), pytest.raises(MemoryWorkerError, match="no sign of life"):
            client.usage()
        assert client.usage().used_pages == 0
        os.kill(client.info.pid, signal.SIGKILL)
        with pytest.raises(MemoryWorkerError):
            client.usage()


@pytest.fixture
def echoing(tmp_path: Path) -> Iterator[Echoing]:
    with ExitStack() as stack:
        yield echo_through(tmp_path, stack)


def test_bytes_and_ends_pass_unchanged(echoing: Echoing) -> None:
    data = os.urandom(5_000_000)
    before = settle(count_fds)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: ask(echoing[2], data) == data, range(4), timeout=20)
        assert list(answers) == [True] * 4
    assert comes_to(lambda: count_fds() <= before, True)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\xff" * 300])
def test_strangers_are_shown_out(echoing: Echoing, sent: bytes) -> None:
    with socket.create_connection(echoing[0].address, 10) as sock:
        send_all(sock, sent)
        answer = read_all(sock)
    assert len(answer) <= 7  # one alert of TLS, and nothing else
    assert ask(echoing[2], b"x") == b"x"


def test_who_says_nothing_is_shown_out_in_time(
    echoing: Echoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "HANDSHAKE_S", 0.2)
    with socket.create_connection(echoing[0].address, 10) as sock:
        assert sock.recv(100) == b""


def test_only_what_is_offered_can_be_reached(echoing: Echoing, tmp_path: Path) -> None:
    far, near, path = echoing
    near.open(tmp_path / "b" / "other", "../a/echo", far.address)
    assert ask(tmp_path / "b" / "other", b"x") == b""
    far.withdraw("echo")
    assert ask(path, b"x") == b""
    with pytest.raises(ElasticConfigError):
        far.offer("n" * 65, path)


def test_close_leaves_nothing_behind(tmp_path: Path) -> None:
    before, threads = settle(count_fds), threading.active_count()
    with ExitStack() as stack:
        far, near, path = echo_through(tmp_path, stack)
        near.open(tmp_path / "b" / "more", "echo", far.address)
        near.shut(tmp_path / "b" / "more")
        near.shut(tmp_path / "b" / "more")
        sock = stack.enter_context(wire.connect(path, MemoryWorkerError, 10.0))
        sock.sendall(b"in the middle")
        near.close()
        far.close()
        assert read_all(sock) == b""
    assert list((tmp_path / "b").iterdir()) == []
    assert comes_to(lambda: count_fds() <= before, True)
    assert comes_to(lambda: threading.active_count() <= threads + 1, True)


def test_many_threads_close_at_once(tmp_path: Path) -> None:
    """Each of them comes back when everything has ended, none with an error; then no more opens."""
    before, identity = settle(count_fds), own_identity(AUTHORITY, HOST)
    with ThreadPoolExecutor(4) as pool:
        for number in range(20):
            far = Tunnels(identity, HOST)
            far.open(tmp_path / f"{number}", "echo", far.address)
            together = threading.Barrier(4)
            closings = [pool.submit(close_with, far, together) for _ in range(4)]
            for closing_of_one in closings:
                closing_of_one.result(5.0)
    far.shut(tmp_path / "echo")
    with pytest.raises(NodeLostError, match="closed"):
        far.open(tmp_path / "echo", "echo", far.address)
    assert list(tmp_path.iterdir()) == []
    assert comes_to(lambda: count_fds() <= before, True)


def close_with(found: Tunnels, others: threading.Barrier) -> None:
    others.wait(5.0)
    found.close()
    assert found._loop.is_closed()
