"""Hook functions of the CPU reference platform; hook_table.py says where each one goes, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zmq

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.platform import device_memory
from sgl_esft.platform.quantised_moe import pack_int4

_FP8 = torch.float8_e4m3fn
DP_CONTROLLER_POLL_MS = 1000  # the longest the controller sleeps; its watchdog wants more often


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


def forward_quantised(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Experts of a quantisation method on this platform, in the core of the layer's runner."""
    runner = method.runner
    weights = method.get_triton_quant_info(layer)
    return runner.runner_core.run_from_dispatch(dispatch_output, weights, runner.config)


def quantise_fp8(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [out, in] with a known scale, as SGLang's kernel rounds them: times its reciprocal,
    in float32, and what is too large becomes the largest. Raises UnsupportedModelError.
    """
    if scale is None or num_token_padding is not None:
        raise UnsupportedModelError(
            "the CPU platform rounds nothing to fp8 while it serves: use a checkpoint whose "
            "experts are in fp8, with dynamic activations (sgl-esft quantise --to fp8-tensor)"
        )
    largest = torch.finfo(_FP8).max
    values = input.float() * scale.float().reciprocal()
    return values.clamp_(-largest, largest).to(_FP8), scale


def pack_loaded_experts(_: None, method: Any, layer: Any) -> None:
    """The base's int4 experts, each in its place; what lies behind them may have no memory."""
    layout = getattr(layer, "esft_layout", None)
    for numbers, scales in (
        (layer.w13_qweight.data, layer.w13_scales.data),
        (layer.w2_qweight.data, layer.w2_scales.data),
    ):
        for row in range(len(numbers) if layout is None else layout.num_base):
            numbers[row].copy_(pack_int4(numbers[row], scales[row]))


def refuse_other_quantisation(model_config: Any, load_config: Any) -> None:
    """Before SGLang reads how a checkpoint is quantised. Raises UnsupportedModelError."""
    from sgl_esft.platform import quantised_layers

    if model_config.quantization is not None:
        quantised_layers.check_quantisation(model_config.quantization)


def refuse_quantised_layer(method: Any, config: Any, layer: Any, prefix: str) -> None:
    """Before the weights of a layer are created that nothing here computes.

    Raises UnsupportedModelError.
    """
    from sgl_esft.platform import quantised_layers

    if method is not None:
        quantised_layers.check_method(prefix, method)


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
