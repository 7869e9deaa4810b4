"""What the OpenAPI document allows and what it forbids, sent to a live server: never a 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from sgl_esft.http.classes import TABLE, RouteClass, RouteTable
from tests.server.exchange import check_answers
from tests.server.schema_cases import ANSWER_TIMEOUT_S, check, fuzz_all
from tests.support.guarded import ADMIN_KEY, CLIENT_KEY, Guarded

pytestmark = pytest.mark.server


def test_no_admin_gets_a_5xx(guarded: Guarded) -> None:
    check(fuzz_all(guarded, 3, ADMIN_KEY, (RouteClass.ADMIN,)))


def test_no_client_gets_a_5xx(guarded: Guarded) -> None:
    check(fuzz_all(guarded, 3, CLIENT_KEY, (RouteClass.CLIENT,)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_5xx_in_a_long_run(guarded: Guarded) -> None:
    for key, route_class in ((CLIENT_KEY, RouteClass.CLIENT), (ADMIN_KEY, RouteClass.ADMIN)):
        check(fuzz_all(guarded, 1000, key, (route_class,)))


def test_the_document_names_no_undeclared_route(guarded: Guarded) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{guarded.server.url}/openapi.json"
    document = requests.get(url, headers=headers, timeout=ANSWER_TIMEOUT_S).json()
    missing = [path for path in document["paths"] if not any(_paths(path))]
    assert missing == []


def _paths(path: str) -> Iterator[bool]:
    yield path in TABLE
    yield path.replace("}", ":path}") in TABLE


def test_what_is_off_stays_off(guarded: Guarded) -> None:
    """Every off route of the table, every method, with the strongest key."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    table = RouteTable()
    off = [each for each in TABLE.values() if each.route_class is RouteClass.OFF]
    assert len(off) > 20
    assert table.enabled == frozenset()
    for declared in off:
        for method in declared.methods - {"WEBSOCKET"}:
            path = declared.path.replace("{", "").replace("}", "")
            answer = requests.request(
                method, f"{guarded.server.url}{path}", headers=headers, json={}, timeout=30
            )
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.json()["error"]["type"] == "UnknownRouteError"
    check_answers(guarded)
