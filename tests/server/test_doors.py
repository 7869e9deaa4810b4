"""Ways in beside a request's fields: addresses to fetch from, a second request within a first one,
websockets, and a keys file that is changed while clients use it.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft.access.keys import CHECK_EVERY_S
from sgl_esft.http.classes import TABLE, RouteClass
from tests.server.exchange import ANSWER_TIMEOUT_S, check_answers, exchange, receive
from tests.server.hostile_inputs import request
from tests.support.guarded import ADMIN_KEY, ANSWER, ASKED, CLIENT_KEY, Guarded
from tests.support.request_fuzz.cases import BODIES
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

KEYS_CHANGE_S = CHECK_EVERY_S + 2.0  # a busy machine
SECOND_KEY = "second-key-0123456789"
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
# Of SGLang 0.5.23's routes: what would be fetched, were it taken.
ADDRESS_FIELDS = (
    *("image_data", "audio_data", "video_data", "images", "bootstrap_host", "encoder_urls"),
    *("url", "image_url", "file", "model_path", "lora_path"),
)
REFUSED = re.compile("is not known here|not for clients to set|the model takes text only|must be ")
MAY_BE_ADAPTERS = ("lora_path",)  # a name that no adapter has, whatever it looks like


class Listener:
    """A port on loopback that counts who connects to it."""

    def __init__(self, server: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        self.num_connections = 0
        self._server = server

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.num_connections += 1
            connection.close()


@contextmanager
def listening() -> Iterator[Listener]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Listener(server)
        thread = threading.Thread(target=listener.run)
        thread.start()
        try:
            yield listener
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _bodies_with(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for route, body in BODIES.items():
        for field in ADDRESS_FIELDS:
            for value in (url, [url], {"url": url}):
                yield route, {**body, field: value}
        if route == "/v1/embeddings":
            for kind in ("image", "video"):
                yield route, {**body, "input": [{"text": "x", kind: url}]}
        messages = [name for name in ("messages", "input", "system") if name in body]
        more = {"/v1/messages": ["system"], "/tokenize": ["messages"], "/v1/tokenize": ["messages"]}
        for name in [*messages, *more.get(route, ())]:
            for part in _parts(url):
                for message in _messages(part):
                    yield route, {**body, name: [message]}


def _parts(url: str) -> Iterator[dict[str, Any]]:
    """As the classes of SGLang's routes have them: others are refused by their fields' names."""
    for kind in ("image_url", "video_url", "audio_url"):
        yield {"type": kind, kind: {"url": url}}
    yield {"type": "input_image", "image_url": url}
    yield {"type": "input_file", "file_url": url}
    for kind in ("image", "document"):
        yield {"type": kind, "source": {"type": "url", "url": url}}


def _messages(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where a part may stand: in a message, in what a tool has answered, by itself."""
    yield {"role": "user", "content": [part]}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [part]}
    yield {"role": "user", "content": [result]}
    yield {"type": "function_call_output", "call_id": "x", "output": [part]}
    yield part


def test_no_address_of_a_client_is_fetched_from(guarded: Guarded) -> None:
    """The demo's model would not fetch: that nothing reaches it is what a refusal shows."""
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    with listening() as listener, requests.Session() as session:
        for route, body in _bodies_with(listener.url):
            url = guarded.server.url + route.replace("{response_id}", "none")
            answer = session.post(url, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S)
            assert answer.status_code < 500, (route, body, answer.text)
            if body.keys().isdisjoint(MAY_BE_ADAPTERS):
                assert answer.status_code == 400, (route, body, answer.text)
                assert REFUSED.search(answer.text), (route, body, answer.text)
        assert listener.num_connections == 0
        with socket.create_connection(("127.0.0.1", int(listener.url.split(":")[2][:-6]))):
            wait_until(lambda: listener.num_connections == 1)  # it would have been seen
    check_answers(guarded)


@pytest.mark.parametrize(
    "framing",
    [
        {"Transfer-Encoding": "chunked", "Content-Length": "5"},
        {"Transfer-Encoding": "chunked\x0b", "Content-Length": "5"},
        {"Transfer-Encoding ": "chunked", "Content-Length": "5"},
        {"Transfer-Encoding": "identity", "Content-Length": "5"},
        {"Content-Length": "5, 60"},
    ],
    ids=lambda framing: ", ".join(f"{name}: {value!r}" for name, value in framing.items()),
)
def test_no_second_request_within_a_first_one(framing: dict[str, str], guarded: Guarded) -> None:
    """What follows an ambiguous body is not answered as a request that somebody else sent."""
    inner = request("GET", "/v1/models", None, {"Connection": "keep-alive"}, key=CLIENT_KEY)
    fields = {**framing, "Connection": "keep-alive"}
    sent = request("POST", "/generate", b"0\r\n\r\n" + inner, fields)
    with socket.create_connection(("127.0.0.1", guarded.server.port), ANSWER_TIMEOUT_S) as peer:
        peer.sendall(sent)
        received = receive(peer, time.monotonic() + ANSWER_TIMEOUT_S)
        peer.settimeout(1.0)
        try:
            while more := peer.recv(1 << 16):
                received += more
        except (TimeoutError, ConnectionError):
            pass
    assert received.count(b"HTTP/1.1 ") <= 1, received[:2000]
    assert b'"object":"list"' not in received.replace(b" ", b"")
    check_answers(guarded)


def test_no_websocket_is_opened(guarded: Guarded) -> None:
    """With any key, on any path, also where SGLang has one: the handshake is passed over.

    A web server without a library for websockets opens none whatever the gate says; what the gate
    says is in tests/fast/access/test_gate.py.
    """
    paths = [path for path, each in TABLE.items() if each.route_class is not RouteClass.PUBLIC]
    for path, key in itertools.product(
        [*sorted(paths)[::6], "/v1/realtime"], (CLIENT_KEY, ADMIN_KEY)
    ):
        answer = exchange(guarded.server.port, request("GET", path, None, HANDSHAKE, key=key))
        assert answer.status not in (101, 500), (path, answer.head)
    check_answers(guarded)


def test_a_keys_file_that_changes_while_it_is_used(guarded: Guarded) -> None:
    """Broken, without keys, gone, open to all and back: who has a key all along is always served,
    and who has none never is.
    """
    path = guarded.root.parent / "keys.json"
    original = path.read_bytes()
    refused: list[str] = []
    over = threading.Event()

    def ask_on() -> None:
        headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
        while not over.is_set():
            answer = requests.post(
                f"{guarded.server.url}/generate", json=ASKED, headers=headers, timeout=30
            )
            if answer.status_code != 200 or answer.json()["text"] != ANSWER:
                refused.append(answer.text)

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        for content, mode in _disturbed(original):
            _put(path, content, mode)
            _check_closed(guarded)
        path.write_bytes(_with_second(original))  # in place
        wait_until(lambda: _status(guarded, SECOND_KEY) == 200, KEYS_CHANGE_S)
        _put(path, original)
        wait_until(lambda: _status(guarded, SECOND_KEY) == 401, KEYS_CHANGE_S)
    finally:
        _put(path, original)
        over.set()
        asking.join()
    assert refused == []
    check_answers(guarded)


def _disturbed(original: bytes) -> Iterator[tuple[bytes | None, int]]:
    """Contents of a keys file, None for no file, and its mode."""
    yield original[: len(original) // 2], 0o600
    yield b'{"keys": []}', 0o600
    yield None, 0
    yield _with_second(original), 0o644
    yield original, 0o600


def _put(path: Path, content: bytes | None, mode: int = 0o600) -> None:
    """Replace the file, as an editor does."""
    if content is None:
        path.unlink()
        return
    new = path.with_name("keys.new")
    new.write_bytes(content)
    new.chmod(mode)
    new.replace(path)


def _check_closed(guarded: Guarded) -> None:
    """Until the file has been looked at: who has none of the first keys is not let in."""
    until = time.monotonic() + CHECK_EVERY_S + 0.3
    while time.monotonic() < until:
        assert _status(guarded, SECOND_KEY) == 401
        time.sleep(0.05)


def _with_second(content: bytes) -> bytes:
    keys = json.loads(content)["keys"]
    return json.dumps({"keys": [*keys, {"name": "second", "key": SECOND_KEY}]}).encode()


def _status(guarded: Guarded, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.get(f"{guarded.server.url}/v1/models", headers=headers, timeout=30).status_code
