"""Hook functions around SGLang's adapter registry, in the process that serves HTTP.

POST /load_lora_adapter, /unload_lora_adapter -> [load, unload] -> lifecycle/sglang_engine.py
a request's adapters -> [resolve]: loaded if need be, by whoever loads for requests, and held
a request's end -> [release]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sized
from pathlib import Path
from typing import Any

from sgl_esft import sglang_api
from sgl_esft.errors import EmptyPromptError, EsftError, UnknownAdapterError
from sgl_esft.http.adapter_names import BESIDE, parts_of
from sgl_esft.lifecycle.adapter_engine import nobody_looks
from sgl_esft.lifecycle.commands import named
from sgl_esft.lifecycle.registry import (
    AdapterGoneError,
    AdapterRefusedError,
    acquire,
    give_back,
)
from sgl_esft.lifecycle.sglang_engine import engine_of

_MAX_RESOLVES = 8

# How SGLang's scheduler ends such a request.
_NOT_ACCEPTED = "Grammar accept_token failed: "


async def load(manager: Any, obj: Any, request: Any = None) -> Any:
    """In place of SGLang's own load; its answer."""
    folder, pinned = Path(obj.lora_path), bool(obj.pinned)
    engine = engine_of(manager)
    loading = engine.load(obj.lora_name, folder, pinned=pinned, on_progress=nobody_looks)
    return await _answer(manager, loading)


async def unload(manager: Any, obj: Any, request: Any = None) -> Any:
    """In place of SGLang's own unload: an adapter unloaded on purpose is unknown afterwards."""
    return await _answer(manager, engine_of(manager).unload(obj.lora_name))


async def _answer(manager: Any, change: Awaitable[object]) -> Any:
    try:
        await change
    except EsftError as error:
        return sglang_api.make_lora_result(False, named(error), _folders(manager))
    return sglang_api.make_lora_result(True, "", _folders(manager))


async def refuse_tensors(manager: Any, obj: Any, request: Any = None) -> Any:
    """ESFT adapters are folders; tensors in a request would be unpickled by every rank."""
    return sglang_api.make_lora_result(
        False,
        "UnsupportedAdapterError: load an ESFT adapter from a folder, by /load_lora_adapter",
        _folders(manager),
    )


async def resolve(manager: Any, obj: Any) -> None:
    """In place of SGLang's: a request's adapters are loaded if need be, and held.

    If one leaves between, once more. Raises AdapterGoneError, AdapterRefusedError.
    """
    names = [obj.lora_path] if isinstance(obj.lora_path, str) else obj.lora_path
    wanted = {part for name in names if name is not None for part in parts_of(name)}
    engine = engine_of(manager)
    for is_last in [False] * (_MAX_RESOLVES - 1) + [True]:
        try:
            await engine.bring(wanted)
            obj.lora_id = await acquire(manager.lora_registry, obj.lora_path, engine.kind_of)
            break
        except AdapterGoneError:
            if is_last:
                raise
        except UnknownAdapterError:  # whose text may name other adapters
            asked = ", ".join(sorted(wanted))
            raise AdapterGoneError(f"UnknownAdapterError: not loaded any more: {asked}") from None
        except EsftError as error:
            raise AdapterRefusedError(error) from error
    # Requests of a batch that SGLang has taken apart already.
    for place, single in obj.__dict__.get("_sub_obj_cache", {}).items():
        single.lora_id = obj.lora_id[place] if isinstance(obj.lora_id, list) else obj.lora_id


def release(original: Callable[[Any, Any], Any], manager: Any, state: Any) -> Any:
    """Around SGLang's: a request that ends before `resolve` holds no adapter to give back.

    SGLang's gives back one id; of two that are joined, each is.
    """
    lora_id = getattr(state.obj, "lora_id", None)
    if lora_id is None:
        return None
    if BESIDE not in str(lora_id):
        return original(manager, state)
    if state.lora_released:
        return None
    state.lora_released = True
    task = asyncio.create_task(give_back(manager.lora_registry, lora_id))
    manager._lora_release_tasks.add(task)
    task.add_done_callback(manager._lora_release_tasks.discard)
    return task


def _folders(manager: Any) -> dict[str, str]:
    loaded = manager.lora_registry.get_all_adapters()
    return {name: ref.lora_path for name, ref in loaded.items()}


# Hook functions on the way of a request's tokens from HTTP to the scheduler.
#
# tokens of a prompt -> [refuse_empty] -> SGLang's own checks -> scheduler


def refuse_empty(manager: object, obj: object, input_ids: Sized | None) -> None:
    """Before SGLang's checks. Raises EmptyPromptError, which SGLang answers as a ValueError."""
    if input_ids is not None and len(input_ids) == 0:
        raise EmptyPromptError("the prompt has no tokens: send at least one")


def blame_grammar(manager: object, out: Any, state: object, is_stream: bool) -> None:
    """No token was allowed, so SGLang's first was not accepted: 400, where SGLang says 500."""
    reason = out["meta_info"]["finish_reason"]
    if str(reason.get("message")).startswith(_NOT_ACCEPTED):
        reason["status_code"] = 400
        reason["message"] = f"the request's grammar allows no token here: {reason['message']}"
