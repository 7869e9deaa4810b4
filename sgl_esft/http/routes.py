"""One way to declare a route of ours, and what the errors of any route are answered with.

    Route --[add_routes]--> the application, in place of SGLang's of the same method and path
      endpoint raises --> [_OurRoute, ErrorAnswers] --> the error's own status, in our shape
    no route of this server --[answer_no_route]--> 404, with what would turn it on
    SGLang's route gets a body of another form --[answer_bad_body]--> 400
    SGLang's route raises ValueError --[answer_invalid_value]--> 400, or 500 where it is our defect
                      anything else --[answer_defect]--> 500, traceback in the log

SGLang checks some values where it uses them, and not all of its routes say so to the client: a
parser that there is not, a prompt longer than the context. The text is not passed on, since it may
repeat what the client sent; the log has it. A ValueError of this package is a defect here.
Who may call a route is declared in classes.py, for all of the server's in one table.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from sgl_esft.errors import BadBodyError, EsftError, InternalError, UnknownRouteError
from sgl_esft.http.answers import as_response

logger = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[..., Any]

_SGLANG = "sglang"
_OURS = frozenset({"sgl_esft", "sgl_elastic", "sgl_esft_kernels"})
# Routes that some servers have: what another says of them, and of all below them.
_ABSENT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("/v1/scale", "/v1/instances"),
        "this server was started without --elastic: start it with --elastic --max-devices N to "
        "scale it (docs/elastic.md)",
    ),
    "/metrics": "this server was started without --enable-metrics",
    **dict.fromkeys(
        ("/v1/adapters", "/v1/memory", "/v1/heat"),
        "this server was started with --no-esft, and so has no adapters",
    ),
}
_UNFIT = BadBodyError(
    "the route cannot use a value of the body or of the address, or the prompt and the tokens that "
    "were asked for are more than the model's context; GET /openapi.json describes the values"
)
_DEFECT = InternalError(
    "the server has failed at this request, which is a defect: its log says where; please report it"
)


@dataclass(frozen=True)
class Route:
    """One route of ours; its endpoint may raise what the ErrorAnswers it is added with know."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    responses: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    tag: str = "adapters"  # of the OpenAPI page
    status: int = 200  # of an answer that the endpoint gives as a value
    max_body_bytes: int = 16 << 10


@dataclass(frozen=True)
class ErrorAnswers:
    """How the errors that a set of routes raises are answered."""

    root: type[Exception]
    answer: Callable[[Any, int | None], Response]  # the error, and a status if not its own
    refuse: Callable[[str], Exception]  # the error of a body or an address that is refused


ESFT_ERRORS: Final = ErrorAnswers(EsftError, as_response, BadBodyError)


def add_routes(
    app: FastAPI,
    routes: Iterable[Route],
    protect: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
    errors: ErrorAnswers = ESFT_ERRORS,
) -> None:
    """Add routes to an application, in place of those of the same path that it has.

    `protect` marks an endpoint for the application's own access control.
    """
    routes = tuple(routes)
    replaced = {(route.path, route.method) for route in routes}
    # Routes of the application itself, not an included router's: SGLang's access control asks each
    # of `app.router.routes` for its endpoint, and an included router has none.
    app.router.routes[:] = [
        *(_made(route, protect, errors) for route in routes),
        *(each for each in app.router.routes if not _is_one_of(each, replaced)),
    ]


def _made(route: Route, protect: Callable[[Endpoint], Endpoint], errors: ErrorAnswers) -> APIRoute:
    return _OurRoute(
        route.path,
        protect(route.endpoint),
        methods=[route.method],
        status_code=route.status,
        summary=route.summary,
        responses=route.responses,
        response_class=JSONResponse,
        operation_id=f"{route.tag}_{route.method.lower()}_{route.endpoint.__name__}",
        tags=[route.tag],
        max_body_size=route.max_body_bytes,
        errors=errors,
    )


def _is_one_of(route: Any, replaced: set[tuple[str, str]]) -> bool:
    methods = getattr(route, "methods", None) or ()
    return len(methods) == 1 and (getattr(route, "path", ""), *methods) in replaced


class _OurRoute(APIRoute):
    """A route whose errors have our shape, whatever handlers the application has."""

    def __init__(
        self, path: str, endpoint: Endpoint, *, errors: ErrorAnswers, **options: Any
    ) -> None:
        self._errors = errors
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with errors turned into answers."""
        handle, errors = super().get_route_handler(), self._errors

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except errors.root as error:
                return errors.answer(error, None)
            except RequestValidationError as error:
                return errors.answer(errors.refuse(_first_fault(error)), None)
            except HTTPException as error:
                return errors.answer(errors.refuse(str(error.detail)), error.status_code)

        return handler


def _first_fault(error: RequestValidationError) -> str:
    """Where the body is wrong and how, without repeating what a client sent."""
    faults = error.errors()
    first = faults[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {first['msg']}{more}; GET /openapi.json describes the body"


async def answer_no_route(request: Request, error: Any) -> Response:
    """Starlette's handler of a 404: a route's own, or that there is none."""
    path = request.scope["path"]
    if "endpoint" in request.scope:
        return JSONResponse({"detail": error.detail}, 404)
    known = (why for start, why in _ABSENT.items() if path == start or path.startswith(start + "/"))
    why = next(known, "this server has no such route; GET /openapi.json lists those it has")
    return as_response(UnknownRouteError(why))


async def answer_bad_body(request: Request, error: Any) -> Response:
    """FastAPI's handler of a body that does not fit the route: 400, where SGLang repeats it."""
    return as_response(BadBodyError(_first_fault(error)))


async def answer_invalid_value(request: Request, error: Exception) -> Response:
    """FastAPI's handler of a ValueError: 400 BadBodyError. Raises what is no client's error."""
    if isinstance(error, EsftError):  # of a hook: a ValueError too, so that SGLang's routes know it
        return as_response(error)
    if not _is_of_sglang(error):
        raise error
    path = request.scope["path"]
    logger.warning("%s refused a value: %s", path, type(error).__name__, exc_info=error)
    return as_response(_UNFIT)


async def answer_defect(request: Request, error: Exception) -> Response:
    """FastAPI's handler of everything else: 500 InternalError.

    Starlette raises the error again behind the answer, and the web server logs its traceback.
    """
    return as_response(_DEFECT)


def _is_of_sglang(error: Exception) -> bool:
    """Whether SGLang's code raised it, or what that called, for a route of SGLang's.

    Frames of FastAPI and the standard library do not count: they do what one of the two asked for.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    known = [package for package in packages if package == _SGLANG or package in _OURS]
    return bool(known) and known[0] == known[-1] == _SGLANG
