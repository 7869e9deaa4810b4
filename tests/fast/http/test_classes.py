"""Every route has a class; what has none does not exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette._utils import get_route_path
from starlette.routing import Mount, compile_path

from sgl_elastic.coordinator import app as elastic_app
from sgl_esft.dashboard.pages import FILES
from sgl_esft.errors import UndeclaredRouteError, UnknownMethodError, UnknownRouteError
from sgl_esft.http import classes
from sgl_esft.http.classes import TABLE, AppRoute, RouteClass, RouteTable
from sgl_esft.lifecycle import api, compat

METHODS = {"get", "post", "put", "delete", "head", "patch"}
# Set by SGLang's environment variables; their defaults are in the table.
BY_ENVIRONMENT = {
    "_ollama_root_route": "/",
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
    "SGLANG_OLLAMA_TAGS_ROUTE": "/api/tags",
    "SGLANG_OLLAMA_SHOW_ROUTE": "/api/show",
    "AIP_PREDICT_ROUTE": "/vertex_generate",
}


def sglang_routes() -> set[tuple[str, str]]:
    """(method, path) of each route decorator in SGLang's sources, which are not imported."""
    spec = importlib.util.find_spec("sglang")
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "entrypoints"
    found = set()
    for name in ("http_server.py", "v1_loads.py", "elastic_ep.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                for decorator in node.decorator_list:
                    found |= routes_of_decorator(decorator)
    return found


def routes_of_decorator(node: ast.expr) -> set[tuple[str, str]]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return set()
    if ast.unparse(node.func.value) not in ("app", "router"):
        return set()
    kind = node.func.attr
    if kind in METHODS:
        return {(kind.upper(), path_of(node.args[0]))}
    if kind == "websocket":
        return {(classes.WEBSOCKET, path_of(node.args[0]))}
    if kind == "api_route":
        methods = next(k.value for k in node.keywords if k.arg == "methods")
        return {(method, path_of(node.args[0])) for method in ast.literal_eval(methods)}
    return set()


def path_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    text = ast.unparse(node)
    return next(path for name, path in BY_ENVIRONMENT.items() if name in text)


def declared() -> set[tuple[str, str]]:
    return {(method, path) for path, each in TABLE.items() for method in each.methods}


# FastAPI's own, the metrics' application, and this package's.
NOT_SGLANGS = {
    *FILES,
    *("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/metrics"),
    *("/healthz", "/readyz", "/v1/heat", "/v1/drain", "/v1/memory", "/version"),
}


def test_the_table_is_what_sglang_and_we_have() -> None:
    sglang = sglang_routes()
    assert len(sglang) > 100
    routes = (*elastic_app.ROUTES, *api.ROUTES, *compat.COMPAT_ROUTES)
    ours = {(route.method, route.path) for route in routes}
    assert sglang - declared() == set()
    assert ours - declared() == set()
    unneeded = declared() - sglang - ours
    assert {path for _, path in unneeded} == NOT_SGLANGS
    groups = (classes._PUBLIC, classes._CLIENT, classes._ADMIN, classes._OFF)
    assert sum(map(len, groups)) == len(TABLE), "a path has one class"


# What is open, said here once more: a route that only the table opens is a mistake.
OPEN = {
    RouteClass.PUBLIC: {"/", "/health", "/healthz", "/ping", "/ready", "/readyz", *FILES},
    RouteClass.CLIENT: {
        *("/generate", "/encode", "/classify", "/invocations", "/v1/completions"),
        *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/classify", "/v1/score", "/v1/decisions", "/v1/systemone"),
        *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
        *("/v1/messages/count_tokens", "/parse_function_call", "/separate_reasoning"),
        *("/v1/models", "/v1/models/{model:path}", "/model_info", "/get_model_info"),
        *("/health_generate", "/metrics", "/v1/loads", "/version"),
        *("/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"),
    },
    RouteClass.ADMIN: {
        *("/v1/adapters", "/v1/adapters/{name}", "/load_lora_adapter", "/unload_lora_adapter"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_request", "/flush_cache"),
        *("/open_session", "/close_session", "/pause_generation", "/continue_generation"),
        *("/server_info", "/get_server_info", "/set_internal_state", "/set_trace_level"),
        *("/freeze_gc", "/weights_checker", "/send_weights_to_remote_instance"),
        *("/is_scaling_elastic_ep", "/scale_elastic_ep", "/v1/scale", "/v1/scale/{operation_id}"),
        *("/v1/instances", "/v1/drain", "/v1/heat", "/v1/memory"),
    },
}
READ_BY_CLIENTS = {"/v1/adapters", "/v1/adapters/{name}"}


def test_what_is_not_meant_to_be_open_is_refused() -> None:
    """Every route of SGLang's and ours, by each of its methods, without --enable-route."""
    table = RouteTable()
    for method, path in sglang_routes() | declared():
        open_to = next((kind for kind, paths in OPEN.items() if path in paths), None)
        asked = path.replace("{", "").replace(":path}", "").replace("}", "")
        if open_to is None:
            with pytest.raises(UnknownRouteError, match=f"{re.escape(path)} is off"):
                table.find(method, asked)
        elif path in READ_BY_CLIENTS and method == "GET":
            assert table.find(method, asked) is RouteClass.CLIENT
        else:
            assert table.find(method, asked) is open_to, path


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/health", RouteClass.PUBLIC),
        ("POST", "/generate", RouteClass.CLIENT),
        ("PUT", "/generate", RouteClass.CLIENT),
        ("GET", "/v1/models/a/b", RouteClass.CLIENT),
        ("GET", "/v1/responses/resp-1", RouteClass.CLIENT),
        ("POST", "/v1/responses/resp-1/cancel", RouteClass.CLIENT),
        ("POST", "/v1/scale", RouteClass.ADMIN),
        ("GET", "/v1/scale/scale-01", RouteClass.ADMIN),
        ("POST", "/load_lora_adapter", RouteClass.ADMIN),
    ],
)
def test_classes(method: str, path: str, expected: RouteClass) -> None:
    assert RouteTable().find(method, path) is expected
    assert RouteTable(["/health", "/generate"]).find(method, path) is expected, "named or not"


@pytest.mark.parametrize(
    "path",
    [
        *("", "/generate/", "//generate", "/Generate", "/generate\n"),
        *("/health/x", "/healthz2", "/v1/models", "/metricsx"),
        *("/v1/scale/a/b", "/v1/scale/{operation_id}/x"),
    ],
)
def test_what_is_not_declared_is_not_there(path: str) -> None:
    table = RouteTable(declared={k: v for k, v in TABLE.items() if k != "/v1/models"})
    with pytest.raises(UnknownRouteError):
        table.find("GET", path)


def test_other_methods_are_refused() -> None:
    for method in ("DELETE", "PATCH", "OPTIONS", "TRACE", "get", ""):
        with pytest.raises(UnknownMethodError, match="/generate takes POST, PUT"):
            RouteTable().find(method, "/generate")


@pytest.mark.parametrize("path", sorted(p for p in TABLE if TABLE[p].route_class is RouteClass.OFF))
def test_an_off_route_is_an_admins_when_it_is_named(path: str) -> None:
    asked = path.replace("{method}", "x")
    for method in TABLE[path].methods:
        with pytest.raises(UnknownRouteError, match="--enable-route /"):
            RouteTable().find(method, asked)
        assert RouteTable([path]).find(method, asked) is RouteClass.ADMIN


def app_with(path: str) -> FastAPI:
    app = FastAPI()
    router = APIRouter()

    @app.post("/generate")
    def generate() -> None: ...

    @router.get("/v1/loads")
    def loads() -> None: ...

    @router.get(path)
    def other() -> None: ...

    app.include_router(router)
    return app


def test_an_application_with_an_undeclared_route_is_refused() -> None:
    routes = classes.routes_of(app_with("/surprise").routes)
    with pytest.raises(UndeclaredRouteError, match=r": GET /surprise; .*--enable-route"):
        classes.check_routes(routes, RouteTable())
    table = RouteTable(["/surprise"])
    classes.check_routes(routes, table)
    assert table.find("GET", "/surprise") is RouteClass.ADMIN


def test_an_undeclared_method_websocket_or_mount_is_refused() -> None:
    app = app_with("/ping")
    app.add_api_route("/ready", lambda: None, methods=["DELETE"])
    app.router.routes.append(Mount("/metrics", app=FastAPI()))
    app.router.routes.append(Mount("/files", app=FastAPI()))
    app.add_api_websocket_route("/v1/realtime", lambda ws: None)
    app.add_api_websocket_route("/ws", lambda ws: None)
    with pytest.raises(UndeclaredRouteError, match="DELETE /ready, MOUNT /files, WEBSOCKET /ws;"):
        classes.check_routes(classes.routes_of(app.routes), RouteTable())


def test_a_named_route_must_exist() -> None:
    with pytest.raises(UndeclaredRouteError, match="--enable-route /start_profle: there is no"):
        classes.check_routes([AppRoute("/ping", frozenset({"GET"}))], RouteTable(["/start_profle"]))


@given(st.sampled_from([p for p in TABLE if "{" in p]), st.text(max_size=12))
def test_templates_match_what_starlette_matches(template: str, text: str) -> None:
    before = template[: template.index("{")]
    after = template[template.index("}") + 1 :]
    path = before + text + after
    expected = compile_path(template)[0].match(path) is not None
    # Starlette's `$` and `.` let a line feed at the end through, or stop at one; ours never match.
    if "\n" not in path:
        assert (classes._compiled(template).fullmatch(path) is not None) == expected


@given(
    st.text("/ab", max_size=8),
    st.sampled_from(["", "/a", "/a/b", "/", "a"]),
)
def test_the_routed_path_is_starlettes(path: str, root: str) -> None:
    scope = {"path": path, "root_path": root}
    assert classes.routed_path(scope) == get_route_path(scope)
