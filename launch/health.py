"""Health and the end of the server: from flags to the service around SGLang's application.

flags.py -> HealthFlags -> [prepare] -> heartbeats, in the environment -> [install] -> Service
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Body
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sgl_esft import env
from sgl_esft.errors import ConfigError
from sgl_esft.health import ending, load_file, process
from sgl_esft.health.engine import Engine, PlainEngine
from sgl_esft.health.heartbeat import HeartbeatTable
from sgl_esft.health.processes import kill_children
from sgl_esft.health.service import CrashDump, Service, Times
from sgl_esft.http.routes import Route, add_routes

DEFAULT_READY_TIMEOUT_S = 2.0
DEFAULT_DRAIN_TIMEOUT_S = 30.0
DEFAULT_HANG_TIMEOUT_S = 60.0
MAX_DRAIN_S = 86_400.0
# SGLang's dumps of schedulers before it ends; on unless they are set, and a minute long.
_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
_DUMP_S = 30.0  # SGLang waits 5 s, then py-spy reads one process after the other
_SLEEP_S = 1.0  # of an idle rank; a shorter time would call it lost


@dataclass(frozen=True)
class HealthFlags:
    """The command line's part."""

    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S


def add_flags(group: argparse._ArgumentGroup) -> None:
    """The flags of health and drain."""
    group.add_argument(
        "--ready-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_READY_TIMEOUT_S,
        help="GET /readyz answers 503 when a rank has made no step, and given no sign of being "
        "idle, for so long; more than a batch takes (default: %(default)g)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_DRAIN_TIMEOUT_S,
        help="after SIGTERM, SIGINT or POST /v1/drain, requests that run may take so long; then "
        "they end with an error (default: %(default)g)",
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_HANG_TIMEOUT_S,
        help="a process that gives no sign of life for so long is lost, and the server ends with "
        "status 70; with --elastic a rank is replaced instead. More than the longest batch takes "
        "(default: %(default)g; with --elastic 20)",
    )


def read_flags(found: argparse.Namespace) -> HealthFlags:
    """Raises ConfigError."""
    flags = HealthFlags(found.ready_timeout, found.drain_timeout, found.hang_timeout)
    if not _SLEEP_S < flags.ready_timeout_s < math.inf:
        raise ConfigError(
            f"--ready-timeout {flags.ready_timeout_s:g}: must be above {_SLEEP_S:g} s, for which "
            "an idle rank may sleep"
        )
    if not 0 <= flags.drain_timeout_s < math.inf:
        raise ConfigError(f"--drain-timeout {flags.drain_timeout_s:g}: must be 0 s or more")
    if not flags.ready_timeout_s <= flags.hang_timeout_s < math.inf:
        raise ConfigError(
            f"--hang-timeout {flags.hang_timeout_s:g}: must be at least --ready-timeout, "
            f"{flags.ready_timeout_s:g} s"
        )
    return flags


def prepare() -> HeartbeatTable:
    """What this process shares with its children, and who removes what they leave.

    Before SGLang is imported. Returns the heartbeat table.
    """
    ending.track_apart()
    heartbeats = HeartbeatTable.create()
    os.environ[env.HEARTBEAT_TABLE] = str(heartbeats.path)
    os.environ[env.LOAD_FILE] = load_file.create()
    for name in _DUMPS:
        os.environ.setdefault(name, "0")
    return heartbeats


def install(
    app: Any,
    flags: HealthFlags,
    heartbeats: HeartbeatTable,
    manager: Callable[[], Any],
    engine: Engine | None,
) -> Service:
    """The service and its routes.

    `manager()` is SGLang's tokenizer manager once there is one. `engine` None: SGLang's own ranks.
    """

    def stop_server() -> None:
        _stop_server(manager(), service.life.exit_status)

    times = Times(flags.ready_timeout_s, flags.drain_timeout_s, flags.hang_timeout_s)
    dump = CrashDump(lambda: manager().dump_requests_before_crash(), dump_s())
    service = Service(
        times,
        heartbeats,
        engine or PlainEngine(heartbeats, manager),
        stop_server,
        crash_dump=dump,
    )
    process.use(service)
    add_routes(app, routes_of(service))
    return service


def dump_s() -> float:
    """How long the dumps of schedulers may take that the operator has asked SGLang for."""
    from sglang.srt.environ import envs

    pyspy, core = (getattr(envs, name).get() for name in _DUMPS)
    wait_s = float(envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS.get()) if core else 0.0
    return _DUMP_S + wait_s if pyspy or core else 0.0


class DrainBody(BaseModel):
    """How long running requests may take; without it, --drain-timeout."""

    model_config = ConfigDict(extra="forbid")
    timeout_s: float | None = Field(default=None, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False)


def routes_of(service: Service) -> tuple[Route, ...]:
    """The routes over a service."""

    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    async def readyz() -> JSONResponse:
        found = service.readiness()
        return JSONResponse(found.to_json(), status_code=200 if found.is_ready else 503)

    async def drain(body: Annotated[DrainBody | None, Body()] = None) -> dict[str, Any]:
        service.drain(body.timeout_s if body else None)
        return {
            "state": str(service.life.phase),
            "in_flight": service.num_in_flight,
            "timeout_s": round(service.drain_left_s(), 3),
        }

    return (
        Route("GET", "/healthz", healthz, "Alive: the process answers", tag="health"),
        Route(
            "GET",
            "/readyz",
            readyz,
            "Ready: every rank and the detokenizer are at work, and new requests are taken",
            {503: {"description": "Not ready; `reason` says why"}},
            tag="health",
        ),
        Route(
            "POST",
            "/v1/drain",
            drain,
            "Take no new requests, answer those that run, then end the server",
            {409: {"description": "The server still starts: again after `Retry-After`"}},
            tag="health",
            status=202,
        ),
    )


def _stop_server(manager: Any, status: int) -> None:
    """Make SGLang's HTTP server return, or end without it."""
    for task in manager.asyncio_tasks:  # they would be destroyed while they wait
        task.cancel()
    if manager._server_stop_hook is None:
        kill_children()
        os._exit(status)
    manager._server_stop_hook()
