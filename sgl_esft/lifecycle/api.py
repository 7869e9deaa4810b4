"""The adapter routes: ours, and in compat.py those that vLLM's and SGLang's clients know.

    operator, dashboard --HTTP--> [ROUTES] --command--> AdapterLibrary
                                     └<-- JSON values <-- Lister

Errors have the shape of all errors of this package and the class's `http_status`. They are made by
the routes' own class, so that the application's handlers for its other routes stay.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from sgl_esft.errors import BadBodyError, EsftError, UnknownAdapterError
from sgl_esft.http.answers import as_response
from sgl_esft.lifecycle.jobs import Job
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.listing import Lister
from sgl_esft.lifecycle.schemas import (
    ADAPTER_EXAMPLE,
    LISTING_EXAMPLE,
    LOADING_EXAMPLE,
    MAX_BODY_BYTES,
    ChangeBody,
    LoadBody,
    error_example,
    example,
)

WAIT_TIMEOUT_S: Final = 600.0

Endpoint: TypeAlias = Callable[..., Any]
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


@dataclass(frozen=True)
class Route:
    """One route."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    responses: dict[int | str, dict[str, Any]] = field(default_factory=dict)


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


class AdapterRoute(APIRoute):
    """A route whose errors have our shape, whatever handlers the application has."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with errors turned into answers."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except EsftError as error:
                return as_response(error)
            except RequestValidationError as error:
                return as_response(BadBodyError(_first_fault(error)))
            except HTTPException as error:
                return as_response(BadBodyError(str(error.detail)), error.status_code)

        return handler


def add_routes(
    app: FastAPI,
    backing_of: Callable[[], Backing],
    routes: tuple[Route, ...] = ROUTES,
    protect: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
) -> None:
    """Add routes to an application, before those of the same path that it has.

    `backing_of` is called for each request: what it answers from may come after the application.
    `protect` marks an endpoint for the application's own access control.
    """
    app.state.esft_adapters = backing_of
    replaced = {(route.path, route.method) for route in routes}
    app.router.routes[:] = [
        *(_made(route, protect) for route in routes),
        *(each for each in app.router.routes if not _is_one_of(each, replaced)),
    ]


def _made(route: Route, protect: Callable[[Endpoint], Endpoint]) -> AdapterRoute:
    return AdapterRoute(
        route.path,
        protect(route.endpoint),
        methods=[route.method],
        summary=route.summary,
        responses=route.responses,
        response_class=JSONResponse,
        operation_id=f"adapters_{route.method.lower()}_{route.endpoint.__name__}",
        tags=["adapters"],
        max_body_size=MAX_BODY_BYTES,
    )


def _is_one_of(route: Any, replaced: set[tuple[str, str]]) -> bool:
    methods = getattr(route, "methods", None) or ()
    return len(methods) == 1 and (getattr(route, "path", ""), *methods) in replaced


def backing(request: Request) -> Backing:
    """What this application's routes answer from."""
    found: Backing = request.app.state.esft_adapters()
    return found


def _first_fault(error: RequestValidationError) -> str:
    """Where the body is wrong and how, without repeating what a client sent."""
    faults = error.errors()
    first = faults[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {first['msg']}{more}; GET /openapi.json describes the body"
