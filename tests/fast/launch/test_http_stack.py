"""The whole stack around an application: what passes, in which order, and how often it is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware

from sgl_esft.access.gate import Policy
from sgl_esft.access.keys import KeyRing
from sgl_esft.errors import DrainingError, EsftError, UndeclaredRouteError
from sgl_esft.http import request_ids
from sgl_esft.http.adapter_names import ADAPTER_ROUTES, KnownNames
from sgl_esft.http.classes import RouteTable
from sgl_esft.http.request_ids import Asker
from sgl_esft.lifecycle.registry import AdapterGoneError
from sgl_esft.plugin.registry_hooks import refuse_empty
from sgl_esft_launch.access import AccessPlan
from tests.fast.access.asgi import ADMIN_KEY, CLIENT_KEY, NAMES, RING, TENANT_KEY
from tests.fast.http.stack import OPEN, Call, Control, answers, install, statuses
from tests.support.request_fuzz.cases import BODIES

KEYED = AccessPlan(Policy(keys=RING), None, lambda: RING)
TEXT = {"text": "x"}


class Library:
    """Adapters that load when they are asked for, and how often names were."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.ensured: list[frozenset[str]] = []

    def known_names(self) -> KnownNames:
        self.num_asked += 1
        return NAMES

    async def ensure(self, names: Collection[str]) -> None:
        self.ensured.append(frozenset(names))


class Server:
    """As SGLang's: its middleware and some of its routes, behind our layers."""

    def __init__(self, plan: AccessPlan = KEYED, *, weave: bool = True, **parts: Any) -> None:
        self.library = Library()
        self.bodies: list[bytes] = []
        self.app = FastAPI()
        self.app.add_middleware(CORSMiddleware, allow_origins=["*"])
        for path in (*ADAPTER_ROUTES, "/tokenize", "/load_lora_adapter", "/weights_checker"):
            self.app.add_api_route(path, self._note, methods=["POST"])
        self.app.add_api_route("/update_weights_from_tensor", self._note, methods=["POST"])
        self.app.add_api_route("/health", lambda: {"ok": True}, methods=["GET"])
        if weave:
            parts |= {"names": self.library.known_names, "ensure": self.library.ensure}
        install(self.app, plan, **parts)
        self.app.add_middleware(CORSMiddleware, allow_origins=["*"])  # as SGLang, later

    async def _note(self, request: Request) -> dict[str, bool]:
        self.bodies.append(await request.body())
        assert int(request.headers["content-length"]) == len(self.bodies[-1])
        return {"ok": True}


@pytest.mark.parametrize("key", [TENANT_KEY, CLIENT_KEY])
@pytest.mark.parametrize("field", ["adapter", "lora_path"])
def test_a_body_is_parsed_once_and_its_names_are_resolved_once(
    field: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the whole way from the client to SGLang, for a key of some adapters too."""
    parsed: list[object] = []
    loads = json.loads
    server = Server()

    def counted(raw: Any, **options: Any) -> Any:
        parsed.append(raw)
        return loads(raw, **options)

    monkeypatch.setattr(json, "loads", counted)
    assert statuses(server.app, [("POST", "/generate", key, {**TEXT, field: "math"})]) == [200]
    assert (len(parsed), server.library.num_asked) == (1, 1)
    assert server.library.ensured == [frozenset({"math"})]
    assert [loads(raw) for raw in server.bodies] == [{**TEXT, "lora_path": "math"}]


def test_the_layers_are_around_all_middleware() -> None:
    calls: list[Call] = [
        ("GET", "/health", None, None),
        ("POST", "/generate", None, TEXT),
        ("POST", "/generate", CLIENT_KEY, TEXT),
        ("POST", "/generate", TENANT_KEY, TEXT),
        ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "math"}),
        ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "law"}),
        ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "nobody"}),
        ("POST", "/generate", CLIENT_KEY, {**TEXT, "adapter": "nobody"}),
        ("POST", "/v1/completions", TENANT_KEY, {"prompt": "x", "model": "x:law"}),
        ("POST", "/tokenize", CLIENT_KEY, {"prompt": "x", "adapter": "math"}),
        ("POST", "/load_lora_adapter", CLIENT_KEY, {}),
        ("POST", "/load_lora_adapter", ADMIN_KEY, {}),
        ("POST", "/load_lora_adapter", ADMIN_KEY, {"model": "nobody"}),
        ("POST", "/update_weights_from_tensor", ADMIN_KEY, {}),
        ("OPTIONS", "/generate", None, None),
    ]
    expected = [200, 401, 200, 403, 200, 403, 403, 404, 403, 400, 403, 200, 404, 404, 405]
    assert statuses(Server().app, calls) == expected


def test_without_keys_all_but_what_is_off_goes_on() -> None:
    server = Server(OPEN, weave=False)
    calls: list[Call] = [
        ("POST", "/generate", None, {"text": "x", "adapter": "math"}),  # which SGLang ignores
        ("POST", "/generate", "none", TEXT),
        ("POST", "/load_lora_adapter", None, {}),
        ("POST", "/update_weights_from_tensor", None, {}),
    ]
    assert statuses(server.app, calls) == [200, 200, 200, 404]
    assert json.loads(server.bodies[0]) == {"text": "x", "adapter": "math"}
    assert server.library.num_asked == 0


def test_the_order_in_which_a_request_is_judged() -> None:
    """Key, body, what is not for this key; whether work is taken; then the adapter's name."""
    server = Server(control=Control(DrainingError("ends", 1.0)))
    calls: list[Call] = [
        ("GET", "/health", CLIENT_KEY, None),
        ("POST", "/generate", None, TEXT),
        ("POST", "/generate", CLIENT_KEY, {"n": 129}),
        ("POST", "/generate", TENANT_KEY, {**TEXT, "adapter": "nobody"}),
        ("POST", "/generate", CLIENT_KEY, {**TEXT, "adapter": "nobody"}),
        ("POST", "/generate", CLIENT_KEY, {**TEXT, "adapter": "math"}),
    ]
    assert statuses(server.app, calls) == [503, 401, 400, 403, 503, 503]
    assert (server.library.ensured, server.bodies) == ([], [])


def test_a_load_that_fails_is_answered_by_its_error() -> None:
    async def fail(names: Collection[str]) -> None:
        raise EsftError("made up")

    app = FastAPI()
    app.add_api_route("/generate", lambda: None, methods=["POST"])
    install(app, names=lambda: NAMES, ensure=fail)
    call: Call = ("POST", "/generate", None, {"text": "x", "adapter": "math"})
    (answer,) = asyncio.run(answers(app, [call]))
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "EsftError")


def test_adapters_below_a_root_path() -> None:
    """--fastapi-root-path: uvicorn puts it before the path, and routes go without it."""
    server = Server(OPEN, refused_routes=["/weights_checker"])
    calls: list[Call] = [
        ("POST", "/api/generate", None, {"adapter": "math"}),
        ("POST", "/api/weights_checker", None, {}),
    ]
    assert statuses(server.app, calls, root_path="/api") == [200, 400]
    assert [json.loads(raw) for raw in server.bodies] == [{"lora_path": "math"}]


def test_an_undeclared_route_stops_the_start() -> None:
    app = FastAPI()
    app.add_api_route("/surprise", lambda: None)
    with pytest.raises(UndeclaredRouteError, match="GET /surprise"):
        install(app)
    table = RouteTable(["/surprise"])
    install(app, AccessPlan(Policy(table=table), None, KeyRing))


def as_if_in(module: str, function: Callable[..., Any]) -> Any:
    """The function as code of another module."""
    names = {**function.__globals__, "__name__": module}
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


def refuse(called: Callable[[], object] | None = None) -> None:
    if called is not None:
        called()
    raise ValueError("no parser named secret")


def refuse_in_library() -> None:
    json.loads("secret")


def refuse_on_purpose() -> None:
    refuse_empty(None, None, [])


def failing(path: str, fail: Callable[[], object]) -> httpx.Response:
    """The answer of a route that fails so."""

    def endpoint() -> None:
        fail()

    app = FastAPI()
    app.add_api_route(path, endpoint, methods=["POST"])
    install(app)
    calls: list[Call] = [("POST", path, None, {})]
    (answer,) = asyncio.run(answers(app, calls, raise_app_exceptions=False))
    assert "secret" not in answer.text
    return answer


SGLANG, OURS, ELASTIC = "sglang.srt.x", "sgl_esft.x", "sgl_elastic.x"


@pytest.mark.parametrize("path", ["/separate_reasoning", "/set_trace_level"])
@pytest.mark.parametrize("raising", [refuse, refuse_in_library])
def test_a_value_that_a_route_of_sglang_cannot_use_is_the_clients_error(
    path: str, raising: Callable[[], None]
) -> None:
    """Never a 500, and never the route's own text, which may repeat what was sent."""
    refusing = as_if_in(SGLANG, raising)
    answer = failing(path, refusing)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadBodyError"


@pytest.mark.parametrize(
    "modules", [(OURS,), (ELASTIC,), (OURS, SGLANG), (SGLANG, OURS), ("json.decoder",)]
)
@pytest.mark.parametrize("path", ["/separate_reasoning", "/v1/scale"])
def test_a_value_that_our_code_cannot_use_is_our_defect(
    path: str, modules: tuple[str, ...]
) -> None:
    """Whoever called it: a route of ours that SGLang refuses something has asked for the wrong."""
    called: Any = None
    for module in reversed(modules):
        inner = as_if_in(module, refuse)
        called = partial(inner, called)
    answer = failing(path, called)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalError"


def test_any_other_error_is_our_defect_and_goes_on_to_the_log() -> None:
    app = FastAPI()
    app.add_api_route("/v1/scale", lambda: {}["secret"], methods=["POST"])
    install(app)
    with pytest.raises(KeyError, match="secret"):
        statuses(app, [("POST", "/v1/scale", None, {})])
    answer = failing("/v1/scale", lambda: {}["secret"])
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalError")


def test_what_a_hook_refuses_on_purpose_is_answered_by_name() -> None:
    answer = failing("/separate_reasoning", as_if_in(SGLANG, refuse_on_purpose))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "EmptyPromptError")
    assert issubclass(AdapterGoneError, ValueError)  # as SGLang's own routes catch it


SESSIONS: dict[str, tuple[Any, ...]] = {
    "/generate": ({"session_params": {"id": "s"}}, {"session_id": "s"}),
    "/v1/chat/completions": ({"session_params": {"id": "s"}}, {"session_id": "s"}),
    "/v1/completions": ({"session_params": {"id": "s"}}, {"session_id": "s"}),
    "/v1/responses": ({"session_id": "s"},),
}


@pytest.mark.parametrize("path", SESSIONS)
def test_sessions_are_for_the_admin_key(path: str) -> None:
    server = Server()
    server.app.add_api_route("/v1/responses", server._note, methods=["POST"])
    for field in SESSIONS[path]:
        calls = [("POST", path, key, {**BODIES[path], **field}) for key in (CLIENT_KEY, ADMIN_KEY)]
        refused, taken = asyncio.run(answers(server.app, calls))
        assert refused.status_code == 403
        assert "sessions are for the admin key" in refused.text
        assert taken.status_code == 200
    assert len(server.bodies) == len(SESSIONS[path])  # the admin's


def test_what_a_request_runs_knows_its_key() -> None:
    server = Server()
    told: list[Asker] = []

    async def tell() -> None:
        told.append(request_ids.asker())

    for path in ("/v1/models", "/server_info", "/ready", "/health_generate"):
        server.app.add_api_route(path, tell, methods=["GET"])
    paths = (("/v1/models", CLIENT_KEY), ("/v1/models", TENANT_KEY), ("/server_info", ADMIN_KEY))
    calls: list[Call] = [("GET", path, key, None) for path, key in paths]
    calls += [("GET", "/ready", None, None), ("GET", "/health_generate", CLIENT_KEY, None)]
    assert statuses(server.app, calls) == [200] * 5
    assert told == [
        Asker("client"),
        Asker("tenant"),
        Asker("admin", is_admin=True),
        Asker("(public)"),
        Asker("client", is_probe=True),
    ]
