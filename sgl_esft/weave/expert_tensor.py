"""A MoE layer's weights as torch tensors over expert memory.

    SGLang's create_weights --> [create_experts] --> parameters w13, w2 and their scales over slots

The base's slots get their memory before SGLang loads the checkpoint, so that its
experts are written straight into their pages. Nothing may read the other slots:
on every device that is a fault (csrc/vmm/backend.h). Scales are padded: they are small, and hold
NaN until somebody writes them.
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
from sgl_esft.weave.expert_parameters import ExpertParameters, parameters_of
from sgl_esft.weave.slot_layout import SlotLayout

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

    `create` registers parameters of expert_parameters.py, [layout.num_slots, ...], on the default
    device. `budget_bytes` bounds the pages of all layers; the first layer of a device decides it.
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
        _, parameters = parameters_of(layer)
        memory = PaddedMemory(num_slots, _slot_bytes(_weights(layer, parameters)))
        for name in parameters.scales or ():
            getattr(layer, name).data.fill_(torch.nan)
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
    _, parameters = parameters_of(layer)
    weights = _weights(layer, parameters)
    slot_bytes = _slot_bytes(weights)
    if device not in _arenas:
        backend = _BACKENDS.get(device.type, device.type)
        page_bytes = page_bytes or choose_page_bytes(slot_bytes)
        _arenas[device] = open_arena(backend, device.index or 0, page_bytes, budget_bytes)
    memory = _arenas[device].make_layer(num_slots, slot_bytes)
    virtual = dict(zip(parameters.weights, memory.tensors, strict=True))
    for name, planned in list(layer.named_parameters(recurse=False)):
        tensor = _over(virtual[name], planned) if name in virtual else _padded(planned, device)
        _replace_parameter(layer, name, planned, tensor)
    return memory


def _over(memory: sgl_vmm.VirtualTensor, planned: torch.Tensor) -> torch.Tensor:
    # The extension does not know all types of one byte.
    is_byte = planned.dtype.itemsize == 1
    dtype = "uint8" if is_byte else str(planned.dtype).removeprefix("torch.")
    tensor: torch.Tensor = from_dlpack(memory.to_dlpack(list(planned.shape), dtype))
    return tensor.view(planned.dtype)


def _padded(planned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A scale's memory, NaN; or no memory, of a parameter that is empty."""
    if not planned.numel():
        return torch.empty_like(planned, device=device)
    return torch.full_like(planned, torch.nan, device=device)


def _default_device() -> torch.device:
    """Where SGLang's loader has tensors made; always with an index but on the CPU."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.empty(0, device=device).device


def _weights(layer: torch.nn.Module, parameters: ExpertParameters) -> list[torch.nn.Parameter]:
    return [getattr(layer, name) for name in parameters.weights]


def _slot_bytes(weights: Sequence[torch.Tensor]) -> list[int]:
    return [weight[0].numel() * weight.element_size() for weight in weights]


def _replace_parameter(
    layer: torch.nn.Module, name: str, planned: torch.nn.Parameter, tensor: torch.Tensor
) -> None:
    """Put the real tensor where the planned one is, with the attributes SGLang's loaders read."""
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    attributes: dict[str, Any] = planned.__dict__
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
    layer.register_parameter(name, parameter)


def check_still_there(layer: torch.nn.Module, memory: SlotMemory) -> None:
    """Raises UnsupportedModelError when SGLang has put the weights elsewhere after loading."""
    if not isinstance(memory, VirtualMemory):
        return
    _, parameters = parameters_of(layer)
    weights = _weights(layer, parameters)
    for name, weight, tensor in zip(parameters.weights, weights, memory.tensors, strict=True):
        if weight.data_ptr() != tensor.address or not weight.is_contiguous():
            raise UnsupportedModelError(
                f"SGLang moved or reordered {name} after loading: choose --expert-memory padded "
                "or another --moe-runner-backend"
            )


def take_scales(
    layer: torch.nn.Module, memory: SlotMemory, layout: SlotLayout, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scales of w13 and w2 [layout.num_slots, ...], as SGLang left them after loading.

    num_rows: where slots are virtual, there are so many rows instead, and nothing is in them yet.
    None where nothing is quantised. `memory` counts them from now on. Raises UnsupportedModelError
    where they are not one row a slot, or where the checkpoint had none for an expert of the base.
    """
    sizes = (layout.num_slots, layout.num_base)
    num_slots, num_loaded = sizes if num_rows is None else (num_rows, 0)
    _, parameters = parameters_of(layer)
    if parameters.scales is None:
        return None
    first, second = (getattr(layer, name).data for name in parameters.scales)
    for name, scales in zip(parameters.scales, (first, second), strict=True):
        if scales.shape[0] != num_slots:
            raise UnsupportedModelError(
                f"SGLang keeps {name} as {list(scales.shape)} after loading, without a row for "
                f"each of {num_slots} slots: this quantisation cannot be woven"
            )
        of_base = scales[:num_loaded].reshape(num_loaded, scales[0].numel())
        has_all = torch.isfinite(of_base).all(dim=1)
        if not bool(has_all.all()):
            raise UnsupportedModelError(
                f"the checkpoint has no finite {name} for the experts in slots "
                f"{(~has_all).nonzero().flatten().tolist()}: quantise the base anew"
            )
    if isinstance(memory, PaddedMemory | VirtualMemory):
        memory.padded_slot_bytes = first[0].nbytes + second[0].nbytes
    return first, second
