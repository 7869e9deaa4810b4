"""Hook functions of the CPU reference platform; hook_table.py says where each one goes, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zmq

from sgl_esft.platform import device_memory, moe

DP_CONTROLLER_POLL_MS = 1000  # the longest the controller sleeps; its watchdog wants more often


def mla_handler_for_torch_native(
    original: Callable[..., Any], registry: type, backend_name: str
) -> Any:
    """torch_native attention computes MLA in its absorbed form, prefill included."""
    if backend_name != "torch_native":
        return original(registry, backend_name)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return lambda attn, forward_batch: AttnForwardMethod.MLA


def seq_len_fill_value(backend: Any) -> int:
    """Padding rows of a DP-attention batch attend to one token."""
    return 1


def memcpy(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor | int,
    sz: torch.Tensor | int,
    offset_src: bool,
) -> None:
    """Copy `sz` rows, `offset` rows into src (offset_src) or into dst."""
    start, num_rows = int(offset), int(sz)
    if offset_src:
        dst[:num_rows].copy_(src[start : start + num_rows])
    else:
        dst[start : start + num_rows].copy_(src[:num_rows])


def moe_forward(
    layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """The layer's experts over x; see `sgl_esft.platform.moe`."""
    moe.check_runner_config(moe_runner_config)
    return moe.moe_forward(
        x,
        layer.w13_weight,  # type: ignore[arg-type]
        layer.w2_weight,  # type: ignore[arg-type]
        topk_output.topk_weights,
        topk_output.topk_ids,
    )


def add_gated_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """final += sigmoid(hidden . gate) * shared, in place; [num_tokens, H], gate [H].

    In float32 with one rounding at the end, as SGLang's kernel does it.
    """
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float().reshape(-1, 1))
    final_hidden_states.copy_(gate * shared_output.float() + final_hidden_states.float())


def available_memory(
    original: Callable[..., float],
    device: str,
    gpu_id: int,
    distributed: bool = False,
    empty_cache: bool = True,
    cpu_group: Any = None,
) -> float:
    """GiB that are left of a device with a byte budget; without one, SGLang's own answer."""
    available = None
    if device == "cpu":
        available = device_memory.least_available_bytes(gpu_id, cpu_group, over_ranks=distributed)
    if available is None:
        return original(device, gpu_id, distributed, empty_cache, cpu_group)
    return available / (1 << 30)


def load_model_on_device(original: Callable[..., None], runner: Any) -> None:
    """The model counts from now on. Raises DeviceMemoryError when it does not fit."""
    device_memory.add_runner(runner)
    original(runner)
    device_memory.charge()
    device_memory.limit_expert_pools()


def alloc_memory_pool_on_device(
    original: Callable[..., None],
    runner: Any,
    memory_pool_config: Any = None,
    *,
    draft_parallel_layout: Any = None,
) -> None:
    """The KV pool counts too; what then is left, expert pages may still take.

    Raises DeviceMemoryError, or SGLang's ValueError when nothing is left for the pool.
    """
    try:
        original(runner, memory_pool_config, draft_parallel_layout=draft_parallel_layout)
    except Exception as error:
        device_memory.explain(error)
        raise
    device_memory.charge()
    device_memory.limit_expert_pools()


def wait_for_request(original: Callable[..., None], controller: Any) -> None:
    """The DP controller's loop, asleep until a request arrives instead of spinning on a core."""
    from sglang.srt.managers.data_parallel_controller import sock_recv

    poller = zmq.Poller()
    poller.register(controller.recv_from_tokenizer, zmq.POLLIN)
    while True:
        controller.soft_watchdog.feed()
        if poller.poll(DP_CONTROLLER_POLL_MS):
            _dispatch_all(controller, sock_recv)


def _dispatch_all(controller: Any, sock_recv: Callable[..., Any]) -> None:
    while True:
        try:
            request = sock_recv(controller.recv_from_tokenizer, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        controller._request_dispatcher(request)
