"""The real layers around an application, without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from fastapi import FastAPI

from sgl_esft.access.gate import Policy
from sgl_esft.errors import EsftError
from sgl_esft.fields.rules import ModelBounds
from sgl_esft.observe.middleware import Observer
from sgl_esft_launch import http_stack
from sgl_esft_launch.access import AccessPlan
from sgl_esft_launch.observe import runs_model

OPEN = AccessPlan(Policy(), None, lambda: Policy().keys)  # no keys


@dataclass
class Control:
    """A server that takes every request, or refuses work."""

    error: EsftError | None = None

    def begin(self) -> None:
        pass

    def refusal(self) -> EsftError | None:
        return self.error

    @contextmanager
    def in_flight(self) -> Iterator[asyncio.Future[EsftError]]:
        yield asyncio.get_running_loop().create_future()


def install(app: FastAPI, plan: AccessPlan = OPEN, **parts: Any) -> FastAPI:
    """As a launch does; `parts` are more of http_stack.Parts."""
    http_stack.install(
        app,
        http_stack.Parts(
            observer=partial(Observer, runs_model=runs_model),
            access=plan,
            bounds=lambda: ModelBounds(300, 1000),
            **{"control": Control(), **parts},
        ),
    )
    return app


Call = tuple[str, str, str | None, Any]  # method, path, key, JSON body


async def answers(app: Callable[..., Any], calls: Sequence[Call], **more: Any) -> list[Any]:
    """What each call is answered, one after the other."""
    transport = httpx.ASGITransport(app=app, **more)
    found = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for method, path, key, body in calls:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            found.append(await client.request(method, path, headers=headers, json=body))
    return found


def statuses(app: Callable[..., Any], calls: Sequence[Call], **more: Any) -> list[int]:
    """The status of each."""
    return [answer.status_code for answer in asyncio.run(answers(app, calls, **more))]
