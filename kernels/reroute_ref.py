"""The definition of rerouting, in plain torch: the unfused chain of the paper.

[topk_ids, token_adapter_slots] -> reroute -> slot ids for the grouped GEMM
"""

from __future__ import annotations

import torch

from sgl_esft_kernels.checks import check_reroute_inputs, check_rows, check_values, is_debug


def reroute_unfused(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reroute` (op.py has the contract), as the paper's three operations on any device.

    Section 4.3 of the ExpertWeave paper: broadcast the adapter ids, compute offsets
    into the map, gather. Values out of range are checked in a debug build only, an expert
    without a row on a CPU too: there is no device to wait for.
    """
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out, where)
    if is_debug():
        check_values(topk_ids, token_adapter_slots, expert_map)
    slot_ids = _slots(topk_ids, token_adapter_slots, expert_map)
    if where is not None:
        if is_debug() or where.device.type == "cpu":
            check_rows(topk_ids, slot_ids, where)
        slot_ids = _rows(slot_ids, where)
    return slot_ids if out is None else out.copy_(slot_ids)


def check_resident(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    where: torch.Tensor,
) -> None:
    """Raises KernelInputError for a value out of range and for an expert that has no row.

    Before a launch that cannot name them itself. Reads the tensors: for debug builds and tests.
    """
    check_values(topk_ids, token_adapter_slots, expert_map)
    check_rows(topk_ids, _slots(topk_ids, token_adapter_slots, expert_map), where)


def _slots(
    topk_ids: torch.Tensor, token_adapter_slots: torch.Tensor, expert_map: torch.Tensor
) -> torch.Tensor:
    """[num_tokens, k] in the dtype of topk_ids: the map's cells, -1 where the id is."""
    num_rows, num_experts = expert_map.shape
    rows = token_adapter_slots.to(torch.int64).remainder(num_rows).unsqueeze(1)
    offsets = rows * num_experts + topk_ids.clamp(min=0)
    slot_ids = expert_map.view(-1)[offsets].to(topk_ids.dtype)
    return slot_ids.masked_fill_(topk_ids < 0, -1)


def _rows(slot_ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[num_tokens, k] in the dtype of slot_ids: where each slot's expert lies; -1 stays -1."""
    rows = where[slot_ids.clamp(min=0).to(torch.int64)].to(slot_ids.dtype)
    return torch.where(slot_ids < 0, slot_ids, rows)
