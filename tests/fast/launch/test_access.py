"""From flags to the gate in front of an application."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware

from sgl_esft.access.bodies import ModelBounds
from sgl_esft.errors import ConfigError, UndeclaredRouteError, UnknownAdapterError
from sgl_esft.http.adapter_names import ADAPTER_ROUTES, AdapterMiddleware, KnownNames
from sgl_esft.lifecycle.registry import AdapterGoneError
from sgl_esft.plugin.registry_hooks import refuse_empty
from sgl_esft_launch import access, flags
from sgl_esft_launch.access import AccessPlan
from sgl_esft_launch.resolved import check_resolved

KEY = "-client-key-0123456789"
ADMIN = "admin-key-0123456789"
TENANT = "tenant-key-0123456789"
NAMES = KnownNames(frozenset({"math", "law"}), frozenset({"/models/base"}))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    tenant = {"name": "tenant", "key": TENANT, "adapters": ["math"], "base_model": False}
    path.write_text(json.dumps({"keys": [tenant, {"name": "all", "key": KEY}]}))
    path.chmod(0o600)
    return path


def make(*argv: str, weave: bool = True, **environment: str) -> AccessPlan:
    parsed, rest = flags.parse(argv)
    return access.plan_access(
        parsed.access, parsed.host, rest, weave=weave, environment=environment
    )


def test_defaults() -> None:
    plan = make()
    assert len(plan.policy.keys) == 0
    assert plan.inner_key is None
    assert plan.policy.rules.max_bytes == 2 << 20
    assert 0 < plan.policy.body_timeout_s < plan.policy.request_timeout_s < 7200
    assert access.argv_of(plan) == ()
    assert not plan.policy.rules.takes_logit_processors
    assert not plan.policy.rules.takes_templates
    assert make("--trust-request-chat-template").policy.rules.takes_templates
    assert not plan.policy.rules.takes_media


def test_every_flag(keys_file: Path) -> None:
    plan = make(
        *("--api-keys-file", str(keys_file), "--admin-key-env", "ADMIN_KEY"),
        *("--api-key", "one-more-key-0123456789", "--max-body-bytes", "8MiB"),
        *("--body-timeout", "2.5", "--request-timeout", "60"),
        *("--allowed-origins", "https://a", "https://b"),
        *("--enable-route", "/start_profile", "--enable-route=/stop_profile"),
        "--enable-custom-logit-processor",
        ADMIN_KEY=ADMIN,
    )
    assert [plan.policy.keys.find(k) is not None for k in (KEY, TENANT, ADMIN)] == [True] * 3
    assert plan.policy.keys.has_admin
    assert plan.policy.rules.max_bytes == 8 << 20
    assert plan.policy.rules.takes_logit_processors
    assert (plan.policy.body_timeout_s, plan.policy.request_timeout_s) == (2.5, 60)
    assert plan.policy.allowed_origins == ("https://a", "https://b")
    assert plan.policy.table.enabled == {"/start_profile", "/stop_profile"}
    assert make("--max-body-bytes", "1000").policy.rules.max_bytes == 1000


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-1", "localhost.example", ""])
def test_no_other_host_without_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-keys-file or --api-key"):
        make("--host", host)
    assert len(make("--host", host, f"--api-key={KEY}").policy.keys) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert make("--host", host).inner_key is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--api-key", "short"], "--api-key: a key has 16 to 256"),
        (["--admin-api-key", "short"], "--admin-api-key: a key has 16 to 256"),
        ([f"--api-key={KEY}", f"--admin-api-key={KEY}"], "have the same key"),
        (["--admin-key-env", "NOT_SET"], "--admin-key-env NOT_SET: the variable is not set"),
        (["--api-keys-file", "nothing.json"], "cannot read nothing.json"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--max-body-bytes", "2mb"], "--max-body-bytes"),
        (["--request-timeout", "0"], "--request-timeout 0: must be a finite time"),
        (["--request-timeout", "inf"], "--request-timeout inf: must be"),
        (["--body-timeout", "nan"], "--body-timeout nan: must be"),
        (["--body-timeout", "-1"], "--body-timeout -1: must be"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(*argv)
    assert KEY not in str(caught.value)


def test_keys_for_some_adapters_need_adapters(keys_file: Path) -> None:
    with pytest.raises(ConfigError, match="--no-esft has no adapters"):
        make("--api-keys-file", str(keys_file), weave=False)


@pytest.mark.parametrize("weave", [True, False])
@pytest.mark.parametrize(
    "switch",
    ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "DUMPER_SERVER_PORT"],
)
def test_a_switch_that_opens_another_door_is_refused(switch: str, weave: bool) -> None:
    for value in ("1", "True", "y", "what"):
        with pytest.raises(ConfigError, match=f"{switch}: .*; unset it"):
            make(weave=weave, **{switch: value})
    for value in ("", "0", "False", "n"):
        make(weave=weave, **{switch: value})


@pytest.mark.parametrize("weave", [True, False])
@pytest.mark.parametrize(
    ("flag", "field", "value", "default"),
    [
        ("--grpc-port", "grpc_port", 5000, None),
        ("--disaggregation-mode", "disaggregation_mode", "prefill", "null"),
        ("--enable-http2", "enable_http2", True, False),
        ("--tokenizer-worker-num", "tokenizer_worker_num", 2, 1),
    ],
)
def test_a_flag_that_opens_another_door_is_refused(
    flag: str, field: str, value: Any, default: Any, weave: bool
) -> None:
    """By its name, and by its value however that has come."""
    for argv in ([flag, str(value)], [f"{flag}={value}"]):
        with pytest.raises(ConfigError, match=f"{flag}: .*; leave it out"):
            make(*argv, weave=weave)
    (door,) = (each for each in access.needed("127.0.0.1") if each.field == field)
    check_resolved(SimpleNamespace(**{field: default}), (door,))
    with pytest.raises(ConfigError, match=f"{flag} .* cannot be used"):
        check_resolved(SimpleNamespace(**{field: value}), (door,))


def test_nothing_of_the_plan_shows_a_key(keys_file: Path) -> None:
    argv = ["--api-keys-file", str(keys_file), "--admin-api-key", ADMIN]
    parsed, _ = flags.parse(argv)
    plan = make(*argv)
    assert plan.inner_key is not None
    for secret in (KEY, TENANT, ADMIN, plan.inner_key.value):
        assert secret not in f"{parsed!r} {plan!r}"


def test_sglang_knows_the_inner_key_only() -> None:
    plan = make(f"--api-key={KEY}")
    assert plan.inner_key is not None
    value = plan.inner_key.value
    assert access.argv_of(plan) == (f"--api-key={value}", f"--admin-api-key={value}")
    access.check_keys(SimpleNamespace(api_key=value, admin_api_key=value), plan)
    access.check_keys(SimpleNamespace(api_key=None, admin_api_key=None), make())
    for api_key, admin in ((value, KEY), (KEY, value), (None, value)):
        with pytest.raises(ConfigError, match="in full, on the command line") as caught:
            access.check_keys(SimpleNamespace(api_key=api_key, admin_api_key=admin), plan)
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="write --api-key in full"):
        access.check_keys(SimpleNamespace(api_key=KEY, admin_api_key=None), make())


def test_children_do_not_inherit_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", ADMIN)
    plan = make("--admin-key-env", "ADMIN_KEY", ADMIN_KEY=ADMIN)
    access.forget(plan)
    assert "ADMIN_KEY" not in os.environ


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/generate", {"text": "x"}, {None}),
        ("/generate", {"text": "x", "adapter": "math"}, {"math"}),
        ("/generate", {"text": "x", "lora_path": "law"}, {"law"}),
        ("/generate", {"text": ["x", "y"], "lora_path": ["law", None]}, {"law", None}),
        ("/generate", {"text": ["x", "y"], "adapter": ["law", "math"]}, {"law", "math"}),
        ("/generate", {"text": ["x"], "lora_path": [None]}, {None}),
        ("/v1/completions", {"prompt": "x", "model": "base:math"}, {"math"}),
        ("/v1/completions", {"prompt": "x", "model": "law"}, {"law"}),
        ("/v1/completions", {"prompt": "x", "model": "/models/base"}, {None}),
        ("/v1/chat/completions", {"model": "default"}, {None}),
        ("/v1/responses", {"model": "base"}, {None}),
        ("/v1/embeddings", {"lora_path": "law"}, {"law"}),
        ("/v1/responses", {"model": "math"}, ConfigError),
        ("/generate", {"text": "x", "adapter": "math", "lora_path": "law"}, ConfigError),
        ("/generate", {"text": "x", "adapter": "nobody"}, UnknownAdapterError),
    ],
)
def test_what_a_body_asks_for(path: str, body: dict[str, Any], asked: Any) -> None:
    ask = access.adapters_of(lambda: NAMES)
    if isinstance(asked, set):
        assert set(ask(path, body, None)) == asked
    else:
        with pytest.raises(asked):
            ask(path, body, None)


@pytest.mark.parametrize("name", ["law", "nobody"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "adapter": "{}"}),
        ("/generate", {"text": "x", "adapter": "math", "lora_path": "{}"}),
        ("/v1/completions", {"prompt": "x", "model": "base:{}"}),
        ("/v1/responses", {"input": "x", "adapter": "{}"}),
        ("/tokenize", {"prompt": "x", "model": "{}"}),
        ("/encode", {"text": "x", "lora_path": "{}"}),
    ],
)
def test_others_adapters_are_not_there(path: str, body: dict[str, Any], name: str) -> None:
    """One of others does not differ from none, whatever else is wrong."""
    named = {field: value.format(name) for field, value in body.items()}
    with pytest.raises(UnknownAdapterError):
        access.adapters_of(lambda: NAMES)(path, named, {"math", "gone"})


def application() -> FastAPI:
    """As SGLang's: its middleware, and some of its routes."""
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    app.add_middleware(AdapterMiddleware, known_names=lambda: NAMES)
    for path in (*ADAPTER_ROUTES, "/update_weights_from_tensor", "/load_lora_adapter"):
        app.add_api_route(path, lambda: {"ok": True}, methods=["POST"])
    app.add_api_route("/health", lambda: {"ok": True}, methods=["GET"])
    return app


def installed(app: FastAPI, plan: AccessPlan) -> FastAPI:
    access.install(app, plan, lambda: ModelBounds(300, 1000), lambda: NAMES)
    return app


async def statuses(app: FastAPI, calls: list[tuple[str, str, str | None, Any]]) -> list[int]:
    transport = httpx.ASGITransport(app=app)
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for method, path, key, body in calls:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = await client.request(method, path, headers=headers, json=body)
            found.append(answer.status_code)
    return found


def test_an_installed_gate_is_around_all_middleware(keys_file: Path) -> None:
    argv = ("--api-keys-file", str(keys_file), "--admin-key-env", "A")
    app = installed(application(), make(*argv, A=ADMIN))
    app.add_middleware(CORSMiddleware, allow_origins=["*"])  # later, as SGLang adds its own
    text = {"text": "x"}
    calls: list[tuple[str, str, str | None, Any]] = [
        ("GET", "/health", None, None),
        ("POST", "/generate", None, text),
        ("POST", "/generate", KEY, text),
        ("POST", "/generate", TENANT, text),
        ("POST", "/generate", TENANT, {**text, "adapter": "math"}),
        ("POST", "/generate", TENANT, {**text, "adapter": "law"}),
        ("POST", "/v1/completions", TENANT, {"prompt": "x", "model": "x:law"}),
        ("POST", "/load_lora_adapter", KEY, {}),
        ("POST", "/load_lora_adapter", ADMIN, {}),
        ("POST", "/update_weights_from_tensor", ADMIN, {}),
        ("OPTIONS", "/generate", None, None),
    ]
    expected = [200, 401, 200, 403, 200, 403, 403, 403, 200, 404, 405]
    assert asyncio.run(statuses(app, calls)) == expected


def test_without_keys_all_but_what_is_off_goes_on() -> None:
    app = installed(application(), make())
    calls: list[tuple[str, str, str | None, Any]] = [
        ("POST", "/generate", None, {"text": "x", "adapter": "math"}),
        ("POST", "/generate", "none", {"text": "x"}),
        ("POST", "/load_lora_adapter", None, {}),
        ("POST", "/update_weights_from_tensor", None, {}),
    ]
    assert asyncio.run(statuses(app, calls)) == [200, 200, 200, 404]


def test_adapters_below_a_root_path() -> None:
    """--fastapi-root-path: uvicorn puts it before the path, and routes go without it."""
    seen: list[Any] = []
    app = FastAPI()
    app.add_middleware(
        AdapterMiddleware, known_names=lambda: NAMES, refused_routes=["/weights_checker"]
    )

    async def note(request: Request) -> None:
        seen.append(await request.json())

    app.add_api_route("/generate", note, methods=["POST"])
    app.add_api_route("/weights_checker", note, methods=["POST"])

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app, root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            bodies = {"/api/generate": {"adapter": "math"}, "/api/weights_checker": {}}
            found = [await client.post(path, json=body) for path, body in bodies.items()]
            return [answer.status_code for answer in found]

    assert asyncio.run(run()) == [200, 400]
    assert seen == [{"lora_path": "math"}]


def test_an_undeclared_route_stops_the_start() -> None:
    app = application()
    app.add_api_route("/surprise", lambda: None)
    with pytest.raises(UndeclaredRouteError, match="GET /surprise"):
        installed(app, make())
    installed(app, make("--enable-route", "/surprise"))


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

    app = application()
    app.add_api_route(path, endpoint, methods=["POST"])
    installed(app, make())

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, json={})

    answer = asyncio.run(ask())
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
    app = application()
    app.add_api_route("/v1/scale", lambda: {}["secret"], methods=["POST"])
    installed(app, make())
    with pytest.raises(KeyError, match="secret"):
        asyncio.run(statuses(app, [("POST", "/v1/scale", None, {})]))
    answer = failing("/v1/scale", lambda: {}["secret"])
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalError")


def test_what_a_hook_refuses_on_purpose_is_answered_by_name() -> None:
    answer = failing("/separate_reasoning", as_if_in(SGLANG, refuse_on_purpose))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "EmptyPromptError")
    assert issubclass(AdapterGoneError, ValueError)  # as SGLang's own routes catch it
