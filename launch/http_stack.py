"""What every request passes, as one list, and the application that it is put around.

    client -> Observer -> ErrorShape -> Gate -> RequestIds -> Admission -> AdapterNames
           -> NamedErrors -> SGLang's own -> TextJobs -> routes

The list is around SGLang's middleware too, whatever SGLang adds later; TextJobs is inside it.
The gate reads a body once; `http.body.body_of` has it for those behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware

from sgl_esft import __version__
from sgl_esft.access.gate import WITHOUT_MODEL, Gate
from sgl_esft.access.limits import KeyLimits
from sgl_esft.fields import table
from sgl_esft.fields.rules import ModelBounds
from sgl_esft.http.adapter_names import AdapterNames, Ensure, KnownNames
from sgl_esft.http.admission import Admission, AdmissionControl
from sgl_esft.http.answers import App
from sgl_esft.http.classes import check_routes, routes_of
from sgl_esft.http.error_shape import ErrorShape
from sgl_esft.http.request_ids import RequestIds
from sgl_esft.http.routes import (
    answer_bad_body,
    answer_defect,
    answer_invalid_value,
    answer_no_route,
)
from sgl_esft.http.text_jobs import TextJobs
from sgl_esft.http.time_limit import NamedErrors
from sgl_esft_launch.access import AccessPlan

Layer: TypeAlias = Callable[[App], App]


@dataclass(frozen=True)
class Parts:
    """What the layers are made of."""

    observer: Layer
    access: AccessPlan
    bounds: Callable[[], ModelBounds]
    control: AdmissionControl
    names: Callable[[], KnownNames] | None = None  # that requests may use; None: weaving is off
    ensure: Ensure | None = None
    refused_routes: Collection[str] = ()  # of SGLang, that this server cannot serve


def layers(parts: Parts) -> list[Layer]:
    """Outermost first."""
    plan = parts.access
    return [
        parts.observer,
        ErrorShape,
        partial(
            Gate,
            policy=plan.policy,
            limits=KeyLimits(time.monotonic),
            bounds=parts.bounds,
            names=parts.names,
            inner_key=plan.inner_key,
            keys=plan.keys,
        ),
        RequestIds,
        partial(Admission, control=parts.control),
        partial(AdapterNames, ensure=parts.ensure, refused_routes=parts.refused_routes),
        NamedErrors,
    ]


def install(app: Any, parts: Parts) -> None:
    """Put the layers around all of a FastAPI application. Raises UndeclaredRouteError.

    The application builds its middleware when it is first called, with `build_middleware_stack`;
    so SGLang's is inside, and what needs the started engine is made then.
    """
    check_routes(routes_of(app.router.routes), parts.access.policy.table)
    table.routes()  # derived now, not while the first request waits
    app.title, app.version = "sgl-esft", __version__
    app.add_exception_handler(404, answer_no_route)
    app.add_exception_handler(RequestValidationError, answer_bad_body)
    app.add_exception_handler(ValueError, answer_invalid_value)
    app.add_exception_handler(Exception, answer_defect)
    # The last one is the innermost: SGLang's own middleware counts in the front, not in a job.
    app.user_middleware.append(
        Middleware(
            TextJobs, fastapi=app, routes=WITHOUT_MODEL, timeout_s=parts.access.text_timeout_s
        )
    )
    build = app.build_middleware_stack

    def build_inside() -> App:
        inside: App = build()
        for layer in reversed(layers(parts)):
            inside = layer(inside)
        return inside

    app.build_middleware_stack = build_inside
