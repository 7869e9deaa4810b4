"""A request past its time ends, with an error, whatever the application does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from sgl_esft.access.gate import Policy
from sgl_esft.http import deadline
from tests.fast.access.asgi import Inner, call, gate, gone, unread

pytestmark = pytest.mark.anyio

SHORT = Policy(request_timeout_s=0.05)
BODY = {"text": "x"}


@pytest.fixture
def inner() -> Inner:
    return Inner()


def test_the_application_hears_that_the_client_has_gone(inner: Inner) -> None:
    answer = call(gate(inner, SHORT), "POST", "/encode", body=BODY)
    assert (answer.status, answer.error) == (504, "RequestTimeoutError")
    assert inner.was_aborted


def test_an_application_that_does_not_listen_is_cancelled(
    inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline.run_within, "__defaults__", (0.05,))
    answer = call(gate(inner, SHORT), "POST", "/classify", body=BODY)
    assert (answer.status, answer.error) == (504, "RequestTimeoutError")


def test_a_stream_ends_with_an_error_event(inner: Inner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline.run_within, "__defaults__", (0.05,))
    answer = call(gate(inner, SHORT), "POST", "/v1/completions", body={"prompt": "x"})
    assert answer.status == 200
    events = answer.body.split(b"\n\n")
    assert events[0] == b"data: 1"
    assert b"RequestTimeoutError" in events[1]
    assert events[2:] == [b""]


async def test_an_error_of_the_application_is_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await deadline.run_within(1.0, app, {}, unread, unread)


async def test_a_cancelled_request_cancels_the_application() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    task = asyncio.create_task(deadline.run_within(60.0, app, {}, unread, unread))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled"]


async def never(*_: Any) -> Any:
    await asyncio.sleep(3600)


async def test_who_waits_for_the_clients_leaving_hears_of_the_deadline() -> None:
    """Several may; and each of them hears it at once, and not when it is cancelled."""
    heard: list[str] = []
    sent: list[Any] = []

    async def listen(receive: Any) -> None:
        heard.append((await receive())["type"])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.gather(listen(receive), listen(receive))

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    async with asyncio.timeout(5):  # far less than the time of grace
        await deadline.run_within(0.02, app, {}, never, send, grace_s=60.0)
    assert sent == [504, None]
    assert heard == ["http.disconnect"] * 2


async def test_a_message_that_is_there_comes_without_a_turn_of_the_loop() -> None:
    """As Starlette's `is_disconnected` asks, by which SGLang sees that a client has gone."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for source, is_gone in ((receive, True), (never, False)):
            assert await Request({"type": "http"}, source).is_disconnected() is is_gone

    await deadline.run_within(5.0, app, {}, gone, never)


async def test_a_timeout_of_the_servers_own_is_its_own() -> None:
    async def late() -> Any:
        raise TimeoutError("the socket")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    with pytest.raises(TimeoutError, match="the socket"):
        await deadline.run_within(5.0, app, {}, late, never)
