"""The models of a server by name: what the base is called, and /v1/models/{name}.

plan.py -> [served_name] -> SGLang's --served-model-name
GET /v1/models/{name} -> [routes_of] -> the base or an adapter, by every name that requests may use
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse

from sgl_esft.http.adapter_names import KnownNames
from sgl_esft.http.routes import Route

# A checkpoint in the hub's cache lies in a folder that is named by its commit.
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+$")


def served_name(model_path: str) -> str | None:
    """What the base model is called: its folder's name. None: as it is called by its path.

    A path would tell every client where the server keeps its files.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return None  # a name of the hub
    cached = _CACHED.search(str(folder.absolute()))
    name = f"{cached[1]}/{cached[2]}" if cached else folder.resolve().name
    return name.replace(":", "-") or None  # a colon would separate an adapter's name


def routes_of(names: Callable[[], KnownNames]) -> tuple[Route, ...]:
    """The route of one model, in place of SGLang's, which knows the base's own name only."""

    async def retrieve(model: str) -> JSONResponse:
        from sglang.srt.entrypoints import http_server

        base, *loaded = (await http_server.available_models()).model_dump()["data"]
        name = names().adapter_of_model(model)
        return JSONResponse(base if name is None else _card(name, base, loaded))

    return (
        Route(
            "GET",
            "/v1/models/{model:path}",
            retrieve,
            "The base or an adapter, by any name that a request may use for it",
            {404: {"description": "`UnknownAdapterError`: no request can use the name"}},
            tag="models",
        ),
    )


def _card(name: str, base: dict[str, Any], loaded: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one adapter; what is on disk looks as it will when a request has loaded it."""
    found = next((card for card in loaded if card["id"] == name), None)
    return found or {**base, "id": name, "root": name, "parent": base["id"], "max_model_len": None}
