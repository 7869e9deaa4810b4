"""One client's request ids, and its leaving, end nobody else's requests."""

from __future__ import annotations

import pytest

from tests.server.streams import body, open_stream, post
from tests.support.guarded import ADMIN_KEY, CLIENT_KEY, TENANT_KEY, Guarded

pytestmark = pytest.mark.server

LONG = 200


def test_who_leaves_ends_none_but_its_own(guarded: Guarded) -> None:
    """SGLang aborts by the beginning of an id, so "ab" would end "abc123"."""
    other = open_stream(guarded.server, TENANT_KEY, LONG, rid="abc123")
    plain = open_stream(guarded.server, TENANT_KEY, LONG)
    for rid in ("ab", *"0123456789abcdef"):
        open_stream(guarded.server, CLIENT_KEY, LONG, rid=rid).leave()
    end = other.finish()
    assert (end.num_tokens, end.reason, end.id) == (LONG, "length", "abc123")
    end = plain.finish()
    assert (end.num_tokens, end.reason) == (LONG, "length")


def test_a_key_may_call_requests_what_others_do(guarded: Guarded) -> None:
    """And a second of its own under the same id is refused, as SGLang does."""
    streams = [
        open_stream(guarded.server, key, LONG, rid="one") for key in (CLIENT_KEY, TENANT_KEY)
    ]
    twice = post(guarded.server, CLIENT_KEY, "/generate", body(1, rid="one"))
    assert twice.status_code == 400
    assert "'one' is running" in twice.text
    ends = [stream.finish() for stream in streams]
    assert {(end.num_tokens, end.reason, end.id) for end in ends} == {(LONG, "length", "one")}
    again = post(guarded.server, CLIENT_KEY, "/generate", body(1, rid="one"))
    assert again.json()["meta_info"]["id"] == "one"


def test_who_aborts_names_its_own(guarded: Guarded) -> None:
    """A rid of another key, a beginning, or nothing: nobody's request ends."""
    others = open_stream(guarded.server, TENANT_KEY, LONG, rid="mine")
    own = open_stream(guarded.server, ADMIN_KEY, LONG, rid="mine too")
    longer = open_stream(guarded.server, ADMIN_KEY, LONG, rid="mine too, and longer")
    for rid in ("mine", "m", "", "0"):
        answer = post(guarded.server, ADMIN_KEY, "/abort_request", {"rid": rid})
        assert answer.status_code == 200
    assert post(guarded.server, TENANT_KEY, "/abort_request", {"rid": "mine"}).status_code == 403
    post(guarded.server, ADMIN_KEY, "/abort_request", {"rid": "mine too"})
    assert own.finish().reason == "abort"
    assert [stream.finish().num_tokens for stream in (others, longer)] == [LONG, LONG]


def test_every_route_answers_with_the_clients_ids(guarded: Guarded) -> None:
    batch = body(1, ["a -> ", "b -> "])
    listed = post(guarded.server, CLIENT_KEY, "/generate", {**batch, "rid": ["x", "y"]}).json()
    named = post(guarded.server, CLIENT_KEY, "/generate", {**batch, "rid": "x"}).json()
    assert [each["meta_info"]["id"] for each in listed + named] == ["x", "y", "x_0", "x_1"]
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for route, asked in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "rid": "mine"}),
        ("/v1/chat/completions", {**chat, "max_tokens": 1, "rid": "mine"}),
    ):
        answer = post(guarded.server, CLIENT_KEY, route, {"model": "base", **asked})
        assert (answer.status_code, answer.json()["id"]) == (200, "mine"), answer.text


def test_sessions_are_for_admins(guarded: Guarded) -> None:
    for field in ({"session_params": {"id": "s"}}, {"session_id": "s"}):
        answer = post(guarded.server, CLIENT_KEY, "/generate", body(1, **field))
        assert answer.status_code == 403
        assert "sessions are for the admin key" in answer.text
