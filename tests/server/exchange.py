"""Bytes to a live server, and its answer; the next correct request, and its answer.

bytes --[exchange]--> Answer;  [check_row] for a row of hostile_inputs.py;  [check_answers]
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from dataclasses import dataclass

import requests

from tests.server.hostile_inputs import CLOSED, Row
from tests.support.guarded import ADMIN_KEY, ANSWER, ASKED, CLIENT_KEY, Guarded

# A refusal takes milliseconds; two shared cores and a compiled grammar make some of it seconds.
ANSWER_TIMEOUT_S = 10.0


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
            received = receive(connection, time.monotonic() + timeout_s)
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


def receive(connection: socket.socket, deadline: float) -> bytes:
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


def check_row(row: Row, guarded: Guarded) -> None:
    """It is refused by name, nothing is told that should not be, and the next is answered."""
    answer = exchange(guarded.server.port, row.sent)
    assert answer.status in row.statuses, (row.name, answer.status, answer.body[:500])
    assert b"Traceback" not in answer.body
    assert b"x-evil" not in answer.head.lower()
    if ADMIN_KEY.encode() not in row.sent:  # an admin is told where adapters are
        assert str(guarded.root).encode() not in answer.body
    check_answers(guarded)
