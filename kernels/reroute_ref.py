"""The definition of rerouting, in plain torch: the unfused chain of the paper.

[topk_ids, token_adapter_slots] -> reroute -> slot ids for the grouped GEMM
"""

from __future__ import annotations

import torch

from sgl_esft_kernels.checks import check_tensor

_ID_DTYPES = (torch.int32, torch.int64)


def reroute_unfused(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
) -> torch.Tensor:
    """Each token's experts, looked up in its adapter's row of the expert map.

    Semantics::

        slot_ids[t, k] = expert_map[token_adapter_slots[t], topk_ids[t, k]]   if topk_ids[t, k] >= 0
                       = -1                                                   otherwise

    topk_ids: [num_tokens, k] int32 or int64, expert ids; -1 = no expert.
    token_adapter_slots: [num_tokens] int32, adapter slots; -1 = base or padding.
    expert_map: [N + 1, M] int32, one row an adapter slot, the last row the base's,
        which is why slot -1 finds it; -1 = the expert lives on another rank.
    Returns slot ids [num_tokens, k] in the dtype of topk_ids; changes nothing.

    Three operations, as in section 4.3 of the ExpertWeave paper: broadcast the
    adapter ids, compute offsets into the map, gather. Raises ValueError for a
    wrong shape, dtype or device; ids outside the map are not checked here.
    """
    _check(topk_ids, token_adapter_slots, expert_map)
    num_rows, num_experts = expert_map.shape
    rows = token_adapter_slots.to(torch.int64).remainder(num_rows).unsqueeze(1)
    offsets = rows * num_experts + topk_ids.clamp(min=0)
    slot_ids = expert_map.view(-1)[offsets].to(topk_ids.dtype)
    return slot_ids.masked_fill_(topk_ids < 0, -1)


def _check(
    topk_ids: torch.Tensor, token_adapter_slots: torch.Tensor, expert_map: torch.Tensor
) -> None:
    device = expert_map.device
    check_tensor(expert_map, "expert_map", ndim=2, dtypes=(torch.int32,), device=device)
    check_tensor(topk_ids, "topk_ids", ndim=2, dtypes=_ID_DTYPES, device=device)
    check_tensor(
        token_adapter_slots, "token_adapter_slots", ndim=1, dtypes=(torch.int32,), device=device
    )
    if token_adapter_slots.shape[0] != topk_ids.shape[0]:
        raise ValueError(
            f"token_adapter_slots has {token_adapter_slots.shape[0]} tokens, "
            f"topk_ids has {topk_ids.shape[0]}"
        )
