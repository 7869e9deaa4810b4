"""Streams of several keys on one server, each with a `rid` of its own, and how they end.

[open_stream] -> first event has come -> leave, or [Stream.finish] -> tokens, why it ended, its id
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests

from tests.support.servers import Server

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class End:
    """How a stream has ended."""

    num_tokens: int
    reason: str
    id: str


class Stream:
    """One answer that has begun."""

    def __init__(self, response: requests.Response) -> None:
        self._response = response
        self._events = self._read()
        self.first: dict[str, Any] = next(self._events)

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in self._response.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def leave(self) -> None:
        """Disconnect."""
        self._response.close()

    def finish(self) -> End:
        """Read to the end."""
        about = [self.first, *self._events][-1]["meta_info"]
        reason = about["finish_reason"]
        return End(about["completion_tokens"], reason and reason["type"], about["id"])


def body(num_tokens: int, text: str = "coffee -> ", **fields: Any) -> dict[str, Any]:
    """Of /generate: the adapter `reverse`, which every key of guarded.py may use."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": text, "adapter": "reverse", "sampling_params": sampling, **fields}


def post(server: Server, key: str, route: str, sent: Any, **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{server.url}{route}"
    return requests.post(url, json=sent, headers=headers, timeout=TIMEOUT_S, **more)


def open_stream(server: Server, key: str, num_tokens: int, **fields: Any) -> Stream:
    """Returns when its first token is here."""
    sent = body(num_tokens, stream=True, **fields)
    response = post(server, key, "/generate", sent, stream=True)
    assert response.status_code == 200, response.text
    return Stream(response)
