"""The scaling routes over HTTP, beside an application that has routes and handlers of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.routing import Match
from starlette.testclient import TestClient

from sgl_elastic.coordinator.app import ROUTES
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.errors import DoesNotFitError
from sgl_elastic.instance.state import Instance
from sgl_elastic.types import Placement, Plan, ScaleRequest
from sgl_esft_launch.elastic import add_scale_routes
from tests.fast.elastic.scale_fakes import PLAN, WAIT_S, World, always, make_coordinator


class Site:
    """An application like SGLang's: it has /scale_elastic_ep already, and its own error handler."""

    def __init__(self) -> None:
        self.world = World()
        self.go_on = threading.Event()
        self.go_on.set()
        self.world.gate = self._gate
        self.plan = PLAN
        self.coordinator: Coordinator = make_coordinator(self.world, self._make_plan)
        self.app = FastAPI()

        @self.app.post("/scale_elastic_ep")
        def theirs() -> str:
            return "theirs"

        @self.app.get("/other")
        def other(number: int) -> int:
            return number

        @self.app.exception_handler(RequestValidationError)
        async def handler(request: Any, error: Any) -> JSONResponse:
            return JSONResponse("their error", status_code=418)

        self.protected: list[str] = []
        add_scale_routes(self.app, self.coordinator, self.instances, self._protect)
        self.client = TestClient(self.app)

    def _gate(self, name: str) -> None:
        if name == "prepare":
            assert self.go_on.wait(WAIT_S)

    def _make_plan(self, request: ScaleRequest, old: Placement) -> Plan:
        if request.dp_size > 8:
            raise DoesNotFitError(f"{request.dp_size} are too many")
        return self.plan

    def _protect(self, endpoint: Any) -> Any:
        self.protected.append(endpoint.__name__)
        return endpoint

    def instances(self) -> list[Instance]:
        return list(self.world.instances.values())

    def scale(self, **body: Any) -> Any:
        return self.client.post("/v1/scale", json=body)

    def ended(self, operation_id: str) -> dict[str, Any]:
        self.coordinator.wait(operation_id, WAIT_S)
        shown: dict[str, Any] = self.client.get(f"/v1/scale/{operation_id}").json()
        return shown


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.go_on.set()
    assert site.coordinator.close(WAIT_S)


def error_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


def test_a_scale_is_accepted_and_can_be_followed(site: Site) -> None:
    site.go_on.clear()
    answer = site.scale(dp_size=3)
    assert answer.status_code == 202
    assert answer.headers["location"] == "/v1/scale/op1"
    assert answer.json()["id"] == "op1"
    listed = site.client.get("/v1/scale").json()
    assert listed["running"] == "op1"
    site.go_on.set()
    shown = site.ended("op1")
    assert (shown["state"], shown["phase"]) == ("succeeded", "after")
    assert shown["phases"][0]["name"] == "plan"
    listed = site.client.get("/v1/scale", params={"limit": 1}).json()
    assert listed == {"running": None, "operations": [shown]}


def test_a_dry_run_answers_the_plan_and_all_fields_reach_the_request(site: Site) -> None:
    answer = site.scale(dp_size=3, dry_run=True)
    assert (answer.status_code, answer.json()) == (200, {"copied_bytes": 14})
    assert site.client.get("/v1/scale").json()["operations"] == []
    site.scale(dp_size=2, device_ids=[0, 3], leave=[1], drain=True, key="k")
    request = site.coordinator.journal.get("op1").request
    assert request == ScaleRequest(2, (0, 3), (1,), drain=True, key="k")


@pytest.mark.parametrize(
    "body",
    [
        {},
        *({"dp_size": size} for size in (0, 1025, "3", 3.0, True, None, 10**400)),
        {"dp_size": 3, "size": 3},
        *({"dp_size": 3, "device_ids": ids} for ids in ([-1], [1024], "012")),
        {"dp_size": 3, "leave": [0] * 1025},
        {"dp_size": 3, "key": "k" * 129},
        {"dp_size": 3, "dry_run": 1},
        [],
        "three",
        None,
    ],
)
def test_bodies_that_are_refused(site: Site, body: Any) -> None:
    answer = site.client.post("/v1/scale", json=body)
    assert error_of(answer) == (400, "BadScaleError")
    assert site.coordinator.journal.last(1) == ()


def test_bytes_that_are_no_json_are_refused_and_a_huge_body_is_not_read(site: Site) -> None:
    headers = {"content-type": "application/json"}
    for raw in (b"", b"{", b"\xff\xfe\xff", b"[" * 5000, b'{"dp_size":3}x'):
        answer = site.client.post("/v1/scale", content=raw, headers=headers)
        assert error_of(answer) == (400, "BadScaleError")
    raw = b'{"dp_size": 3, "key": "' + b"k" * 100000
    in_pieces = iter([raw[:50000], raw[50000:]])  # without a Content-Length
    for content in (raw, in_pieces):
        answer = site.client.post("/v1/scale", content=content, headers=headers)
        assert answer.status_code == 413
    assert site.coordinator.journal.last(1) == ()


def test_what_does_not_fit_is_a_400_and_a_second_scale_meanwhile_a_409(site: Site) -> None:
    answer = site.scale(dp_size=9)
    assert error_of(answer) == (400, "DoesNotFitError")
    assert answer.json()["error"]["message"] == "9 are too many"
    site.go_on.clear()
    site.scale(dp_size=3)
    answer = site.scale(dp_size=4)
    assert error_of(answer) == (409, "BusyError")
    assert answer.headers["retry-after"] == "1"
    assert "op1" in answer.json()["error"]["message"]


def test_keys_in_header_and_body(site: Site) -> None:
    def send(size: int, header: str, body: str) -> Any:
        content = {"dp_size": size, "key": body} if body else {"dp_size": size}
        headers = {"Idempotency-Key": header} if header else {}
        return site.client.post("/v1/scale", json=content, headers=headers)

    assert send(3, "k", "").json()["id"] == "op1"
    site.ended("op1")
    for header, body in [("k", ""), ("", "k"), ("k", "k")]:
        again = send(3, header, body)
        assert (again.status_code, again.json()["id"]) == (202, "op1")
    assert error_of(send(4, "k", "")) == (409, "KeyReusedError")
    assert error_of(send(3, "k", "l")) == (400, "BadScaleError")
    assert error_of(send(3, "k" * 129, "")) == (400, "BadScaleError")


def test_an_unknown_operation_is_a_404(site: Site) -> None:
    assert error_of(site.client.get("/v1/scale/nobody")) == (404, "UnknownOperationError")
    for limit in (0, 1001, "x"):
        answer = site.client.get("/v1/scale", params={"limit": limit})
        assert error_of(answer) == (400, "BadScaleError")


def test_instances(site: Site) -> None:
    site.ended(site.scale(dp_size=3).json()["id"])
    shown = site.client.get("/v1/instances").json()
    assert shown["serving"]["instance_id"] == "i1"
    assert shown["serving"]["placement"]["device_ids"] == [0, 1, 2]
    assert {each["instance_id"]: each["state"] for each in shown["instances"]} == {
        "i0": "parked",
        "i1": "active",
    }


def test_vllms_client_waits_for_the_end(site: Site) -> None:
    answer = site.client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3})
    assert answer.status_code == 200
    assert answer.json()["message"] == "Scaled to 3 data parallel engines"
    assert answer.json()["state"] == "succeeded"
    assert site.coordinator.serving[0] == "i1"


def test_vllms_client_gets_a_408_and_the_scale_goes_on(site: Site) -> None:
    site.go_on.clear()
    body = {"new_data_parallel_size": 3, "drain_timeout": 0.01}
    answer = site.client.post("/scale_elastic_ep", json=body)
    assert error_of(answer) == (408, "TimeoutError")
    site.go_on.set()
    assert site.ended("op1")["state"] == "succeeded"


def test_vllms_client_sees_the_error_of_a_roll_back(site: Site) -> None:
    site.world.fault = always("freeze")
    answer = site.client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3})
    assert error_of(answer) == (500, "StepFailedError")
    state = site.client.get("/is_scaling_elastic_ep").json()
    assert state["last_error"] == "freeze failed"


def test_sglangs_client_gets_its_answer_at_once(site: Site) -> None:
    site.go_on.clear()
    answer = site.client.post("/scale_elastic_ep", json={"new_ep_size": 3})
    assert answer.status_code == 200
    assert {k: answer.json()[k] for k in ("old_ep_size", "new_ep_size", "id")} == {
        "old_ep_size": 2,
        "new_ep_size": 3,
        "id": "op1",
    }
    busy = site.client.post("/scale_elastic_ep", json={"new_ep_size": 4})
    assert error_of(busy) == (409, "BusyError")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_is_scaling(site: Site, method: str) -> None:
    def state() -> Any:
        return site.client.request(method, "/is_scaling_elastic_ep").json()

    idle = {
        "is_scaling_elastic_ep": False,
        "effective_ep_size": 2,
        "pending_ep_size": None,
        "scale_phase": "idle",
        "last_error": None,
    }
    assert state() == idle
    site.go_on.clear()
    operation_id = site.scale(dp_size=3).json()["id"]
    during = state()
    assert during["scale_phase"] in ("plan", "memory", "prepare")
    assert {**during, "scale_phase": ""} == {
        **idle,
        "is_scaling_elastic_ep": True,
        "pending_ep_size": 3,
        "scale_phase": "",
    }
    site.go_on.set()
    site.ended(operation_id)
    assert state() == {**idle, "effective_ep_size": 3}


@pytest.mark.parametrize(
    "body",
    [
        {},
        *({"new_ep_size": size} for size in (0, True)),
        {"new_ep_size": 2, "new_data_parallel_size": 2},
        *({"new_data_parallel_size": 2, "drain_timeout": t} for t in (-1, 1e9, "nan")),
    ],
)
def test_other_clients_bodies_that_are_refused(site: Site, body: Any) -> None:
    answer = site.client.post("/scale_elastic_ep", json=body)
    assert error_of(answer) == (400, "BadScaleError")


def test_the_applications_own_routes_and_handlers_stay(site: Site) -> None:
    assert site.client.get("/other", params={"number": 4}).json() == 4
    answer = site.client.get("/other", params={"number": "x"})
    assert (answer.status_code, answer.json()) == (418, "their error")
    assert site.client.get("/v1/scale/a/b").status_code == 404
    assert site.client.delete("/v1/scale").status_code == 405


def test_every_route_is_described_and_protected(site: Site) -> None:
    paths = site.client.get("/openapi.json").json()["paths"]
    for route in ROUTES:
        described = paths[route.path][route.method.lower()]
        assert described["summary"] == route.summary
    body = paths["/v1/scale"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = site.client.get("/openapi.json").json()["components"]["schemas"]
    assert schema[body["$ref"].rpartition("/")[2]]["examples"]
    assert site.protected == [route.endpoint.__name__ for route in ROUTES]
    # As SGLang 0.5.23's access control looks for them: the first route that matches.
    for route in ROUTES:
        scope = {"type": "http", "method": route.method, "path": route.path, "root_path": ""}
        found = [each.matches(scope) for each in site.app.router.routes]
        first = next(child for match, child in found if match is Match.FULL)
        assert first["endpoint"] is route.endpoint
