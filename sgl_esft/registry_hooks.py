"""Hook functions around SGLang's adapter registry, in the process that serves HTTP.

    POST /load_lora_adapter -> [check, make room] -> SGLang -> every rank's EsftManager

SGLang asks the ranks first and its registry afterwards. Checking here keeps a
bad folder from reaching any rank.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from sgl_esft import sglang_api
from sgl_esft.adapters import check_loadable
from sgl_esft.config import required_config
from sgl_esft.errors import EsftError
from sgl_esft.model_spec import MoeSpec

Call = Callable[..., Awaitable[Any]]


async def check_then_load(original: Call, manager: Any, obj: Any, request: Any = None) -> Any:
    """Refuse what cannot be loaded; under DP attention evict first, since slots are permanent."""
    loaded = manager.lora_registry.get_all_adapters()
    try:
        manifest = check_loadable(
            obj.lora_name, obj.lora_path, loaded, _base_spec(), required_config()
        )
    except EsftError as error:
        message = f"{type(error).__name__}: {error}"
        return sglang_api.make_lora_result(
            False, message, {name: ref.lora_path for name, ref in loaded.items()}
        )
    obj.lora_path = str(manifest.path)
    if sglang_api.is_dp_attention():
        await _make_room(manager)
    return await original(manager, obj, request)


async def refuse_tensors(manager: Any, obj: Any, request: Any = None) -> Any:
    """ESFT adapters are folders; tensors in a request would be unpickled by every rank."""
    loaded = manager.lora_registry.get_all_adapters()
    return sglang_api.make_lora_result(
        False,
        "UnsupportedAdapterError: load an ESFT adapter from a folder, by /load_lora_adapter",
        {name: ref.lora_path for name, ref in loaded.items()},
    )


async def _make_room(manager: Any) -> None:
    """Unload the adapter used longest ago, if all slots are taken and one is not pinned."""
    while manager.lora_registry.num_registered_loras >= required_config().max_adapters:
        name = await manager.lora_registry.lru_lora_name(exclude_pinned=True)
        if name is None:
            return  # the ranks will say NoFreeSlotError
        async with manager.lora_update_lock:
            await manager._unload_lora_adapter_locked(sglang_api.make_unload_request(name))


async def unload_and_forget(original: Call, manager: Any, obj: Any, request: Any = None) -> Any:
    """An adapter unloaded on purpose is unknown; SGLang would load it again on request."""
    result = await original(manager, obj, request)
    if result.success:
        manager.lora_ref_cache.pop(obj.lora_name, None)
    return result


@cache
def _base_spec() -> MoeSpec:
    return MoeSpec.from_config(sglang_api.base_config(*sglang_api.served_model()))
