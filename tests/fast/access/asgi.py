"""A small server behind a gate, and requests to it as a web server would make them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from sgl_esft.access import keys
from sgl_esft.access.gate import Gate, InnerKey, Policy
from sgl_esft.access.keys import Caller, KeyRing
from sgl_esft.access.limits import KeyLimits
from sgl_esft.fields.rules import ModelBounds
from sgl_esft.http.adapter_names import KnownNames
from sgl_esft.http.answers import Message, Receive, Scope

CLIENT_KEY = "client-key-0123456789"
ADMIN_KEY = "admin-key-0123456789"
TENANT_KEY = "tenant-key-0123456789"
SLOW_KEY = "slow-key-01234567890"
WOVEN_KEY = "woven-key-0123456789"  # for every adapter, and not for the base
RING = KeyRing(
    [
        keys.entry_for(Caller("client"), CLIENT_KEY, "test"),
        keys.entry_for(Caller("admin", is_admin=True), ADMIN_KEY, "test"),
        keys.entry_for(
            Caller("tenant", adapters=frozenset({"math"}), base_model=False), TENANT_KEY, "test"
        ),
        keys.entry_for(Caller("woven", base_model=False), WOVEN_KEY, "test"),
        keys.entry_for(Caller("slow", max_concurrency=2, tokens_per_minute=600), SLOW_KEY, "test"),
    ]
)
BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
NAMES = KnownNames(frozenset({"math", "law"}), frozenset({"base", "/models/base"}))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Inner:
    """What is behind the gate, and what has reached it."""

    seen: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    was_aborted: bool = False

    async def answer(self, request: Request) -> Response:
        self.seen.append((request.method, request.url.path))
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.body())
        return JSONResponse({"usage": {"prompt_tokens": 1, "completion_tokens": 9}})

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await self.go_on.wait()
            yield b"data: 2\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def hang(self, request: Request) -> Response:
        """Polls for the client's leaving, as SGLang does."""
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.was_aborted = True
        return JSONResponse({})

    async def ignore(self, request: Request) -> Response:
        await asyncio.sleep(3600)
        return JSONResponse({})

    async def leave(self, request: Request) -> Response:
        """As SGLang: 400 to a client that has left while the model works for it."""
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        return JSONResponse({"error": {"message": "disconnected"}}, 400)

    async def websocket(self, socket: WebSocket) -> None:
        self.seen.append(("WEBSOCKET", socket.url.path))
        await socket.accept()
        await socket.close()

    def app(self) -> Starlette:
        any_method = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        special = {
            "/v1/completions": self.stream,
            "/encode": self.hang,
            "/classify": self.ignore,
            "/v1/score": self.leave,
        }
        return Starlette(
            routes=[
                *(Route(path, endpoint, methods=any_method) for path, endpoint in special.items()),
                WebSocketRoute("/{path:path}", self.websocket),
                Route("/{path:path}", self.answer, methods=any_method),
            ]
        )


def gate(
    inner: Inner,
    policy: Policy | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    inner_key: InnerKey | None = None,
) -> Gate:
    return Gate(
        inner.app(),
        policy or Policy(keys=RING),
        KeyLimits(clock),
        lambda: BOUNDS,
        lambda: NAMES,
        inner_key,
    )


@dataclass(frozen=True)
class Answer:
    """What a gate answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The error's class name."""
        return str(json.loads(self.body)["error"]["type"])


def scope_of(method: str, path: str, headers: list[tuple[str, str]], **more: Any) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 30000),
        **more,
    }


async def unread() -> Message:
    """For a receive that nobody may call."""
    raise AssertionError("the body was read")


async def gone() -> Message:
    """The receive of a client that has left."""
    return {"type": "http.disconnect"}


async def raw_call(
    app: Gate,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    chunks: tuple[bytes, ...] = (b"",),
    then: Receive | None = None,
    **more: Any,
) -> Answer | None:
    """One request; None if nothing was answered.

    then: what is received after the chunks. None: the client hangs.
    """
    waiting = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
        for number, chunk in enumerate(chunks, 1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        if then is not None:
            return await then()
        await asyncio.sleep(3600)
        return await gone()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope_of(method, path, headers, **more), receive, send)
    if not sent:
        return None
    start = sent[0]
    return Answer(
        start["status"],
        {name.decode().lower(): value.decode() for name, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


def answered(app: Gate, *request: Any, **more: Any) -> Answer:
    """As raw_call, of a request that must be answered."""
    answer = asyncio.run(raw_call(app, *request, **more))
    assert answer is not None
    return answer


def call(
    app: Gate,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: object = None,
    **more: Any,
) -> Answer:
    """One whole request with a JSON body."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    named = [("host", "127.0.0.1:30000"), *(headers or {}).items()]
    return answered(app, method, path, named, (raw,), **more)
