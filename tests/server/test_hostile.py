"""Everything hostile we know of, sent to a live server: refused by name, and the next is answered.

After each row the server answers a correct request with the text that it must.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
import requests

from tests.guarded import ADMIN_KEY, ANSWER, ASKED, BODY_TIMEOUT_S, CLIENT_KEY, Guarded
from tests.server.hostile_inputs import CLOSED, Row, request, rows

pytestmark = pytest.mark.server

# A refusal takes milliseconds; two shared cores and a compiled grammar make some of it seconds.
ANSWER_TIMEOUT_S = 10.0
NUM_SLOW = 20
LOADED = ["caesar", "reverse"]


@dataclass(frozen=True)
class Answer:
    """The first answer on a connection."""

    status: int
    head: bytes
    body: bytes


def exchange(port: int, sent: bytes, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """One connection: all of it is sent, and the first answer is read."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        sender = threading.Thread(target=_send, args=(connection, sent))
        sender.start()
        try:
            received = _receive(connection, time.monotonic() + timeout_s)
        finally:
            connection.close()
            sender.join()
    head, _, body = received.partition(b"\r\n\r\n")
    if not received:
        return Answer(CLOSED, b"", b"")
    assert head.startswith(b"HTTP/1.1 "), received[:200]
    return Answer(int(head.split(b" ", 2)[1]), head, body)


def _send(connection: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has answered, and listens no more
        connection.sendall(sent)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    received = b""
    while not _is_whole(received):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            chunk = connection.recv(1 << 16)
        except ConnectionError:
            break
        if not chunk:
            break
        received += chunk
    return received


def _is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


def check_answers(guarded: Guarded) -> None:
    """The next correct request has its answer."""
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    url = f"{guarded.server.url}/generate"
    answer = requests.post(url, json=ASKED, headers=headers, timeout=ANSWER_TIMEOUT_S)
    assert (answer.status_code, answer.json().get("text")) == (200, ANSWER), answer.text


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_hostile_input(row: Row, guarded: Guarded) -> None:
    answer = exchange(guarded.server.port, row.sent)
    assert answer.status in row.statuses, answer.body[:500]
    assert b"Traceback" not in answer.body
    assert b"x-evil" not in answer.head.lower()
    if ADMIN_KEY.encode() not in row.sent:  # an admin is told where adapters are
        assert str(guarded.root).encode() not in answer.body
    check_answers(guarded)


def test_names_of_rows_differ() -> None:
    names = [row.name for row in rows()]
    assert sorted(names) == sorted(set(names))


def test_slow_bodies_end_and_keep_nobody_from_an_answer(guarded: Guarded) -> None:
    """Many connections that send a byte now and then: others are served, and these get a 408."""
    head = request("POST", "/generate", None, {"Content-Length": "1000"})
    started = time.monotonic()
    address = ("127.0.0.1", guarded.server.port)
    slow = [socket.create_connection(address, 30) for _ in range(NUM_SLOW)]
    for connection in slow:
        connection.sendall(head + b"{")
    check_answers(guarded)
    for connection in slow[::2]:  # the others send no more
        connection.sendall(b" ")
    for connection in slow:
        received = _receive(connection, time.monotonic() + ANSWER_TIMEOUT_S)
        assert received.startswith(b"HTTP/1.1 408 "), received[:200]
        assert b"SlowBodyError" in received
        connection.close()
    assert BODY_TIMEOUT_S <= time.monotonic() - started < BODY_TIMEOUT_S + ANSWER_TIMEOUT_S
    check_answers(guarded)


def test_clients_that_leave_hold_nothing(guarded: Guarded) -> None:
    """In the middle of the head, of the body, and of the answer."""
    whole = request("POST", "/generate", {**ASKED, "stream": True})
    for length in (10, len(whole) - 5, len(whole)):
        for _ in range(NUM_SLOW):
            with socket.create_connection(("127.0.0.1", guarded.server.port), 30) as connection:
                connection.sendall(whole[:length])
        check_answers(guarded)


def test_only_http_listens_and_on_this_machine_only(guarded: Guarded) -> None:
    """What else SGLang's processes listen on is on loopback too, or a Unix socket; but one."""
    process = psutil.Process(guarded.server.process.pid)
    family = [process, *process.children(recursive=True)]
    listening = {
        (each.laddr.ip, each.laddr.port)
        for member in family
        for each in member.net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN or each.type == socket.SOCK_DGRAM
    }
    assert ("127.0.0.1", guarded.server.port) in listening
    elsewhere = [port for ip, port in listening if ip not in ("127.0.0.1", "::1")]
    # torch's store, by which ranks find each other, takes every interface: SECURITY.md says so.
    assert len(elsewhere) <= 1, listening
    http = [port for port in sorted({port for _, port in listening}) if _speaks_http(port)]
    assert http == [guarded.server.port]


def _speaks_http(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 2) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except OSError:
        return False


def test_the_server_is_as_it_was(guarded: Guarded) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    models = requests.get(f"{guarded.server.url}/v1/models", headers=headers, timeout=30).json()
    assert sorted(model["id"] for model in models["data"] if model["parent"]) == LOADED
    assert guarded.server.process.poll() is None
