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
from sgl_esft.access.visible import check_visible, visible_part
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
    documents: dict[str, Any] = {"/v1/models": MODELS, "/v1/adapters": ADAPTERS}
    return JSONResponse(documents.get(path, ADAPTERS["adapters"][0]))  # type: ignore[index]


TENANT = Caller("tenant", adapters=frozenset({"math"}))
PATHS = ("/v1/models", "/v1/adapters", "/v1/adapters/{name}", "/metrics")
METHODS = ["GET", "HEAD", "POST", "PATCH", "DELETE"]


def gate(policy: Policy) -> Gate:
    app = Starlette(routes=[Route(path, answer, methods=METHODS) for path in PATHS])
    return Gate(app, policy, KeyLimits(lambda: 0.0), lambda: BOUNDS, lambda: NAMES)


def get(path: str, key: str | None) -> tuple[int, Any]:
    app = gate(Policy(keys=RING) if key else Policy())
    found = call(app, "GET", path, bearer(key) if key else {})
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
