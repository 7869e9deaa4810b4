"""The server is seen from outside of everything: from flags to the Observer around the application.

LaunchPlan -> [install] -> Observer(gate(SGLang)), metrics and access log where they are on
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from sgl_esft.access.gate import WITHOUT_MODEL
from sgl_esft.errors import EsftError
from sgl_esft.http.answers import error_json
from sgl_esft.http.classes import TABLE, RouteClass
from sgl_esft.observe.json_logs import AccessLog
from sgl_esft.observe.middleware import Observer
from sgl_esft.observe.request_metrics import RequestMetrics, ready_gauge
from sgl_esft.observe.tier_metrics import HostTierMetrics
from sgl_esft.plugin import engine_hooks


def install(app: Any, log_format: str, *, weave: bool, is_ready: Callable[[], bool]) -> None:
    """Put the Observer around all of a FastAPI application, a gate included.

    The application builds its middleware when it is first called. By then SGLang has named the
    folder of its processes' metrics, so they are made then.
    """
    build = app.build_middleware_stack

    def build_observed() -> Observer:
        from sgl_esft import sglang_api

        metrics = RequestMetrics() if sglang_api.has_metrics() else None
        engine_hooks.use(metrics)
        level = logging.getLevelNamesMapping()[sglang_api.http_log_level().upper()]
        log = AccessLog(level) if log_format == "json" else None
        refresh = () if metrics is None else tuple(_refresh(weave, is_ready))
        return Observer(build(), runs_model, metrics, log, refresh)

    app.build_middleware_stack = build_observed


def _refresh(weave: bool, is_ready: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """What publishes, before /metrics is answered, what others keep."""
    if weave:
        from sgl_esft.lifecycle.sglang_engine import engine_of

        host = HostTierMetrics()
        yield lambda: host.set(engine_of(_tokenizer_manager()).counters)
    set_ready = ready_gauge()
    yield lambda: set_ready(is_ready())


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def add_routes(app: Any) -> None:
    """GET /v1/heat."""
    app.add_api_route(
        "/v1/heat",
        _heat,
        methods=["GET"],
        summary="Tokens of sampled steps by adapter, MoE layer and expert",
        responses={404: {"description": "`HeatOffError`: the experts are not counted"}},
    )


async def _heat() -> Response:
    from sgl_esft.plugin import heat_hooks

    try:
        report = await heat_hooks.fetch_heat(_tokenizer_manager())
    except EsftError as error:
        return Response(error_json(error), error.http_status, media_type="application/json")
    return JSONResponse(report)


def runs_model(method: str, path: str) -> bool:
    """Whether requests of a route are for the model."""
    declared = TABLE.get(path)
    return (
        declared is not None
        and declared.route_class is RouteClass.CLIENT
        and method in ("POST", "PUT")
        and path not in WITHOUT_MODEL
    )
