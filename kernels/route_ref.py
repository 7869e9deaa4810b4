"""The definition of the fused router, in plain torch: choose, weigh, reroute.

router_logits -> scores -> choice -> [groups] -> expert ids -> weights; expert ids -> slot ids
"""

from __future__ import annotations

import torch

from sgl_esft_kernels.errors import KernelInputError
from sgl_esft_kernels.reroute_ref import reroute_unfused
from sgl_esft_kernels.route_spec import (
    LOWEST_CHOICE,
    RENORMALIZE_EPSILON,
    RouterSpec,
    check_route_inputs,
)


def route_and_reroute(
    router_logits: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    spec: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts by its logits, as slots of its adapter, with their weights.

    Semantics, for a token that is not padding::

        score = softmax(logits) or sigmoid(logits)                 in float32
        choice = logits if softmax else score (+ correction_bias)  the best top_k win,
                                                                   of equals the lowest id
        weight = score [/ (sum over the routed + 1e-20)] [* routed_scaling_factor]
        slot_id = expert_map[token_adapter_slot, expert_id]
                  with `where`: where[slot_id], unless that is -1

    router_logits: [num_tokens, M_routed] float32, bfloat16 or float16. NaN is never chosen
        before a number.
    token_adapter_slots: [num_tokens] int32, adapter slots in 0..N-1; -1 = base or padding.
    expert_map: [N + 1, M_routed + num_fused_shared_experts] int32, the last row the base's;
        -1 = the expert lives on another rank.
    correction_bias: [M_routed], any float dtype of the logits'; if and only if spec.has_bias.
    num_token_non_padded: one int32 or int64 on the device; later tokens are padding: slot
        ids -1, weights 0. None = no padding.
    where: [num_slots] int32, the row that each slot's expert lies in, or NOT_HERE, which
        no dispatch may see: op.py has the contract.
    Returns topk_weights [num_tokens, top_k] float32 and slot_ids [num_tokens, top_k] int32,
    routed experts best first, then the shared ones.

    All tensors contiguous and on one device. ExpertWeave section 4.3, folded into the router.
    Raises KernelInputError for a wrong shape, dtype, device, layout or an unknown scoring,
    and for an expert that is not here, where op.reroute does.
    """
    check_route_inputs(
        router_logits,
        token_adapter_slots,
        expert_map,
        spec,
        correction_bias,
        num_token_non_padded,
        where,
    )
    weights, expert_ids = select_experts(router_logits, spec, correction_bias)
    if num_token_non_padded is not None:
        tokens = torch.arange(router_logits.shape[0], device=router_logits.device)
        is_padding = (tokens >= num_token_non_padded.view(-1)).unsqueeze(1)
        weights = weights.masked_fill(is_padding, 0.0)
        expert_ids = expert_ids.masked_fill(is_padding, -1)
    return weights, reroute_unfused(expert_ids, token_adapter_slots, expert_map, where=where)


def select_experts(
    router_logits: torch.Tensor, spec: RouterSpec, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The router without rerouting: weights float32 and expert ids int32, [num_tokens, top_k]."""
    logits = router_logits.float()
    scores = _scores(logits, spec)
    choice = logits if spec.scoring == "softmax" else scores
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    choice = torch.where(choice > LOWEST_CHOICE, choice, LOWEST_CHOICE)
    expert_ids = _best(_in_best_groups(choice, spec), spec.num_routed)
    weights = _weights(scores.gather(1, expert_ids), spec)
    return weights, _with_shared(expert_ids, spec, logits.shape[1]).to(torch.int32)


def _scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    if spec.scoring == "softmax":
        return logits.softmax(dim=-1)
    if spec.scoring == "sigmoid":
        return logits.sigmoid()
    raise KernelInputError(f"scoring is {spec.scoring!r}, must be 'softmax' or 'sigmoid'")


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """[..., count] int64: indices of the largest, best first; of equals the lowest index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(choice: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """The choice with -inf for the experts of all groups but the best."""
    if spec.num_expert_groups == 1:
        return choice
    grouped = choice.view(choice.shape[0], spec.num_expert_groups, -1)
    group_scores = grouped.topk(2 if spec.has_bias else 1, dim=-1).values.sum(dim=-1)
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool)
    is_kept.scatter_(1, _best(group_scores, spec.topk_groups), True)
    return grouped.masked_fill(~is_kept.unsqueeze(2), float("-inf")).view_as(choice)


def _weights(routed: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    """[num_tokens, num_routed] scores -> [num_tokens, top_k] weights."""
    total = routed.sum(dim=-1, keepdim=True)
    shared = (total / spec.routed_scale).expand(-1, spec.num_fused_shared_experts)
    weights = torch.cat([routed, shared], dim=1)
    if spec.renormalize:
        weights = weights / (total + RENORMALIZE_EPSILON)
    if spec.scale_output:
        weights = weights * spec.routed_scale
    weights[:, spec.num_routed :] *= spec.shared_scale
    return weights


def _with_shared(expert_ids: torch.Tensor, spec: RouterSpec, num_experts: int) -> torch.Tensor:
    """Append the fused shared experts' ids, which follow the routed ones."""
    shared = torch.arange(spec.num_fused_shared_experts, device=expert_ids.device) + num_experts
    return torch.cat([expert_ids, shared.expand(expert_ids.shape[0], -1)], dim=1)
