"""The adapter routes of vLLM and of SGLang, for tools that know them.

    POST /v1/load_lora_adapter, /v1/unload_lora_adapter (vLLM)   plain text, or an error's JSON
    POST /load_lora_adapter, /unload_lora_adapter (SGLang)       success, error_message, loaded_...

They answer when the work has ended. What they do is what the routes of api.py do.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from sgl_esft.errors import (
    AdapterExistsError,
    AdapterNotLoadedError,
    AdapterPathError,
    EsftError,
    UnknownAdapterError,
    UserError,
)
from sgl_esft.http.answers import as_response
from sgl_esft.http.routes import Endpoint, Route, add_routes
from sgl_esft.lifecycle.api import ROUTES, WAIT_TIMEOUT_S, AsciiJson, Backing, backing
from sgl_esft.lifecycle.jobs import Job
from sgl_esft.lifecycle.library import AdapterLibrary
from sgl_esft.lifecycle.schemas import (
    SglangLoadBody,
    UnloadBody,
    VllmLoadBody,
    error_example,
    example,
)
from sgl_esft.lifecycle.states import Situation


async def vllm_load(request: Request, body: VllmLoadBody) -> Response:
    """As vLLM: 200 and a line of text; 400 if it is loaded already, 404 if there is no folder."""
    library = backing(request).library
    try:
        if body.load_inplace and body.lora_name in library.known.loaded():
            await _ended(await library.replace(body.lora_name, body.lora_path))
        else:
            await _load(library, body.lora_name, body.lora_path, pinned=False)
    except EsftError as error:
        return as_response(error, _vllm_status(error))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def vllm_unload(request: Request, body: UnloadBody) -> Response:
    """As vLLM: 200 and a line of text; 404 if it is not loaded."""
    try:
        await _unload(backing(request).library, body.lora_name)
    except EsftError as error:
        return as_response(error, _vllm_status(error))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def sglang_load(request: Request, body: SglangLoadBody) -> Response:
    """As SGLang: 200 or 400, with all that is loaded."""
    library = backing(request).library
    try:
        await _load(library, body.lora_name, body.lora_path, pinned=bool(body.pinned))
    except EsftError as error:
        return _sglang_answer(library, error)
    return _sglang_answer(library)


async def sglang_unload(request: Request, body: UnloadBody) -> Response:
    """As SGLang: 200 after the last request that uses it has ended, 400 if it is not loaded."""
    library = backing(request).library
    try:
        await _unload(library, body.lora_name)
    except EsftError as error:
        return _sglang_answer(library, error)
    return _sglang_answer(library)


async def _load(library: AdapterLibrary, name: str, path: str, *, pinned: bool) -> None:
    """These clients do not expect a second load of a name to succeed."""
    if name in library.known.loaded():
        raise AdapterExistsError(
            f"adapter {name!r} is loaded already: unload it first, or choose another name"
        )
    await _ended(await library.load(name, path, pinned=pinned))


async def _unload(library: AdapterLibrary, name: str) -> None:
    """Of what is not loaded, only what was evicted is still there to be unloaded."""
    if library.known.situation(name) in (Situation.ABSENT, Situation.ON_DISK):
        raise UnknownAdapterError(f"adapter {name!r} is not loaded")
    await _ended(library.unload(name))


async def _ended(job: Job | None) -> None:
    if job is not None:
        await job.wait(WAIT_TIMEOUT_S)


def _vllm_status(error: EsftError) -> int:
    if isinstance(error, AdapterPathError | UnknownAdapterError | AdapterNotLoadedError):
        return 404
    return 400 if isinstance(error, UserError) else error.http_status


def _sglang_answer(library: AdapterLibrary, error: EsftError | None = None) -> Response:
    loaded = {name: str(each.folder) for name, each in library.known.loaded().items()}
    message = "" if error is None else f"{type(error).__name__}: {error}"
    said = {"success": error is None, "error_message": message, "loaded_adapters": loaded}
    return AsciiJson(said, status_code=200 if error is None else 400)


_ADDED = {"description": "Loaded", "content": {"text/plain": {"example": "Success: ..."}}}
_BAD = error_example("Refused", "AdapterExistsError", 400, "adapter 'math' is loaded already")
_UNKNOWN = error_example("No such adapter or folder", "UnknownAdapterError", 404, "...")
_SGLANG = {"success": True, "error_message": "", "loaded_adapters": {"math": "/adapters/math"}}
_OK = example("Done", _SGLANG)
_FAILED = example("Refused", {**_SGLANG, "success": False, "error_message": "..."})

COMPAT_ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/load_lora_adapter",
        vllm_load,
        "Load an adapter, as vLLM's clients ask",
        {200: _ADDED, 400: _BAD, 404: _UNKNOWN},
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        vllm_unload,
        "Unload an adapter, as vLLM's clients ask",
        {200: {**_ADDED, "description": "Unloaded"}, 404: _UNKNOWN},
    ),
    Route(
        "POST",
        "/load_lora_adapter",
        sglang_load,
        "Load an adapter, as SGLang's clients ask",
        {200: _OK, 400: _FAILED},
    ),
    Route(
        "POST",
        "/unload_lora_adapter",
        sglang_unload,
        "Unload an adapter, as SGLang's clients ask",
        {200: _OK, 400: _FAILED},
    ),
)


def install(
    app: FastAPI,
    backing_of: Callable[[], Backing],
    protect: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
) -> None:
    """Add the adapter routes to an application, ours and these, in place of its own.

    `backing_of` is called for each request: what it answers from may come after the application.
    """
    app.state.esft_adapters = backing_of
    add_routes(app, (*ROUTES, *COMPAT_ROUTES), protect)
