"""The application that a launch would serve, with our routes only and without an engine.

    serve.run with an empty application in the place of SGLang's -> [openapi] -> OpenAPI document

So a route is in the reference because the launch installs it, not because it is listed somewhere.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, cast

from fastapi import FastAPI

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_esft.health.heartbeat import HeartbeatTable
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import console, elastic, flags, plan, serve

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"


def openapi() -> dict[str, Any]:
    """The document of every route that this package and the elastic runtime install."""
    app = FastAPI(title="sgl-esft", version="1", docs_url=None, redoc_url=None, openapi_url=None)
    _run_without_engine(app)
    # It needs its coordinator when it is called, and it is not.
    elastic.add_scale_routes(app, cast("Coordinator", None), lambda: ())
    return app.openapi()


def _run_without_engine(app: FastAPI) -> None:
    """Everything that `serve.run` does around SGLang's server."""
    from sglang.srt import entrypoints, utils

    parsed, argv = flags.parse(["--port", str(pick_free_port()), "--enable-metrics"])
    launch = plan.plan_launch(parsed, argv)
    stand_in = ModuleType(_HTTP_SERVER)
    stand_in.__dict__.update(app=app, launch_server=lambda *_, **__: None)
    real = sys.modules.get(_HTTP_SERVER)
    kill = utils.kill_process_tree
    sys.modules[_HTTP_SERVER] = entrypoints.http_server = stand_in
    utils.kill_process_tree = lambda *_, **__: None
    try:
        serve.run(launch, None, console.Progress(), HeartbeatTable.create())
    finally:
        utils.kill_process_tree = kill
        del sys.modules[_HTTP_SERVER], entrypoints.http_server
        if real is not None:
            sys.modules[_HTTP_SERVER] = entrypoints.http_server = real
