"""What weaving calls in SGLang: every such name, once, with what it must be.

Imported only where SGLang runs; hooks.py names what is hooked, this file what is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.dp_attention import (
    dp_gather_replicate,
    get_global_dp_buffer_len,
    get_local_dp_buffer_len,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.managers.io_struct import LoRAUpdateOutput, UnloadLoRAAdapterReqInput
from sglang.srt.runtime_context import get_lora, get_model, get_parallel
from transformers import PretrainedConfig

from sgl_esft.errors import UnsupportedModelError


def served_model() -> tuple[str, str | None]:
    """(path or hub name, revision) of the base model."""
    model = get_model()
    return model.model_path, model.revision


def base_config(model_path: str, revision: str | None) -> dict[str, Any]:
    """The base checkpoint's config.json, from its folder or its cached hub copy."""
    config, _ = PretrainedConfig.get_config_dict(model_path, revision=revision)
    return dict(config)


def fused_moe_modules(model: torch.nn.Module) -> Iterator[Any]:
    """The model's routed-expert layers."""
    return (module for module in model.modules() if isinstance(module, FusedMoE))


def check_dispatcher(dispatcher: Any) -> None:
    """Raises UnsupportedModelError unless the layer uses SGLang's standard dispatcher."""
    if not isinstance(dispatcher, StandardDispatcher):
        raise UnsupportedModelError(
            f"dispatcher {type(dispatcher).__name__}: weaving works with --moe-a2a-backend none"
        )


def initial_adapters() -> list[Any]:
    """The LoRARefs of the adapters the server was started with."""
    return list(get_lora().lora_paths or ())


def make_lora_result(success: bool, message: str, loaded: dict[str, str]) -> Any:
    """SGLang's answer to a load or an unload; `loaded` is name -> folder."""
    return LoRAUpdateOutput(success=success, error_message=message, loaded_adapters=loaded)


def make_unload_request(name: str) -> Any:
    """SGLang's request to unload an adapter."""
    return UnloadLoRAAdapterReqInput(lora_name=name)


def is_dp_attention() -> bool:
    """Whether ranks attend to requests of their own and share the experts."""
    return bool(get_parallel().enable_dp_attention)


def dp_buffer_lengths() -> tuple[int, int]:
    """(rows of this rank, rows of all ranks) of the gather of the batch at hand."""
    return get_local_dp_buffer_len(), get_global_dp_buffer_len()


def dp_gather(gathered: torch.Tensor, local: torch.Tensor, forward_batch: Any) -> None:
    """gathered [num_global, ...] becomes all ranks' rows, placed as hidden states are."""
    dp_gather_replicate(gathered, local, forward_batch)
