"""A MoE layer's weights as torch tensors over expert memory.

    SGLang's create_weights --> [create_experts] --> parameters w13, w2 over slots

The base's slots get their memory before SGLang loads the checkpoint, so that its
experts are written straight into their pages. Nothing may read the other slots:
on every device that is a fault (csrc/vmm/backend.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sgl_vmm
import torch
from torch.utils.dlpack import from_dlpack

from sgl_esft.config import EsftConfig
from sgl_esft.errors import DeviceMemoryError, OutOfExpertMemoryError, UnsupportedModelError
from sgl_esft.weave import page_source
from sgl_esft.weave.expert_memory import (
    ExpertArena,
    PaddedMemory,
    SlotMemory,
    VirtualMemory,
    choose_page_bytes,
    open_arena,
)
from sgl_esft.weave.slot_layout import SlotLayout

WEIGHT_NAMES = ("w13_weight", "w2_weight")  # SGLang's, in the order of every per-layer tuple here
_BACKENDS = {"cpu": "host", "cuda": "cuda", "npu": "acl"}  # torch device type -> sgl_vmm backend

_arenas: dict[torch.device, ExpertArena] = {}


def open_arenas() -> list[ExpertArena]:
    """This process's arenas, one for each device that has virtual experts."""
    return list(_arenas.values())


def arena_of(device: torch.device) -> ExpertArena | None:
    """The device's arena; None while it has no virtual experts."""
    return _arenas.get(device)


def create_experts(
    layer: torch.nn.Module,
    layout: SlotLayout,
    config: EsftConfig,
    create: Callable[[], None],
    budget_bytes: int | None = None,
) -> SlotMemory:
    """Create the layer's expert weights by `create`, then give the base's slots their memory.

    `create` registers the parameters WEIGHT_NAMES [layout.num_slots, ...] on the default device.
    `budget_bytes` bounds the pages of all layers; the first layer of a device decides it.
    Raises DeviceMemoryError when the base does not fit, UnsupportedDeviceError, or
    UnsupportedModelError for a layer with parameters that we do not know.
    """
    source = page_source.current()
    if source is not None:
        return source.create_experts(layer, layout, create)
    return create_mapped(layer, layout.num_slots, layout.num_base, config, create, budget_bytes)


def create_mapped(
    layer: torch.nn.Module,
    num_slots: int,
    num_mapped: int,
    config: EsftConfig,
    create: Callable[[], None],
    budget_bytes: int | None = None,
) -> SlotMemory:
    """`num_slots` slots of this process's own, the first `num_mapped` with memory. As above."""
    memory: SlotMemory
    if config.expert_memory == "padded":
        create()
        memory = PaddedMemory(num_slots, _slot_bytes(_weights(layer)))
    else:
        memory = _create_virtual(layer, num_slots, create, config.expert_page_bytes, budget_bytes)
    try:
        memory.map(range(num_mapped))
    except OutOfExpertMemoryError as error:
        raise DeviceMemoryError(f"the base model's experts do not fit: {error}") from error
    return memory


def _create_virtual(
    layer: torch.nn.Module,
    num_slots: int,
    create: Callable[[], None],
    page_bytes: int | None,
    budget_bytes: int | None,
) -> VirtualMemory:
    device = _default_device()
    with torch.device("meta"):
        create()
    weights = _weights(layer)
    _refuse_unknown_parameters(layer)
    slot_bytes = _slot_bytes(weights)
    if device not in _arenas:
        backend = _BACKENDS.get(device.type, device.type)
        page_bytes = page_bytes or choose_page_bytes(slot_bytes)
        _arenas[device] = open_arena(backend, device.index or 0, page_bytes, budget_bytes)
    memory = _arenas[device].make_layer(num_slots, slot_bytes)
    for name, weight, tensor in zip(WEIGHT_NAMES, weights, memory.tensors, strict=True):
        _replace_parameter(layer, name, weight, tensor)
    return memory


def _refuse_unknown_parameters(layer: torch.nn.Module) -> None:
    unknown = {name for name, _ in layer.named_parameters(recurse=False)} - set(WEIGHT_NAMES)
    if unknown:
        raise UnsupportedModelError(
            f"experts with {', '.join(sorted(unknown))} have no virtual memory yet: choose "
            "--expert-memory padded"
        )


def _default_device() -> torch.device:
    """Where SGLang's loader has tensors made; always with an index but on the CPU."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=device).device


def _weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [getattr(layer, name) for name in WEIGHT_NAMES]


def _slot_bytes(weights: Sequence[torch.Tensor]) -> list[int]:
    return [weight[0].numel() * weight.element_size() for weight in weights]


def _replace_parameter(
    layer: torch.nn.Module, name: str, planned: torch.nn.Parameter, memory: sgl_vmm.VirtualTensor
) -> None:
    """Put the real tensor where the planned one is, with the attributes SGLang's loaders read."""
    dtype = str(planned.dtype).removeprefix("torch.")
    tensor = from_dlpack(memory.to_dlpack(list(planned.shape), dtype))
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    attributes: dict[str, Any] = planned.__dict__
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
    layer.register_parameter(name, parameter)


def check_still_there(layer: torch.nn.Module, memory: SlotMemory) -> None:
    """Raises UnsupportedModelError when SGLang has put the weights elsewhere after loading."""
    if not isinstance(memory, VirtualMemory):
        return
    for name, weight, tensor in zip(WEIGHT_NAMES, _weights(layer), memory.tensors, strict=True):
        if weight.data_ptr() != tensor.address or not weight.is_contiguous():
            raise UnsupportedModelError(
                f"SGLang moved or reordered {name} after loading: choose --expert-memory padded "
                "or another --moe-runner-backend"
            )
