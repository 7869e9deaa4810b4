"""Odd values in every field of every open route: the server is ready, and others' tokens the same.

As many cases as fit into SHORT_S in `make test`, an hour of them against a plain and against an
elastic server in `make test-soak`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator

import pytest
import requests
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.server.exchange import ANSWER_TIMEOUT_S, check_answers
from tests.support.guarded import ADMIN_KEY, Guarded
from tests.support.request_fuzz.cases import (
    BODIES,
    LONG,
    VALUES,
    Case,
    Field,
    fields_of,
    open_routes,
    pair_cases,
    single_cases,
    taking_turns,
)
from tests.support.request_fuzz.run import Outcome, Run, Size

pytestmark = pytest.mark.server

SHORT_S = 30.0
HOUR_S = 3600.0
WARM_UP_S = 300.0  # caches fill, threads of pools start
# The allocator keeps what long prompts once took.
MOST_GROWTH = 1.10
SHOWN = 3  # findings; those that follow a death say little
MOST_HEALTH_S = 2.0  # docs/http.md says 1 s; a test has the machine not to itself
FEW = 8  # connections that are open at the moment


def fields(guarded: Guarded) -> list[Field]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{guarded.server.url}/openapi.json"
    document = requests.get(url, headers=headers, timeout=ANSWER_TIMEOUT_S).json()
    return fields_of(document, list(inspect.signature(SamplingParams).parameters))


def carried_out(guarded: Guarded, cases: Iterator[Case], seconds: float) -> Outcome:
    outcome = Run(guarded, cases, seconds).carry_out()
    assert outcome.findings == [], "\n".join([*outcome.findings[:SHOWN], guarded.server.log()])
    assert outcome.num_streams > 3
    check_answers(guarded)
    return outcome


def shuffled(guarded: Guarded, seed: int) -> Iterator[Case]:
    """The single cases in an order of chance, a pair after each, then pairs without end."""
    found = fields(guarded)
    rng = random.Random(seed)
    singles = list(single_cases(found))
    rng.shuffle(singles)
    return taking_turns(iter(singles), pair_cases(found, rng))


def test_every_open_route_has_a_small_body() -> None:
    assert sorted(BODIES) == open_routes()


def test_a_pairs_second_value_is_put_in_once() -> None:
    """Also into a list of many: a body of it 50,000 times would end this process."""
    for value in VALUES:
        puts = ((("messages",), value), (("messages", 0, "content"), LONG))
        assert Case("/v1/chat/completions", puts).body().count(LONG.encode()) <= 2  # one is a value


def test_the_document_and_the_engine_name_the_fields(guarded: Guarded) -> None:
    """Fields at every depth are found, so that a search has something to search."""
    names = {field.name for field in fields(guarded)}
    assert {
        "/generate sampling_params.top_k",
        "/generate priority",
        "/v1/chat/completions messages.0.content.0.text",
        "/v1/chat/completions tools.0.function.parameters",
        "/v1/messages messages.0.role",
    } <= names
    assert len(names) > 500


def test_odd_values(guarded: Guarded) -> None:
    cases = shuffled(guarded, seed=1)
    assert carried_out(guarded, cases, SHORT_S).num_cases > len(VALUES)


def _hour(guarded: Guarded) -> None:
    cases = shuffled(guarded, seed=2)
    pid = guarded.server.process.pid
    carried_out(guarded, cases, WARM_UP_S)
    before = Size.of(pid)
    outcome = carried_out(guarded, cases, HOUR_S - WARM_UP_S)
    after = Size.of(pid)
    shown = f"{outcome}\nbefore {before}\nafter {after}"
    print(shown)  # noqa: T201
    assert outcome.worst_health_s <= MOST_HEALTH_S, shown
    assert after.rss_bytes <= before.rss_bytes * MOST_GROWTH, shown
    assert after.num_descriptors <= before.num_descriptors + FEW, shown
    assert after.num_threads <= before.num_threads + FEW, shown


@pytest.mark.soak
@pytest.mark.timeout(2 * HOUR_S)
def test_an_hour_of_them(guarded: Guarded) -> None:
    _hour(guarded)


@pytest.mark.soak
@pytest.mark.timeout(2 * HOUR_S)
def test_an_hour_of_them_on_an_elastic_server(guarded_elastic: Guarded) -> None:
    _hour(guarded_elastic)
