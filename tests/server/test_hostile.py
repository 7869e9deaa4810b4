"""Everything hostile we know of, sent to a live server: refused by name, and the next is answered.

After each row the server answers a correct request with the text that it must.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests

from tests.server.exchange import ANSWER_TIMEOUT_S, check_answers, check_row, receive
from tests.server.hostile_inputs import Row, request, rows
from tests.support.guarded import ADMIN_KEY, ASKED, BODY_TIMEOUT_S, Guarded

pytestmark = pytest.mark.server

NUM_SLOW = 20
LOADED = ["caesar", "reverse"]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_a_hostile_input(row: Row, guarded: Guarded) -> None:
    check_row(row, guarded)


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
        received = receive(connection, time.monotonic() + ANSWER_TIMEOUT_S)
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
    ports = sorted({port for _, port in listening})
    with ThreadPoolExecutor(len(ports)) as pool:
        speaks = list(pool.map(_speaks_http, ports))
    http = [port for port, does in zip(ports, speaks, strict=True) if does]
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
