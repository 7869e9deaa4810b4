"""The gate: who gets in, in which order it is decided, and what is passed on."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from sgl_esft.access.gate import PROBING, Gate, InnerKey, Policy
from sgl_esft.access.keys import KeyRing
from sgl_esft.fields import request_classes
from sgl_esft.fields.rules import BodyRules
from sgl_esft.http import classes, record
from sgl_esft.http.classes import TABLE, RouteClass, RouteTable
from sgl_esft.http.record import RequestRecord
from tests.fast.access.asgi import (
    ADMIN_KEY,
    CLIENT_KEY,
    RING,
    SLOW_KEY,
    TENANT_KEY,
    WOVEN_KEY,
    Inner,
    answered,
    bearer,
    call,
    gate,
    gone,
    raw_call,
    scope_of,
    unread,
)

TEXT = {"text": "x", "sampling_params": {"max_new_tokens": 100}}
HOST = ("host", "127.0.0.1:30000")
OPEN = Policy()  # without keys


@pytest.fixture
def inner() -> Inner:
    return Inner()


def gate_before(
    status: int, *parts: bytes, kind: bytes = b"application/json", is_whole: bool = True
) -> Gate:
    """A gate whose application gives this answer, without reading the request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, 1):
            more = number < len(parts) or not is_whole
            await send({"type": "http.response.body", "body": part, "more_body": more})

    behind = gate(Inner())
    behind._app = app
    return behind


CASES: list[tuple[str, str, str | None, Any, int, str | None]] = [
    # method, path, key, body, status, error
    ("GET", "/health", None, None, 200, None),
    ("GET", "/health", "wrong-key-0123456789", None, 200, None),
    ("GET", "/health_generate", None, None, 401, "NoKeyError"),
    ("GET", "/healthz2", CLIENT_KEY, None, 404, "UnknownRouteError"),
    ("DELETE", "/health", None, None, 405, "UnknownMethodError"),
    ("POST", "/generate", None, TEXT, 401, "NoKeyError"),
    ("POST", "/generate", "wrong-key-0123456789", TEXT, 401, "NoKeyError"),
    ("POST", "/generate", CLIENT_KEY, TEXT, 200, None),
    ("POST", "/generate", ADMIN_KEY, TEXT, 200, None),
    ("GET", "/generate", CLIENT_KEY, None, 405, "UnknownMethodError"),
    ("GET", "/v1/models", CLIENT_KEY, None, 200, None),
    ("GET", "/metrics", None, None, 401, "NoKeyError"),
    ("POST", "/flush_cache", CLIENT_KEY, None, 403, "NotAllowedError"),
    ("POST", "/flush_cache", ADMIN_KEY, None, 200, None),
    ("POST", "/v1/scale", CLIENT_KEY, {"dp_size": 2}, 403, "NotAllowedError"),
    ("POST", "/v1/scale", ADMIN_KEY, {"dp_size": 2}, 200, None),
    ("POST", "/load_lora_adapter", CLIENT_KEY, {}, 403, "NotAllowedError"),
    ("POST", "/update_weights_from_tensor", ADMIN_KEY, {}, 404, "UnknownRouteError"),
    ("POST", "/start_profile", None, {}, 404, "UnknownRouteError"),
    ("POST", "/generate", CLIENT_KEY, b"{", 400, "BadBodyError"),
    ("POST", "/generate", CLIENT_KEY, {**TEXT, "n": 129}, 400, "BadBodyError"),
    ("POST", "/generate", CLIENT_KEY, {**TEXT, "custom_logit_processor": "x"}, 400, "BadBodyError"),
    ("POST", "/generate", ADMIN_KEY, {"input_ids": [300]}, 400, "BadBodyError"),
    ("POST", "/v1/scale", ADMIN_KEY, {"dp_size": 1 << 70}, 400, "BadBodyError"),
    ("POST", "/v1/scale", ADMIN_KEY, {"n": 129}, 200, None),
    ("POST", "/generate", CLIENT_KEY, b" " * (2 << 20) + b"{}", 413, "BodyTooLargeError"),
    ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "math"}, 200, None),
    ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "law"}, 403, "NotAllowedError"),
    ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "nobody"}, 403, "NotAllowedError"),
    ("POST", "/generate", TENANT_KEY, TEXT, 403, "NotAllowedError"),
    ("POST", "/generate", TENANT_KEY, None, 403, "NotAllowedError"),
    ("POST", "/generate", TENANT_KEY, [], 400, "BadBodyError"),
    ("POST", "/v1/responses", TENANT_KEY, {"input": "x"}, 403, "NotAllowedError"),
    ("POST", "/v1/responses", TENANT_KEY, {"adapter": "law"}, 403, "NotAllowedError"),
    ("POST", "/v1/responses", TENANT_KEY, {"adapter": "nobody"}, 403, "NotAllowedError"),
    ("POST", "/tokenize", TENANT_KEY, {"prompt": "x"}, 200, None),
    ("POST", "/tokenize", TENANT_KEY, {"adapter": "math"}, 400, "ConfigError"),
    ("POST", "/tokenize", TENANT_KEY, {"adapter": "law"}, 403, "NotAllowedError"),
    ("POST", "/tokenize", TENANT_KEY, {"adapter": "nobody"}, 403, "NotAllowedError"),
    ("GET", "/v1/models", TENANT_KEY, None, 200, None),
]


@pytest.mark.parametrize(("method", "path", "key", "body", "status", "error"), CASES)
def test_with_keys(
    method: str, path: str, key: str | None, body: Any, status: int, error: str | None, inner: Inner
) -> None:
    answer = call(gate(inner), method, path, bearer(key) if key else {}, body)
    assert answer.status == status, answer.body
    assert bool(inner.seen) == (status == 200)
    if error is not None:
        assert answer.error == error
        document = json.loads(answer.body)["error"]
        assert set(document) == {"message", "type", "param", "code"}
        assert document["code"] == status
        assert (key or CLIENT_KEY) not in document["message"]
        assert "law, math" not in document["message"]


@pytest.mark.parametrize("path", sorted(TABLE))
def test_every_route_by_class(path: str) -> None:
    declared = TABLE[path]
    expected = {
        RouteClass.PUBLIC: (200, 200, 200),
        RouteClass.CLIENT: (401, 200, 200),
        RouteClass.ADMIN: (401, 403, 200),
        RouteClass.OFF: (404, 404, 404),
    }[declared.route_class]
    for method in declared.methods - {"HEAD", "WEBSOCKET"}:
        if path in ("/encode", "/classify", "/v1/completions", "/v1/score"):
            continue  # the small server hangs there
        asked = path.replace("{", "").replace("}", "").replace(":path", "")
        for key, status in zip((None, CLIENT_KEY, ADMIN_KEY), expected, strict=True):
            headers = bearer(key) if key else {}
            is_read = path in classes._READ_BY_CLIENTS and method == "GET" and key
            wanted = 200 if is_read else status
            assert call(gate(Inner()), method, asked, headers).status == wanted
        opened = call(gate(Inner(), OPEN), method, asked).status
        assert opened == (404 if declared.route_class is RouteClass.OFF else 200)


# Which texts are worked on without the model, which a key for no base may ask for too.
OF_TEXTS = {
    *("/detokenize", "/tokenize", "/v1/detokenize", "/v1/tokenize"),
    *("/parse_function_call", "/separate_reasoning", "/v1/messages/count_tokens"),
}


@pytest.mark.parametrize("key", [TENANT_KEY, WOVEN_KEY])
@pytest.mark.parametrize("path", sorted(request_classes.route_classes()))
def test_the_base_model_is_not_for_a_key_of_adapters(path: str, key: str) -> None:
    """On no route that runs it, however little is asked for."""
    for body in ({}, {"adapter": None}, {"model": "base"}):
        answer = call(gate_before(200, b"{}"), "POST", path, bearer(key), body)
        assert answer.status == (200 if path in OF_TEXTS else 403), answer.body


def test_an_off_route_that_is_named_is_the_admins(inner: Inner) -> None:
    app = gate(inner, Policy(keys=RING, table=RouteTable(["/start_profile"])))
    assert call(app, "POST", "/start_profile", bearer(CLIENT_KEY)).status == 403
    assert call(app, "POST", "/start_profile", bearer(ADMIN_KEY)).status == 200


def test_client_keys_alone_leave_nobody_to_call_admin_routes(inner: Inner) -> None:
    ring = KeyRing(entry for entry in RING._entries if not entry.caller.is_admin)
    answer = call(gate(inner, Policy(keys=ring)), "POST", "/flush_cache", bearer(CLIENT_KEY))
    assert answer.status == 403
    assert b"the server has none" in answer.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", f"Bearer {CLIENT_KEY}")], 200),
        ([("authorization", f"bearer  {CLIENT_KEY}")], 200),
        ([("x-api-key", CLIENT_KEY)], 200),
        ([("x-api-key", CLIENT_KEY), ("authorization", f"Bearer {CLIENT_KEY}")], 200),
        ([("authorization", CLIENT_KEY)], 401),
        ([("authorization", f"Basic {CLIENT_KEY}")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", "Bearer ")], 401),
        ([("authorization", f"Bearer {CLIENT_KEY},{ADMIN_KEY}")], 401),
        ([("x-api-key", ADMIN_KEY), ("authorization", f"Bearer {CLIENT_KEY}")], 401),
        ([("authorization", f"Bearer {CLIENT_KEY}"), ("authorization", "Bearer x")], 401),
        ([("authorization", "Bearer \xff\xfe")], 401),
        ([("cookie", f"key={CLIENT_KEY}")], 401),
    ],
)
def test_how_a_key_is_sent(headers: list[tuple[str, str]], status: int, inner: Inner) -> None:
    answer = answered(gate(inner), "GET", "/v1/models", [HOST, *headers])
    assert answer.status == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_no_host_at_all(inner: Inner) -> None:
    """It could be any; where keys are asked for it decides nothing, and old probes send none."""
    answer = answered(gate(inner, OPEN), "GET", "/v1/models", [])
    assert (answer.status, answer.error) == (400, "BadBodyError")
    headers = [("authorization", f"Bearer {CLIENT_KEY}")]
    answer = answered(gate(inner), "GET", "/v1/models", headers)
    assert answer.status == 200


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "a b", "", "x@y", "x:123456", "[::1"])
def test_the_host_header_does_not_choose_the_route(host: str, inner: Inner) -> None:
    headers = [("host", host), ("authorization", f"Bearer {CLIENT_KEY}")]
    answer = answered(gate(inner), "POST", "/flush_cache", headers)
    assert answer.status == 400
    assert inner.seen == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:30000", 200),
        ("127.0.0.1:1", 200),
        ("127.8.9.1", 200),
        ("[::1]:30000", 200),
        ("rebound.example:30000", 403),
        ("192.168.0.7", 403),
        ("localhost.example", 403),
    ],
)
def test_without_keys_only_this_machines_names(host: str, status: int, inner: Inner) -> None:
    answer = answered(gate(inner, OPEN), "GET", "/v1/models", [("host", host)])
    assert answer.status == status


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("http://localhost:3000", (), 200),
        ("http://127.0.0.1:30000", (), 200),
        ("https://page.example", (), 403),
        ("https://page.example", ("https://page.example",), 200),
        ("https://other.example", ("https://page.example",), 403),
        ("https://other.example", ("*",), 200),
        ("null", (), 403),
        ("file://", (), 403),
        ("http://[::1", (), 403),
        ("http://localhost@page.example", (), 403),
    ],
)
def test_pages_of_other_origins(
    origin: str, allowed: tuple[str, ...], status: int, inner: Inner
) -> None:
    app = gate(inner, Policy(allowed_origins=allowed))
    assert call(app, "POST", "/flush_cache", {"origin": origin}).status == status
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    answer = call(app, "OPTIONS", "/flush_cache", preflight)
    # The small server has no CORSMiddleware; what counts is whether it was asked.
    assert (answer.status == 403) == (status == 403)


@pytest.mark.parametrize(
    ("site", "path", "status"),
    [
        ("cross-site", "/flush_cache", 403),
        ("cross-site", "/v1/models", 403),
        ("cross-site", "/dashboard", 200),  # a link to the page may be followed
        ("cross-site", "/readyz", 200),
        ("same-site", "/flush_cache", 200),  # a page of this machine, at another port
        ("same-origin", "/flush_cache", 200),
        ("none", "/flush_cache", 200),  # typed by the user
    ],
)
def test_images_and_links_of_other_pages(site: str, path: str, status: int, inner: Inner) -> None:
    """A browser sends no Origin with them, and without keys everyone is an admin."""
    page = {"sec-fetch-site": site}
    assert call(gate(inner, OPEN), "GET", path, page).status == status
    allowing = Policy(allowed_origins=("*",))
    assert call(gate(inner, allowing), "GET", path, page).status == 200
    local = {**page, "origin": "http://localhost:3000"}
    assert call(gate(inner, OPEN), "GET", path, local).status == 200
    assert call(gate(inner), "GET", "/v1/models", {**page, **bearer(CLIENT_KEY)}).status == 200


def test_a_page_of_the_server_itself_is_allowed(inner: Inner) -> None:
    headers = [("host", "gpu:1"), ("origin", "http://gpu:1"), ("x-api-key", CLIENT_KEY)]
    answer = answered(gate(inner), "GET", "/v1/models", headers)
    assert answer.status == 200


def test_options_without_a_page_is_a_method_that_is_not_there(inner: Inner) -> None:
    assert call(gate(inner, OPEN), "OPTIONS", "/generate").status == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HOST, *((f"x-{n}", "y") for n in range(99))], 200),
        ([HOST, *((f"x-{n}", "y") for n in range(100))], 431),
        ([HOST, ("x", "y" * (16384 - sum(map(len, HOST)) - 1))], 200),
        ([HOST, ("x", "y" * (16384 - sum(map(len, HOST))))], 431),
    ],
)
def test_headers_are_bounded(headers: list[tuple[str, str]], status: int, inner: Inner) -> None:
    answer = answered(gate(inner, OPEN), "GET", "/v1/models", headers)
    assert answer.status == status
    assert status == 200 or answer.error == "HeadersTooLargeError"


def test_the_root_path_is_not_part_of_the_route(inner: Inner) -> None:
    app = gate(inner)
    for path, status in (("/api/v1/flush_cache", 403), ("/api/v1/health", 200), ("/health", 200)):
        answer = call(app, "GET", path, bearer(CLIENT_KEY), root_path="/api/v1")
        assert answer.status == status, path


def test_a_body_is_passed_on_as_it_came(inner: Inner) -> None:
    raw = b'{ "text" : "\xc3\xa4" }'
    headers = [HOST, ("authorization", f"Bearer {CLIENT_KEY}")]
    chunks = (raw[:4], b"", raw[4:10], raw[10:])
    answer = answered(gate(inner), "POST", "/generate", headers, chunks)
    assert answer.status == 200
    assert inner.bodies == [raw]


def test_a_body_too_large_is_refused_as_soon_as_that_is_known(inner: Inner) -> None:
    rules = BodyRules(max_bytes=10)
    app = gate(inner, Policy(rules=rules))
    said = call(app, "POST", "/generate", {"content-length": "11"}, b"")
    # Chunks of an unfinished body: the gate does not wait for the rest.
    sent = answered(app, "POST", "/generate", [HOST], (b"x" * 6, b"x" * 6, b""))
    for answer in (said, sent):
        assert (answer.status, answer.error) == (413, "BodyTooLargeError")
        assert answer.headers["connection"] == "close"


def test_a_compressed_or_a_slow_body_is_refused(inner: Inner) -> None:
    answer = call(gate(inner, OPEN), "POST", "/generate", {"content-encoding": "gzip"}, TEXT)
    assert answer.status == 400
    assert inner.seen == []
    app = gate(inner, Policy(body_timeout_s=0.05))
    answer = answered(app, "POST", "/generate", [HOST], ())
    assert (answer.status, answer.error) == (408, "SlowBodyError")


def test_a_client_that_leaves_while_it_sends_costs_nothing(inner: Inner) -> None:
    app = gate(inner)
    headers = [HOST, ("x-api-key", SLOW_KEY)]
    assert asyncio.run(raw_call(app, "POST", "/generate", headers, (), gone)) is None
    assert inner.seen == []
    assert app._limits.sequences("slow") == 0


@pytest.mark.parametrize(
    ("key", "method", "path", "status"),
    [
        ("wrong-key-0123456789", "POST", "/generate", 401),
        (CLIENT_KEY, "POST", "/v1/scale", 403),
        (ADMIN_KEY, "POST", "/start_profile", 404),
        (None, "GET", "/health", 200),
    ],
)
def test_a_body_of_nobody_is_not_read(key: str | None, method: str, path: str, status: int) -> None:
    """Without a right to the route nothing is received, nor for a route that takes no body."""

    behind = gate_before(200, b"")
    headers = [HOST, *([("x-api-key", key)] if key else [])]
    answer = answered(behind, method, path, headers, (), unread)
    assert answer.status == status


def test_tokens_of_a_minute(inner: Inner) -> None:
    now = [0.0]
    app = gate(inner, clock=lambda: now[0])
    ids = {"input_ids": [1], "sampling_params": {"max_new_tokens": 599}}
    for _ in range(3):  # each reserves 600, and uses 10
        answer = call(app, "POST", "/generate", bearer(SLOW_KEY), ids)
        now[0] += 1
    assert answer.status == 200
    now[0] -= 1
    answer = call(app, "POST", "/generate", bearer(SLOW_KEY), ids)
    assert (answer.status, answer.error) == (429, "KeyLimitError")
    assert answer.headers["retry-after"] == "1"
    assert len(inner.seen) == 3
    assert call(app, "POST", "/generate", bearer(CLIENT_KEY), ids).status == 200


def test_sequences_of_a_key(inner: Inner) -> None:
    app = gate(inner)
    prompts = {"text": ["x"] * 3, "sampling_params": {"max_new_tokens": 1}}
    answer = call(app, "POST", "/generate", bearer(SLOW_KEY), prompts)
    assert (answer.status, answer.error) == (400, "BadBodyError")

    async def two_and_a_third() -> list[int]:
        headers = [HOST, ("x-api-key", SLOW_KEY)]
        body = (b'{"prompt": [1], "max_tokens": 1}',)
        streams = [
            asyncio.create_task(raw_call(app, "POST", "/v1/completions", headers, body))
            for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        third = await raw_call(app, "POST", "/v1/completions", headers, body)
        inner.go_on.set()
        return [each.status for each in (third, *await asyncio.gather(*streams)) if each]

    assert asyncio.run(two_and_a_third()) == [429, 200, 200]
    assert app._limits.sequences("slow") == 0


async def leaving(app: Any, path: str, body: bytes) -> None:
    """A client of the slow key that sends a request and leaves."""
    await raw_call(app, "POST", path, [HOST, ("x-api-key", SLOW_KEY)], (body,), gone)


def level(app: Any) -> float:
    """Tokens that the slow key has left of its 600 a minute."""
    return float(app._limits._used["slow"].bucket.level)


def test_a_client_that_leaves_pays_what_it_reserved(inner: Inner) -> None:
    app = gate(inner)
    asyncio.run(leaving(app, "/v1/score", b'{"items": [[1]]}'))
    left = 600 - 1 - 128  # it does not say how many it may have
    assert level(app) == left
    assert call(app, "POST", "/generate", bearer(SLOW_KEY), {"n": "x"}).status == 400
    assert level(app) == left  # a request that was refused was not worked for


@pytest.mark.parametrize(("status", "left"), [(400, 600), (404, 600), (503, 600), (500, 500)])
def test_an_answer_without_work_is_not_charged(status: int, left: int) -> None:
    behind = gate_before(status, b"{}")
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 99}}
    assert call(behind, "POST", "/generate", bearer(SLOW_KEY), body).status == status
    assert level(behind) == left


def test_a_stream_that_says_nothing_pays_for_its_events() -> None:
    events = [b"data: {}\n\n"] * 300 + [b"data: [DONE]\n\n"]
    behind = gate_before(200, *events, kind=b"text/event-stream")
    asyncio.run(leaving(behind, "/v1/chat/completions", b'{"input_ids": [1, 2]}'))
    assert level(behind) == 600 - 2 - 301  # 2 + 128 were reserved


def test_a_stream_without_an_end_pays_for_its_events_whatever_it_said_before() -> None:
    said = b'data: {"usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n'
    events = [said, *[b"data: {}\n\n"] * 300]
    behind = gate_before(200, *events, kind=b"text/event-stream", is_whole=False)
    asyncio.run(leaving(behind, "/v1/chat/completions", b'{"input_ids": [1, 2]}'))
    assert level(behind) == 600 - 2 - 301


def test_probes_of_the_model_do_not_use_up_the_other_probes(inner: Inner) -> None:
    app = gate(inner)
    tickets = [app._limits.enter(PROBING) for _ in range(64)]
    assert call(app, "GET", "/health").status == 429
    assert [call(app, "GET", path).status for path in ("/healthz", "/readyz", "/")] == [200] * 3
    tickets[0].leave()
    assert call(app, "GET", "/health").status == 200


@pytest.mark.anyio
async def test_events_pass_as_they_come(inner: Inner) -> None:
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = scope_of("POST", "/v1/completions", [HOST, ("x-api-key", SLOW_KEY)])
    task = asyncio.create_task(gate(inner)(scope, receive, send))
    await asyncio.sleep(0.05)
    assert [m.get("body") for m in sent[1:]] == [b"data: 1\n\n"]
    inner.go_on.set()
    await task
    assert b"".join(m["body"] for m in sent[1:]) == b"data: 1\n\ndata: 2\n\n"


def test_sglang_gets_the_inner_key_only(inner: Inner) -> None:
    inner_key = InnerKey()
    app = gate(inner, inner_key=inner_key)
    headers = {"x-api-key": CLIENT_KEY, "x-other": "kept"}
    assert call(app, "POST", "/generate", headers, TEXT).status == 200
    assert inner.headers[0]["authorization"] == f"Bearer {inner_key.value}"
    assert "x-api-key" not in inner.headers[0]
    assert inner.headers[0]["x-other"] == "kept"


def test_the_inner_key_opens_until_the_server_has_started(inner: Inner) -> None:
    inner_key = InnerKey()
    app = gate(inner, inner_key=inner_key)
    headers = bearer(inner_key.value)
    assert call(app, "POST", "/freeze_gc", headers).status == 200
    assert call(app, "POST", "/start_profile", headers).status == 404
    inner_key.close()
    assert call(app, "POST", "/freeze_gc", headers).status == 401
    assert inner_key.value not in repr(inner_key)


def websocket_call(app: Any, path: str, headers: list[tuple[str, str]]) -> list[str]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {**scope_of("GET", path, headers), "type": "websocket", "subprotocols": []}
    asyncio.run(app(scope, receive, send))
    return [message["type"] for message in sent]


def test_no_path_but_realtime_takes_a_websocket(inner: Inner) -> None:
    """Whoever asks, also where an admin has turned on all that is off."""
    app = gate(inner, Policy(keys=RING, table=RouteTable(TABLE)))
    for path, key in itertools.product(TABLE, (CLIENT_KEY, ADMIN_KEY)):
        if path != "/v1/realtime":
            asked = websocket_call(app, path, [HOST, ("x-api-key", key)])
            assert asked == ["websocket.close"], (path, key)
    assert inner.seen == []


def test_websockets_go_by_the_table_too(inner: Inner) -> None:
    key = [HOST, ("x-api-key", ADMIN_KEY)]
    assert websocket_call(gate(inner), "/v1/realtime", key) == ["websocket.close"]
    assert websocket_call(gate(inner), "/other", key) == ["websocket.close"]
    assert inner.seen == []
    app = gate(inner, Policy(keys=RING, table=RouteTable(["/v1/realtime"])))
    assert websocket_call(app, "/v1/realtime", [HOST]) == ["websocket.close"]
    assert websocket_call(app, "/v1/realtime", key) == ["websocket.accept", "websocket.close"]


def test_lifespan_passes() -> None:
    app = gate(Inner(), OPEN)
    sent: list[str] = []
    waiting = ["lifespan.startup", "lifespan.shutdown"]

    async def receive() -> dict[str, Any]:
        return {"type": waiting.pop(0)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan", "app": None, "state": {}}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("path", "key", "name"),
    [
        ("/generate", CLIENT_KEY, "client"),
        ("/v1/memory", CLIENT_KEY, "client"),  # refused, and still known
        ("/v1/memory", ADMIN_KEY, "admin"),
        ("/generate", "a-key-that-nobody-has", None),
        ("/health", CLIENT_KEY, None),  # nobody asks for a key there
    ],
)
def test_the_log_knows_the_keys_name(path: str, key: str, name: str | None, inner: Inner) -> None:
    request = RequestRecord("id", 0.0)
    record.begin(request)
    method = "POST" if path == "/generate" else "GET"
    call(gate(inner), method, path, bearer(key), {} if method == "POST" else None)
    assert request.key_name == name
    assert key not in repr(request)


@pytest.mark.parametrize("status", [200, 413])
def test_a_text_is_charged_by_its_bytes_also_when_it_took_too_long(status: int) -> None:
    """SLOW_KEY has 600 tokens a minute: the first body takes all of them."""
    app = gate_before(status, b"{}")
    body = {"text": "x" * 2400, "tool_call_parser": "hunyuan", "tools": []}
    found = [call(app, "POST", "/parse_function_call", bearer(SLOW_KEY), body) for _ in range(2)]
    assert [answer.status for answer in found] == [status, 429]
