"""A key sees the adapters that it may use, and no folders; an admin key sees everything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sgl_esft.access.gate import Gate, Policy
from sgl_esft.access.keys import Caller
from sgl_esft.access.limits import KeyLimits
from sgl_esft.access.visible import check_visible, visible_part, without_folders
from sgl_esft.errors import NotAllowedError
from sgl_esft.http.classes import Declared, RouteClass, RouteTable
from tests.fast.access.asgi import (
    ADMIN_KEY,
    BOUNDS,
    CLIENT_KEY,
    NAMES,
    RING,
    TENANT_KEY,
    bearer,
    call,
)

MODELS = {
    "object": "list",
    "data": [
        {"id": "base", "root": "/models/base", "parent": None},
        {"id": "math", "root": "/adapters/math", "parent": "base"},
        {"id": "law", "root": "/adapters/law", "parent": "base"},
    ],
}
ADAPTERS = {
    "adapters": [
        {"name": "math", "folder": "m", "state": "on_device"},
        {"name": "law", "folder": "l", "state": "on_disk"},
    ],
    "slots": {"total": 3, "used": 1},
}


async def answer(request: Request) -> Response:
    path = request.url.path
    if path == "/v1/adapters/nobody":
        return JSONResponse({"error": {"type": "UnknownAdapterError"}}, 404)
    if path == "/detokenize":
        return JSONResponse({"error": {"message": "/data/models/base/config.json: no"}}, 400)
    documents: dict[str, Any] = {
        "/v1/models": MODELS,
        "/v1/adapters": ADAPTERS,
        "/model_info": {"model_path": "/data/models/base"},
        "/get_model_info": {"model_path": "/data/models/base"},
    }
    if path.startswith("/v1/models/"):
        return JSONResponse({"id": "math", "root": "/adapters/math"})
    return JSONResponse(documents.get(path, ADAPTERS["adapters"][0]))  # type: ignore[index]


TENANT = Caller("tenant", adapters=frozenset({"math"}))
PATHS = (
    *("/v1/models", "/v1/models/{name:path}", "/v1/adapters", "/v1/adapters/{name}", "/metrics"),
    *("/model_info", "/get_model_info", "/detokenize"),
)
METHODS = ["GET", "HEAD", "POST", "PATCH", "DELETE"]


def gate(policy: Policy) -> Gate:
    app = Starlette(routes=[Route(path, answer, methods=METHODS) for path in PATHS])
    return Gate(app, policy, KeyLimits(lambda: 0.0), lambda: BOUNDS, lambda: NAMES)


def get(path: str, key: str | None, method: str = "GET") -> tuple[int, Any]:
    app = gate(Policy(keys=RING) if key else Policy())
    found = call(app, method, path, bearer(key) if key else {})
    assert int(found.headers["content-length"]) == len(found.body)
    return found.status, json.loads(found.body)


@pytest.mark.parametrize("key", [ADMIN_KEY, None])
def test_admins_see_everything(key: str | None) -> None:
    assert get("/v1/models", key) == (200, MODELS)


@pytest.mark.parametrize(
    ("key", "names"), [(CLIENT_KEY, ["base", "math", "law"]), (TENANT_KEY, ["math"])]
)
def test_models(key: str, names: list[str]) -> None:
    status, document = get("/v1/models", key)
    assert status == 200
    assert document["object"] == "list"
    assert [(model["id"], model["root"]) for model in document["data"]] == [(n, n) for n in names]


def test_reading_adapters_is_for_clients_and_changing_them_for_admins() -> None:
    table = RouteTable(
        declared={
            path: Declared(path, frozenset(METHODS), RouteClass.ADMIN)
            for path in ("/v1/adapters", "/v1/adapters/{name}", "/v1/memory")
        }
    )
    for path in ("/v1/adapters", "/v1/adapters/math"):
        for method in METHODS:
            expected = RouteClass.CLIENT if method in ("GET", "HEAD") else RouteClass.ADMIN
            assert table.find(method, path) is expected
    assert table.find("GET", "/v1/memory") is RouteClass.ADMIN


def test_other_tenants_adapters_do_not_differ_from_none() -> None:
    for path in ("/v1/adapters/law", "/v1/adapters/nobody", "/v1/adapters/math/x"):
        with pytest.raises(NotAllowedError, match="may not use that adapter"):
            check_visible(TENANT, path)
    check_visible(TENANT, "/v1/adapters/math")
    check_visible(Caller("client"), "/v1/adapters/law")


def test_metrics_are_not_for_keys_of_some_adapters() -> None:
    assert [get("/metrics", key)[0] for key in (CLIENT_KEY, ADMIN_KEY)] == [200, 200]
    status, document = get("/metrics", TENANT_KEY)
    assert (status, document["error"]["type"]) == (403, "NotAllowedError")


def test_adapters() -> None:
    seen = visible_part(ADAPTERS, TENANT, "/v1/adapters")
    assert seen == {
        "adapters": [{"name": "math", "state": "on_device"}],
        "slots": {"total": 3, "used": 1},
    }
    all_of_them = visible_part(ADAPTERS, Caller("client"), "/v1/adapters")["adapters"]
    assert all_of_them == [
        {"name": "math", "state": "on_device"},
        {"name": "law", "state": "on_disk"},
    ]


def test_one_adapter() -> None:
    one = {"name": "math", "folder": "m", "state": "on_disk"}
    assert visible_part(one, TENANT, "/v1/adapters/math") == {"name": "math", "state": "on_disk"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/models/base", "base"),
        ('{"model_path":"/data/models/base","n":1}', '{"model_path":"base","n":1}'),
        ("'/data/a b/c' is no folder", "'a b/c' is no folder"),
        ("adapter folder /data/adapters/math: missing", "adapter folder math: missing"),
        ("GET /v1/models lists, /openapi.json too", "GET /v1/models lists, /openapi.json too"),
        ("http://127.0.0.1/data/models 1/2", "http://127.0.0.1/data/models 1/2"),
    ],
)
def test_folders_are_cut_to_their_names(text: str, shown: str) -> None:
    assert without_folders(text) == shown


@pytest.mark.parametrize("key", [TENANT_KEY, CLIENT_KEY, ADMIN_KEY])
def test_only_admins_are_told_of_folders(key: str) -> None:
    """By the routes of the base, and by errors."""
    for path in ("/model_info", "/get_model_info", "/detokenize"):
        _, document = get(path, key, "POST" if path == "/detokenize" else "GET")
        assert ("/data/models" in json.dumps(document)) is (key == ADMIN_KEY)


@pytest.mark.parametrize(
    ("key", "model", "status"),
    [
        (TENANT_KEY, "math", 200),
        (TENANT_KEY, "base:math", 200),
        (TENANT_KEY, "law", 403),
        (TENANT_KEY, "nobody", 403),
        (TENANT_KEY, "base", 403),
        (TENANT_KEY, "/models/base", 403),
        (CLIENT_KEY, "law", 200),
        (CLIENT_KEY, "base", 200),
    ],
)
def test_one_model(key: str, model: str, status: int) -> None:
    found, document = get(f"/v1/models/{model}", key)
    assert found == status
    if status == 200:
        assert document["root"] == document["id"] == "math"
    else:
        assert "law" not in document["error"]["message"]
