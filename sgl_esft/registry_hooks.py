"""Hook functions around SGLang's adapter registry, in the process that serves HTTP.

POST /load_lora_adapter, /unload_lora_adapter -> [load, unload] -> lifecycle/sglang_engine.py
a request's adapter, not loaded now -> SGLang -> [load] -> [resolve_again]
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sgl_esft import sglang_api
from sgl_esft.errors import EsftError
from sgl_esft.lifecycle.registry import AdapterGoneError
from sgl_esft.lifecycle.sglang_engine import engine_of

Call = Callable[..., Awaitable[Any]]

_MAX_RESOLVES = 8


async def load(manager: Any, obj: Any, request: Any = None) -> Any:
    """In place of SGLang's own load; its answer."""
    try:
        await engine_of(manager).load(
            obj.lora_name,
            Path(obj.lora_path),
            pinned=bool(obj.pinned),
            on_progress=lambda phase, share: None,
        )
    except EsftError as error:
        return _failed(manager, error)
    return sglang_api.make_lora_result(True, "", _folders(manager))


async def unload(manager: Any, obj: Any, request: Any = None) -> Any:
    """In place of SGLang's own unload: an adapter unloaded on purpose is unknown afterwards."""
    try:
        await engine_of(manager).unload(obj.lora_name)
    except EsftError as error:
        return _failed(manager, error)
    return sglang_api.make_lora_result(True, "", _folders(manager))


async def refuse_tensors(manager: Any, obj: Any, request: Any = None) -> Any:
    """ESFT adapters are folders; tensors in a request would be unpickled by every rank."""
    return sglang_api.make_lora_result(
        False,
        "UnsupportedAdapterError: load an ESFT adapter from a folder, by /load_lora_adapter",
        _folders(manager),
    )


async def resolve_again(original: Call, manager: Any, obj: Any) -> Any:
    """A request's adapters are loaded if need be, and held; if one leaves between, once more."""
    for _ in range(_MAX_RESOLVES - 1):
        try:
            return await original(manager, obj)
        except AdapterGoneError:
            continue
    return await original(manager, obj)


def _failed(manager: Any, error: EsftError) -> Any:
    message = f"{type(error).__name__}: {error}"
    return sglang_api.make_lora_result(False, message, _folders(manager))


def _folders(manager: Any) -> dict[str, str]:
    loaded = manager.lora_registry.get_all_adapters()
    return {name: ref.lora_path for name, ref in loaded.items()}
