"""The adapter routes: ours, and in compat.py those that vLLM's and SGLang's clients know.

    operator, dashboard --HTTP--> [ROUTES] --command--> AdapterLibrary
                                     └<-- JSON values <-- Lister

Errors have the shape of all errors of this package and the class's `http_status`: http/routes.py.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from sgl_esft.errors import UnknownAdapterError
from sgl_esft.http.routes import Route
from sgl_esft.lifecycle.jobs import Job
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.listing import Lister
from sgl_esft.lifecycle.schemas import (
    ADAPTER_EXAMPLE,
    LISTING_EXAMPLE,
    LOADING_EXAMPLE,
    ChangeBody,
    LoadBody,
    error_example,
    example,
)

WAIT_TIMEOUT_S: Final = 600.0

Wait: TypeAlias = Annotated[
    bool, Query(description="Answer when the work has ended, with its result or its error.")
]


class AsciiJson(JSONResponse):
    """JSON of ASCII only: a message may name a file whose name is not Unicode."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False).encode()


@dataclass(frozen=True)
class Backing:
    """What the routes of one application answer from."""

    library: AdapterLibrary
    lister: Lister


async def list_adapters(request: Request) -> Any:
    """Every adapter that is loaded, being loaded, or below --adapter-root."""
    return AsciiJson(await backing(request).lister.list_all())


async def show_adapter(request: Request, name: str) -> Any:
    """One adapter as it is now."""
    return await _record(request, name, 200)


async def load_adapter(request: Request, body: LoadBody, wait: Wait = False) -> Any:
    """Begin to load an adapter; 200 if this content is loaded already."""
    job = await backing(request).library.load(body.name, body.path, pinned=body.pinned)
    return await _answer(request, job, body.name, wait=wait, done=201)


async def change_adapter(request: Request, name: str, body: ChangeBody, wait: Wait = False) -> Any:
    """Pin, unpin or replace an adapter. Requests in flight end on the version they began.

    One that was evicted is loaded for it.
    """
    library = backing(request).library
    job: Job | None = None
    if body.replaces:
        job = await library.replace(name, body.path, pinned=body.pinned)
    elif body.pinned is not None:
        job = await library.set_pinned(name, body.pinned)
    return await _answer(request, job, name, wait=wait, done=200)


async def unload_adapter(request: Request, name: str, wait: Wait = False) -> Any:
    """Unload an adapter once the last request that uses it has ended.

    A load or a replacement of it that goes on ends first. The folder stays; no request loads it
    again until somebody asks for that, or the folder changes.
    """
    job = backing(request).library.unload(name)
    if job is not None and not wait:
        with contextlib.suppress(UnknownAdapterError):  # it has ended by now
            return await _record(request, name, 202)
    elif job is not None:
        await job.wait(WAIT_TIMEOUT_S)
    return Response(status_code=204)


async def _answer(request: Request, job: Job | None, name: str, *, wait: bool, done: int) -> Any:
    if job is None:
        return await _record(request, name, 200)
    if not wait:
        return await _record(request, name, 202)
    await job.wait(WAIT_TIMEOUT_S)
    return await _record(request, name, done)


async def _record(request: Request, name: str, status: int) -> Response:
    found = await backing(request).lister.show(name)
    headers = {} if status == 200 else {"Location": f"/v1/adapters/{name}"}
    return AsciiJson(found, status_code=status, headers=headers)


_BAD = error_example("The body, the name or the folder", "AdapterPathError", 400, "...")
_UNKNOWN = error_example("No such adapter", "UnknownAdapterError", 404, "adapter 'x' is not known")
_CONFLICT = error_example(
    "Other work on it goes on, or other content is loaded",
    "AdapterBusyError",
    409,
    "adapter 'math' is loading: ask again when that has ended",
)
_LATER = error_example(
    "No room now", "NoFreeSlotError", 503, "every adapter slot is pinned or in use"
)
_ADAPTER = example("The adapter", ADAPTER_EXAMPLE)
_BEGUN = example("Begun; Location says where to look", LOADING_EXAMPLE)
_ERRORS: dict[int | str, dict[str, Any]] = {400: _BAD, 409: _CONFLICT, 503: _LATER}

ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/v1/adapters",
        list_adapters,
        "All adapters, and the room they have",
        {200: example("The adapters", LISTING_EXAMPLE)},
    ),
    Route(
        "POST",
        "/v1/adapters",
        load_adapter,
        "Load an adapter",
        {
            200: example("Loaded already", ADAPTER_EXAMPLE),
            201: example("Loaded; with wait", ADAPTER_EXAMPLE),
            202: _BEGUN,
            **_ERRORS,
        },
    ),
    Route(
        "GET",
        "/v1/adapters/{name}",
        show_adapter,
        "One adapter",
        {200: _ADAPTER, 404: _UNKNOWN},
    ),
    Route(
        "PATCH",
        "/v1/adapters/{name}",
        change_adapter,
        "Pin, unpin or replace a loaded adapter",
        {200: _ADAPTER, 202: _BEGUN, 404: _UNKNOWN, **_ERRORS},
    ),
    Route(
        "DELETE",
        "/v1/adapters/{name}",
        unload_adapter,
        "Unload an adapter",
        {
            202: example("Begun", {**ADAPTER_EXAMPLE, "state": "draining"}),
            204: {"description": "Not loaded any more"},
            404: _UNKNOWN,
            503: _LATER,
        },
    ),
)


def backing(request: Request) -> Backing:
    """What this application's routes answer from."""
    found: Backing = request.app.state.esft_adapters()
    return found
