"""The definition of rerouting, in plain torch: the unfused chain of the paper.

[topk_ids, token_adapter_slots] -> reroute -> slot ids for the grouped GEMM
"""

from __future__ import annotations

import torch

from sgl_esft_kernels.checks import check_reroute_inputs, check_values, is_debug


def reroute_unfused(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reroute` (op.py has the contract), as the paper's three operations on any device.

    Section 4.3 of the ExpertWeave paper: broadcast the adapter ids, compute offsets
    into the map, gather. Values out of range are checked in a debug build only.
    """
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out)
    if is_debug():
        check_values(topk_ids, token_adapter_slots, expert_map)
    num_rows, num_experts = expert_map.shape
    rows = token_adapter_slots.to(torch.int64).remainder(num_rows).unsqueeze(1)
    offsets = rows * num_experts + topk_ids.clamp(min=0)
    slot_ids = expert_map.view(-1)[offsets].to(topk_ids.dtype)
    slot_ids = slot_ids.masked_fill_(topk_ids < 0, -1)
    return slot_ids if out is None else out.copy_(slot_ids)
