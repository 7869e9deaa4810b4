"""Every error has one answer, whoever gives it: a route, or an application in front of them."""

from __future__ import annotations

import asyncio
import json

import pytest

from sgl_esft import errors
from sgl_esft.errors import BadBodyError, EsftError, KeyLimitError, NoKeyError, RetryLaterError
from sgl_esft.http.answers import Message, as_response, send_error


def sent(error: EsftError) -> tuple[int, dict[str, str], bytes]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(send_error(send, error))
    start, body = messages
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, body["body"]


@pytest.mark.parametrize("kind", [RetryLaterError, *RetryLaterError.__subclasses__()])
def test_what_may_succeed_later_says_when(kind: type[RetryLaterError]) -> None:
    assert sent(kind("busy"))[1]["retry-after"] == "1"
    assert sent(kind("busy", 6.2))[1]["retry-after"] == "7"


@pytest.mark.parametrize(
    "error",
    [
        NoKeyError("none"),
        KeyLimitError("busy"),
        errors.BodyTooLargeError("9"),
        BadBodyError("\udcff"),
    ],
)
def test_a_route_and_an_application_answer_alike(error: EsftError) -> None:
    status, headers, body = sent(error)
    answer = as_response(error)
    assert (status, headers, body) == (answer.status_code, dict(answer.headers), answer.body)
    assert ("retry-after" in headers) is isinstance(error, RetryLaterError)
    assert headers["content-length"] == str(len(body))
    assert json.loads(body)["error"]["code"] == status == error.http_status
    other = as_response(error, 413)
    assert other.status_code == json.loads(bytes(other.body))["error"]["code"] == 413
