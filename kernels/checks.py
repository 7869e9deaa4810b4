"""Checks at the boundary of an operator, each with the tensor's name."""

from __future__ import annotations

import functools
import os

import torch

from sgl_esft_kernels.errors import KernelInputError

ID_DTYPES = (torch.int32, torch.int64)
DEBUG_VARIABLE = "SGL_ESFT_DEBUG_KERNELS"
# In a table `where`: the slot's expert lies in a lower tier now. Not -1: that is another rank's and
# is skipped by every kernel of a MoE layer, so that a miss would be a wrong answer without a word.
NOT_HERE = -2


@functools.cache
def is_debug() -> bool:
    """Whether kernels of this process check the values that they read, too; read once."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def can_wait(device: torch.device) -> bool:
    """Whether values on this device can be read now: not while a CUDA graph is captured."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_tensor(
    tensor: torch.Tensor,
    name: str,
    *,
    ndim: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raises KernelInputError naming `name`, what it is and what it must be."""
    if tensor.ndim != ndim:
        raise KernelInputError(f"{name} has {tensor.ndim} dimensions, must have {ndim}")
    if tensor.dtype not in dtypes:
        raise KernelInputError(f"{name} is {tensor.dtype}, must be one of {dtypes}")
    if tensor.device != device:
        raise KernelInputError(f"{name} is on {tensor.device}, must be on {device}")
    if not tensor.is_contiguous():
        raise KernelInputError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, "
            "must be contiguous"
        )


def check_reroute_inputs(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> None:
    """What every implementation of reroute asks for. Raises KernelInputError."""
    device = expert_map.device
    check_tensor(expert_map, "expert_map", ndim=2, dtypes=(torch.int32,), device=device)
    check_tensor(topk_ids, "topk_ids", ndim=2, dtypes=ID_DTYPES, device=device)
    check_tensor(
        token_adapter_slots, "token_adapter_slots", ndim=1, dtypes=(torch.int32,), device=device
    )
    if 0 in expert_map.shape:
        raise KernelInputError(
            f"expert_map is {tuple(expert_map.shape)}, must have the base's row and an expert"
        )
    if token_adapter_slots.shape[0] != topk_ids.shape[0]:
        raise KernelInputError(
            f"token_adapter_slots has {token_adapter_slots.shape[0]} tokens, "
            f"topk_ids has {topk_ids.shape[0]}"
        )
    if out is not None:
        check_tensor(out, "out", ndim=2, dtypes=(topk_ids.dtype,), device=device)
        if out.shape != topk_ids.shape:
            raise KernelInputError(
                f"out is {tuple(out.shape)}, must be {tuple(topk_ids.shape)} as topk_ids"
            )
    if where is not None:
        check_where(where, device)


def check_where(where: torch.Tensor, device: torch.device) -> None:
    """Raises KernelInputError unless this can be a table of rows, one for each slot."""
    check_tensor(where, "where", ndim=1, dtypes=(torch.int32,), device=device)
    if where.shape[0] == 0:
        raise KernelInputError("where has no slots, must have each that the expert map names")


def check_map_height(expert_map: torch.Tensor, num_adapters: int) -> None:
    """Raises KernelInputError unless the map has a row for each adapter slot and the base's."""
    if expert_map.ndim != 2 or expert_map.shape[0] != num_adapters + 1:
        raise KernelInputError(
            f"expert_map is {tuple(expert_map.shape)}, must have {num_adapters + 1} rows: one for "
            f"each of {num_adapters} adapter slots and the base's"
        )


def check_values(
    topk_ids: torch.Tensor, token_adapter_slots: torch.Tensor, expert_map: torch.Tensor
) -> None:
    """Raises KernelInputError for an id or an adapter slot that the map does not have.

    Reads the tensors, so on an accelerator it waits for the device: for debug builds and tests.
    """
    num_rows, num_experts = expert_map.shape
    _check_range(topk_ids, "topk_ids", num_experts)
    _check_range(token_adapter_slots, "token_adapter_slots", num_rows - 1)


def check_rows(topk_ids: torch.Tensor, slot_ids: torch.Tensor, where: torch.Tensor) -> None:
    """Raises KernelInputError for the first expert that `where` has no row for.

    slot_ids: [num_tokens, k], what the expert map has for topk_ids; -1 = none, which needs no row.
    Names token, expert id and slot, in the native code's words. Reads the tensors, as above.
    """
    num_slots = where.shape[0]
    rows = where[slot_ids.clamp(0, num_slots - 1).to(torch.int64)]
    is_slot = (slot_ids >= 0) & (slot_ids < num_slots)
    wrong = ((slot_ids != -1) & ~(is_slot & (rows >= 0))).nonzero()
    if wrong.shape[0] == 0:
        return
    token, column = wrong[0].tolist()
    expert, slot, row = (int(each[token, column]) for each in (topk_ids, slot_ids, rows))
    why = f"is not here, where[{slot}] is {row}"
    if not is_slot[token, column]:
        why = f"must be in -1..{num_slots - 1}"
    raise KernelInputError(f"token {token} asks for expert {expert}: its slot {slot} {why}")


def _check_range(values: torch.Tensor, name: str, end: int) -> None:
    if values.numel() == 0:
        return
    low, high = int(values.min()), int(values.max())
    if low < -1 or high >= end:
        raise KernelInputError(f"{name} has values from {low} to {high}, must be in -1..{end - 1}")
