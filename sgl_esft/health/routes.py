"""GET /healthz, GET /readyz, POST /v1/drain. None of them runs the model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sgl_esft.errors import StartingError
from sgl_esft.health.service import Service
from sgl_esft.http.answers import as_response

MAX_DRAIN_S = 86_400.0


class DrainBody(BaseModel):
    """How long running requests may take; without it, --drain-timeout."""

    model_config = ConfigDict(extra="forbid")
    timeout_s: float | None = Field(default=None, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False)


def router(service: Service) -> APIRouter:
    """The routes over a service."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", summary="Alive: the process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get(
        "/readyz",
        summary="Ready: every rank and the detokenizer are at work, and new requests are taken",
        responses={503: {"description": "Not ready; `reason` says why"}},
    )
    async def readyz() -> JSONResponse:
        found = service.readiness()
        return JSONResponse(found.to_json(), status_code=200 if found.is_ready else 503)

    @routes.post(
        "/v1/drain",
        status_code=202,
        response_model=dict[str, Any],
        summary="Take no new requests, answer those that run, then end the server",
        responses={409: {"description": "The server still starts: again after `Retry-After`"}},
    )
    async def drain(body: Annotated[DrainBody | None, Body()] = None) -> Any:
        try:
            service.drain(body.timeout_s if body else None)
        except StartingError as error:
            return as_response(error)
        return {
            "state": str(service.life.phase),
            "in_flight": service.num_in_flight,
            "timeout_s": round(service.drain_left_s(), 3),
        }

    return routes
