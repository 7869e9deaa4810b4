"""What a server does, to be seen: the Observer around it, and the routes that tell of its inside.

http_stack.py -> [observer] -> Observer(gate(SGLang)), metrics and access log where they are on
GET /version
GET /v1/heat, /v1/memory -> SGLang's TokenizerManager -> every rank
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import JSONResponse

from sgl_esft.access.gate import WITHOUT_MODEL
from sgl_esft.http.answers import App
from sgl_esft.http.classes import TABLE, RouteClass
from sgl_esft.http.routes import Route
from sgl_esft.observe.json_logs import AccessLog
from sgl_esft.observe.middleware import Observer
from sgl_esft.observe.request_metrics import RequestMetrics, ready_gauge
from sgl_esft.observe.tier_metrics import HostTierMetrics
from sgl_esft.plugin import engine_hooks
from sgl_esft.tools.versions import versions


def observer(app: App, log_format: str, *, weave: bool, is_ready: Callable[[], bool]) -> Observer:
    """The Observer around an application. By now SGLang has named the folder of its metrics."""
    from sgl_esft import sglang_api

    metrics = RequestMetrics() if sglang_api.has_metrics() else None
    engine_hooks.use(metrics)
    level = logging.getLevelNamesMapping()[sglang_api.http_log_level().upper()]
    log = AccessLog(level) if log_format == "json" else None
    refresh = () if metrics is None else tuple(_refresh(weave, is_ready))
    return Observer(app, runs_model, metrics, log, refresh)


def _refresh(weave: bool, is_ready: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """What publishes, before /metrics is answered, what others keep."""
    if weave:
        from sgl_esft.lifecycle.sglang_engine import engine_of

        host = HostTierMetrics()
        yield lambda: host.set(engine_of(tokenizer_manager()).counters)
    set_ready = ready_gauge()
    yield lambda: set_ready(is_ready())


def tokenizer_manager() -> Any:
    """SGLang's, once the engine has started."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


async def _heat() -> JSONResponse:
    from sgl_esft.plugin import heat_hooks

    return JSONResponse(await heat_hooks.fetch_heat(tokenizer_manager()))


async def _memory() -> JSONResponse:
    """The memory report; `sgl-esft memory` shows it as a table or a picture."""
    from sgl_esft.plugin import memory_hooks

    return JSONResponse((await memory_hooks.fetch_report(tokenizer_manager())).to_json())


async def _version() -> JSONResponse:
    return JSONResponse(versions())


VERSION = Route(
    "GET", "/version", _version, "Versions of this package, of SGLang and of torch", tag="observe"
)

# Of a server that weaves. `sgl-esft memory` shows the report as a table or a picture.
ROUTES = (
    Route(
        "GET",
        "/v1/heat",
        _heat,
        "Tokens of sampled steps by adapter, MoE layer and expert",
        {404: {"description": "`HeatOffError`: the experts are not counted"}},
        tag="observe",
    ),
    Route(
        "GET",
        "/v1/memory",
        _memory,
        "Expert memory of every device: reserved, mapped, shared; who has which slots",
        tag="observe",
    ),
)


def runs_model(method: str, path: str) -> bool:
    """Whether requests of a route are for the model."""
    declared = TABLE.get(path)
    return (
        declared is not None
        and declared.route_class is RouteClass.CLIENT
        and method in ("POST", "PUT")
        and path not in WITHOUT_MODEL
    )
