"""What a request meets while a server serves, drains and fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sgl_esft.health import service as service_module
from sgl_esft.health.phases import Phase
from sgl_esft.health.service import Service
from sgl_esft.http import admission
from sgl_esft.http.admission import Admission
from sgl_esft.http.routes import add_routes
from sgl_esft_launch.health import routes_of
from tests.fast.access.asgi import raw_call as ask
from tests.fast.health.fakes import serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "is_work", "is_refused"),
    [
        ("POST", "/generate", True, True),
        ("PUT", "/generate", True, True),
        ("POST", "/v1/chat/completions", True, True),
        ("POST", "/v1/scale", True, True),
        ("DELETE", "/v1/adapters/math", True, True),
        ("GET", "/health_generate", False, True),
        ("GET", "/health", False, True),
        ("GET", "/ready", False, True),
        ("GET", "/healthz", False, False),
        ("GET", "/readyz", False, False),
        ("GET", "/v1/models", False, False),
        ("GET", "/metrics", False, False),
        ("GET", "/v1/instances", False, False),
        ("OPTIONS", "/generate", False, False),
        ("POST", "/v1/drain", False, False),
        ("POST", "/abort_request", False, False),
    ],
)
def test_what_is_work(method: str, path: str, is_work: bool, is_refused: bool) -> None:
    assert admission.is_work(method, path) is is_work
    assert admission.is_refused_when_ending(method, path) is is_refused


class App:
    """Streams two events, the second when it may, and notes that its client has gone."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.has_begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/healthz":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"well"})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.has_begun.set()
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.fixture(autouse=True)
def _nothing_real_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "kill_children", lambda: None)
    monkeypatch.setattr(service_module, "FAIL_S", 60.0)


async def test_a_stream_is_finished_and_new_work_refused() -> None:
    async with serving() as h:
        inner = App()
        app = Admission(inner, h.service)
        stream = asyncio.ensure_future(ask(app, "POST", "/generate", []))
        await inner.has_begun.wait()
        assert h.service.num_in_flight == 1
        h.service.drain()
        refused = await ask(app, "POST", "/generate", [])
        assert (refused.status, refused.headers["retry-after"]) == (503, "30")
        assert refused.error == "DrainingError"
        well = await ask(app, "GET", "/healthz", [])
        assert (well.status, well.body) == (200, b"well")
        assert h.service.life.phase is Phase.DRAINING
        inner.go_on.set()
        answer = await stream
        assert answer.body == b"data: 1\n\ndata: 2\n\n"
        await h.stopped()
    assert h.service.life.exit_status == 0


async def test_a_stream_whose_engine_is_lost_ends_with_an_error() -> None:
    async with serving() as h:
        inner = App()
        stream = asyncio.ensure_future(ask(Admission(inner, h.service), "POST", "/generate", []))
        await inner.has_begun.wait()
        h.service.note_fault("the detokenizer has died")
        answer = await stream
        events = answer.body.split(b"\n\n")
        assert (answer.status, events[0]) == (200, b"data: 1")
        error = json.loads(events[1].removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("EngineLostError", 503)
        assert "the detokenizer has died" in error["message"]
        await h.stopped()


def client_of(service: Service) -> TestClient:
    app = FastAPI()
    add_routes(app, routes_of(service))
    return TestClient(app)


async def test_routes() -> None:
    async with serving() as h:
        client = client_of(h.service)
        assert client.get("/healthz").json() == {"status": "alive"}
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        for bad in ({"timeout_s": -1}, {"timeout_s": "x"}, {"timeout": 1}, [1], {"timeout_s": 1e9}):
            assert client.post("/v1/drain", json=bad).status_code == 400
        assert h.service.life.phase is Phase.SERVING
        drained = client.post("/v1/drain", json={"timeout_s": 5})
        assert (drained.status_code, drained.json()["in_flight"]) == (202, 0)
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is draining")
        await h.stopped()


async def test_a_server_that_starts_cannot_be_drained_yet() -> None:
    """Its warm-up would be refused or cut, at which SGLang kills the process."""
    async with serving(has_started=False) as h:
        answer = client_of(h.service).post("/v1/drain", json={"timeout_s": 5})
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert answer.json()["error"]["type"] == "StartingError"
        assert h.service.life.phase is Phase.STARTING
        assert h.service.refusal() is None  # the warm-up goes on
        h.service.started()
        await h.until(lambda: h.service.life.phase is Phase.SERVING)
        h.service.drain()
        await h.stopped()
    assert h.service.life.exit_status == 0
