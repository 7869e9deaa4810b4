"""Hostile inputs and random cases on an elastic server: its routes, and some of all the others.

The front is the plain server's, on which test_hostile.py and test_schema_fuzz.py send all of them.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import requests

from sgl_esft.http.classes import RouteClass
from tests.server.exchange import check_answers, check_row
from tests.server.hostile_inputs import rows
from tests.server.schema_cases import check, fuzz_all, on_any_server
from tests.support.guarded import ADMIN_KEY, CLIENT_KEY, Guarded

pytestmark = pytest.mark.server

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}
SCALE_TIMEOUT_S = 120.0
SCALE_WORDS = ("scale", "scaling", "instances")


def about_scales(label: str) -> bool:
    return any(word in label for word in SCALE_WORDS)


def scaled(guarded: Guarded, dp_size: int) -> dict[str, Any]:
    """Once no scale runs: the operation that led to this size."""
    url = f"{guarded.server.url}/v1/scale"
    deadline = time.monotonic() + SCALE_TIMEOUT_S
    while time.monotonic() < deadline:
        answer = requests.post(url, json={"dp_size": dp_size}, headers=HEADERS, timeout=30)
        if answer.status_code == 202:
            return _ended(f"{url}/{answer.json()['id']}", deadline)
        assert answer.status_code == 409, answer.text  # one of the random cases still runs
        time.sleep(0.5)
    raise AssertionError("a scale does not end")


def _ended(url: str, deadline: float) -> dict[str, Any]:
    while time.monotonic() < deadline:
        operation: dict[str, Any] = requests.get(url, headers=HEADERS, timeout=30).json()
        if operation["state"] not in ("pending", "running"):
            return operation
        time.sleep(0.1)
    raise AssertionError(f"{url} does not end")


@pytest.mark.parametrize("part", range(8))
def test_some_hostile_inputs(part: int, guarded_elastic: Guarded) -> None:
    """Eight times an eighth of an eighth."""
    for row in rows()[part::64]:
        check_row(row, guarded_elastic)


@pytest.mark.soak
def test_every_hostile_input(guarded_elastic: Guarded) -> None:
    for row in rows():
        check_row(row, guarded_elastic)


def test_scales_at_random_get_no_5xx(guarded_elastic: Guarded) -> None:
    check(fuzz_all(guarded_elastic, 20, ADMIN_KEY, (RouteClass.ADMIN,), about_scales))
    for dp_size in (2, 1):
        assert scaled(guarded_elastic, dp_size)["state"] == "succeeded"
        check_answers(guarded_elastic)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_5xx_in_a_long_run(guarded_elastic: Guarded) -> None:
    for key, route_class in ((CLIENT_KEY, RouteClass.CLIENT), (ADMIN_KEY, RouteClass.ADMIN)):
        check(fuzz_all(guarded_elastic, 30, key, (route_class,), on_any_server))
