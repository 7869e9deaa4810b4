"""The scaling routes, ours and those that vLLM's and SGLang's clients know.

    operator, autoscaler --HTTP--> [ROUTES] --ScaleRequest--> Coordinator.submit
                                      └<-- Operation.to_json <-- Journal

Routes are data here; the launcher adds them to the application that it serves, and they answer from
its `state.elastic`. Errors are OpenAI's, `{"error": {"message", "type": class name, "param",
"code"}}`, with the class's `http_status` (answer_error).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeAlias

from fastapi import Header, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.coordinator.operations import Operation, PhaseRecord, StepRecord, StepState
from sgl_elastic.coordinator.schemas import (
    MAX_KEY_LENGTH,
    ScaleBody,
    SglangScaleBody,
    VllmScaleBody,
    error_example,
    example,
)
from sgl_elastic.errors import BusyError, ElasticError
from sgl_elastic.instance.spares import SpareMemory
from sgl_elastic.instance.state import Instance
from sgl_elastic.types import OperationState, ScaleRequest, StepKind

POLL_S = 0.05

Endpoint: TypeAlias = Callable[..., Any]
IdempotencyKey: TypeAlias = Annotated[str | None, Header(max_length=MAX_KEY_LENGTH)]


@dataclass(frozen=True)
class Backing:
    """What the routes of one application answer from."""

    coordinator: Coordinator
    list_instances: Callable[[], Iterable[Instance]]
    list_spares: Callable[[], Iterable[SpareMemory]] = tuple


@dataclass(frozen=True)
class ScaleRoute:
    """One route, as the launcher adds it."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    responses: dict[int | str, dict[str, Any]] = field(default_factory=dict)


# Synchronous endpoints run in a thread: planning does not stop the event loop's streams.
def start_scale(request: Request, body: ScaleBody, idempotency_key: IdempotencyKey = None) -> Any:
    """Plan a scale and start it; with `dry_run`, only say what it would do."""
    wanted = body.to_request(idempotency_key)
    operation = _coordinator(request).submit(wanted)
    if wanted.dry_run:
        return JSONResponse(operation.plan)
    headers = {"Location": f"/v1/scale/{operation.operation_id}"}
    return JSONResponse(operation.to_json(), status_code=202, headers=headers)


def show_scale(request: Request, operation_id: str) -> Any:
    """One operation as it is now."""
    return JSONResponse(_coordinator(request).journal.get(operation_id).to_json())


def list_scales(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> Any:
    """The last operations, the newest first."""
    coordinator = _coordinator(request)
    running = coordinator.running()
    return JSONResponse(
        {
            "running": running.operation_id if running else None,
            "operations": [each.to_json() for each in coordinator.journal.last(limit)],
        }
    )


def list_instances(request: Request) -> Any:
    """The instances: the one that serves, standbys, and those that come and go."""
    backing = _backing(request)
    instance_id, placement = backing.coordinator.serving
    redundancy = backing.coordinator.redundancy
    return JSONResponse(
        {
            "serving": {"instance_id": instance_id, "placement": asdict(placement)},
            "instances": [asdict(each) for each in backing.list_instances()],
            "spares": [asdict(each) for each in backing.list_spares()],
            "redundant_experts": redundancy.report() if redundancy is not None else None,
        }
    )


async def scale_elastic_ep(request: Request, body: VllmScaleBody | SglangScaleBody) -> Any:
    """The route of vLLM and of SGLang; the body's field says whose client asks."""
    coordinator = _coordinator(request)
    old_size = coordinator.serving[1].dp_size
    if isinstance(body, SglangScaleBody):
        new_size = body.new_ep_size
        operation = await run_in_threadpool(coordinator.submit, ScaleRequest(dp_size=new_size))
        said = {"message": f"Scaling from {old_size} to {new_size} ranks"}
        sizes = {"old_ep_size": old_size, "new_ep_size": new_size}
        return JSONResponse({**said, **sizes, "id": operation.operation_id})
    new_size = body.new_data_parallel_size
    operation = await run_in_threadpool(coordinator.submit, ScaleRequest(dp_size=new_size))
    ended = await _ended(coordinator, operation, body.drain_timeout)
    return _vllm_answer(ended, new_size, body.drain_timeout)


async def is_scaling_elastic_ep(request: Request) -> Any:
    """vLLM's answer and SGLang's in one."""
    coordinator = _coordinator(request)
    running = coordinator.running()
    last = next(iter(coordinator.journal.last(1)), None)
    return JSONResponse(
        {
            "is_scaling_elastic_ep": running is not None,
            "effective_ep_size": coordinator.serving[1].dp_size,
            "pending_ep_size": running.request.dp_size if running else None,
            "scale_phase": running.phase if running else "idle",
            "last_error": last.error.message if last and last.error else None,
        }
    )


_BAD = error_example(
    "The request makes no sense or does not fit", "BadScaleError", 400, "dp_size is 0"
)
_BUSY = error_example(
    "Another scale runs, or the key was used", "BusyError", 409, "scale-0c is running"
)
_UNKNOWN = error_example(
    "No such operation", "UnknownOperationError", 404, "no scale operation has..."
)
_SHOWN = Operation(
    "scale-0c5f1e9a7b21",
    ScaleRequest(dp_size=3),
    OperationState.RUNNING,
    plan={"old": {"device_ids": [0, 1]}, "new": {"device_ids": [0, 1, 2]}},
    steps=(StepRecord(StepKind.COPY_TRUNK, 2, source_id=0, state=StepState.DONE),),
    phases=(PhaseRecord("plan", 0.004), PhaseRecord("memory")),
    created_s=1760000000.0,
).to_json()
_OPERATION = example("The operation", _SHOWN)
_STARTED = example("Started; Location says where to look", _SHOWN)
_PLAN = example("The plan of a dry run", {"copied_bytes": 0, "before": [], "after": []})

ROUTES: tuple[ScaleRoute, ...] = (
    ScaleRoute(
        "POST",
        "/v1/scale",
        start_scale,
        "Scale to another number of ranks, or to other devices",
        {200: _PLAN, 202: _STARTED, 400: _BAD, 409: _BUSY},
    ),
    ScaleRoute("GET", "/v1/scale", list_scales, "The last scale operations"),
    ScaleRoute(
        "GET",
        "/v1/scale/{operation_id}",
        show_scale,
        "One scale operation",
        {200: _OPERATION, 404: _UNKNOWN},
    ),
    ScaleRoute("GET", "/v1/instances", list_instances, "The engine instances"),
    ScaleRoute(
        "POST",
        "/scale_elastic_ep",
        scale_elastic_ep,
        "Scale, as vLLM's and SGLang's clients ask",
        {400: _BAD, 408: {"description": "Not ended yet; it goes on"}, 409: _BUSY},
    ),
    ScaleRoute(
        "POST", "/is_scaling_elastic_ep", is_scaling_elastic_ep, "Whether a scale runs (vLLM)"
    ),
    ScaleRoute(
        "GET", "/is_scaling_elastic_ep", is_scaling_elastic_ep, "Whether a scale runs (SGLang)"
    ),
)


def _backing(request: Request) -> Backing:
    backing: Backing = request.app.state.elastic
    return backing


def _coordinator(request: Request) -> Coordinator:
    return _backing(request).coordinator


async def _ended(coordinator: Coordinator, operation: Operation, timeout_s: float) -> Operation:
    """The operation when it has finished, or at the time-out; costs no thread meanwhile."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not operation.finished and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
        operation = coordinator.journal.get(operation.operation_id)
    return operation


def _vllm_answer(operation: Operation, new_size: int, timeout_s: float) -> Response:
    where = f"GET /v1/scale/{operation.operation_id}"
    if not operation.finished:
        message = f"the scale has not ended after {timeout_s:g} s and goes on: see {where}"
        return _error_json(408, "TimeoutError", message)
    if operation.state is OperationState.ROLLED_BACK and operation.error:
        return _error_json(500, operation.error.type, f"{operation.error.message} ({where})")
    said = {"message": f"Scaled to {new_size} data parallel engines"}
    return JSONResponse({**said, "id": operation.operation_id, "state": operation.state})


def answer_error(error: ElasticError, status: int | None = None) -> JSONResponse:
    """The answer to a request that raised; `status` if it is not the error's own."""
    status = error.http_status if status is None else status
    answer = _error_json(status, type(error).__name__, str(error))
    if isinstance(error, BusyError):
        answer.headers["Retry-After"] = "1"
    return answer


def _error_json(status: int, name: str, message: str) -> JSONResponse:
    error = {"message": message, "type": name, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
