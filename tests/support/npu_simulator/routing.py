"""Routing: from a token's experts to rows grouped by expert, and back.

    gating_top_k[_softmax] -> init_routing_v2 -> (grouped matmuls) -> finalize_routing

Contracts: `schemas.py` names the documents. Rows nobody writes are NaN.
"""

from __future__ import annotations

import torch

from tests.support.npu_simulator.contract import (
    FLOATS,
    absent,
    require,
    tensor,
    undefined_like,
)

MAX_EXPERTS = 10240
MAX_TOP_K = 1024


def init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, H], expert_idx [N, K] int32 -> rows [N * K, H], row of each pair [N * K], counts.

    Pairs are sorted by expert, in the order they came. A pair whose expert is outside the active
    range has no row: its index is -1, and as many rows at the end are undefined.
    """
    name = "npu_moe_init_routing_v2"
    absent(name, scale=scale, offset=offset, x_dtype=x_dtype)
    tensor(name, "x", x, dtypes=FLOATS, dims=(2,), contiguous=True)
    tensor(name, "expert_idx", expert_idx, dtypes=(torch.int32,), dims=(2,), contiguous=True)
    require(len(expert_idx) == len(x), name, f"{len(expert_idx)} rows of ids for {len(x)} of x")
    require(0 < expert_num <= MAX_EXPERTS, name, f"expert_num {expert_num}")
    start, end = active_expert_range or (0, expert_num)
    require(0 <= start < end <= expert_num, name, f"active_expert_range [{start}, {end}]")
    _check_modes(name, drop_pad_mode, expert_tokens_num_type, expert_tokens_num_flag, quant_mode)
    require(row_idx_type == 0, name, f"row_idx_type {row_idx_type} is not simulated")
    num_pairs = expert_idx.numel()
    require(active_num == num_pairs, name, f"active_num {active_num}, must be {num_pairs}")
    _check_ids(name, expert_idx, expert_num)
    return _route(x, expert_idx.reshape(-1).long(), start, end, expert_idx.shape[1])


def _check_modes(
    name: str, drop_pad_mode: int, tokens_type: int, tokens_flag: bool, quant_mode: int
) -> None:
    """aclnnMoeInitRoutingV3 takes less than its parameters' own ranges."""
    require(drop_pad_mode == 0, name, f"drop_pad_mode {drop_pad_mode}, only 0 is supported")
    require(tokens_type in (1, 2), name, f"expert_tokens_num_type {tokens_type}: 1 or 2")
    require(tokens_type == 1, name, "expert_tokens_num_type 2 is not simulated")
    require(tokens_flag, name, "expert_tokens_num_flag must be True")
    require(quant_mode == -1, name, f"quant_mode {quant_mode} is not simulated")


def _check_ids(name: str, ids: torch.Tensor, expert_num: int) -> None:
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0, name, f"expert id {low}: the documents give a negative id no meaning")
        require(high < expert_num, name, f"expert id {high} with expert_num {expert_num}")


def _route(
    x: torch.Tensor, ids: torch.Tensor, start: int, end: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    active = (ids >= start) & (ids < end)
    order = torch.where(active, ids, end).argsort(stable=True)[: int(active.sum())]
    rows = undefined_like(x, len(ids), x.shape[1])
    rows[: len(order)] = x[order // top_k]
    row_of_pair = torch.full((len(ids),), -1, dtype=torch.int32)
    row_of_pair[order] = torch.arange(len(order), dtype=torch.int32)
    counts = torch.bincount(ids[active] - start, minlength=end - start)
    unused = torch.full((len(x),), float("nan"))
    return rows, row_of_pair, counts, unused


def finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """The weighted sum of each token's rows, [N, H].

    Modes 2 and 3 take row indices by token, as npu_moe_init_routing_v2 gives them. Mode 2 has rows
    [N * K, H] and indices from 0; mode 3 rows [E, C, H], and -1 for a pair without a row.
    """
    name = "npu_moe_finalize_routing"
    absent(name, skip1=skip1, skip2=skip2, bias=bias)
    require(drop_pad_mode in (2, 3), name, f"drop_pad_mode {drop_pad_mode} is not simulated")
    rows, indices = expanded_permuted_rows, expanded_src_to_dst_row
    tensor(name, "rows", rows, dtypes=FLOATS, dims=(2 if drop_pad_mode == 2 else 3,))
    assert scales is not None, "weights are always given here"
    tensor(name, "scales", scales, dtypes=(rows.dtype,), dims=(2,))
    tensor(name, "expanded_src_to_dst_row", indices, dtypes=(torch.int32,), dims=(1,))
    num_tokens, top_k = scales.shape
    require(indices.numel() == scales.numel(), name, f"{indices.numel()} indices")
    if drop_pad_mode == 2:
        require(len(rows) == scales.numel(), name, f"{len(rows)} rows for {scales.numel()} pairs")
    else:
        require(len(rows) >= top_k, name, f"E is {len(rows)}, must be at least K, {top_k}")
    _check_indices(name, indices, rows.shape[:-1].numel(), drop_pad_mode == 3)
    if export_for_source_row is not None:
        most = len(rows) if drop_pad_mode == 3 else None
        _check_experts(name, export_for_source_row, scales, most)
    flat = rows.reshape(-1, rows.shape[-1]).float()
    gathered = flat[indices.clamp(min=0).long()]
    gathered = torch.where((indices >= 0).unsqueeze(-1), gathered, 0.0)
    weighted = gathered.view(num_tokens, top_k, -1) * scales.float().unsqueeze(-1)
    return weighted.sum(dim=1).to(rows.dtype)


def _check_indices(name: str, indices: torch.Tensor, num_rows: int, may_drop: bool) -> None:
    least = -1 if may_drop else 0
    if indices.numel():
        low, high = int(indices.min()), int(indices.max())
        require(low >= least, name, f"row index {low}, must be at least {least} in this mode")
        require(high < num_rows, name, f"row index {high} of {num_rows} rows")


def _check_experts(
    name: str, experts: torch.Tensor, scales: torch.Tensor, num_experts: int | None
) -> None:
    what = "export_for_source_row"
    tensor(name, what, experts, dtypes=(torch.int32,), dims=(2,))
    require(experts.shape == scales.shape, name, f"{what} has shape {tuple(experts.shape)}")
    require((experts >= 0).all(), name, f"{what} has an expert below 0")
    if num_experts is not None:
        require((experts < num_experts).all(), name, f"{what} has an expert from E, {num_experts}")


def token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """As finalize_routing in mode 2, but each index occurs once."""
    name = "npu_moe_token_unpermute"
    absent(name, restore_shape=restore_shape)
    require(not padded_mode, name, "padded_mode is not supported")
    tensor(name, "permuted_tokens", permuted_tokens, dtypes=FLOATS, dims=(2,))
    tensor(name, "sorted_indices", sorted_indices, dtypes=(torch.int32,), dims=(1,))
    assert probs is not None, "weights are always given here"
    tensor(name, "probs", probs, dtypes=FLOATS, dims=(2,))
    count = sorted_indices.numel()
    require(count == probs.numel() == len(permuted_tokens), name, f"{count} indices")
    in_order = torch.equal(sorted_indices.sort().values.long(), torch.arange(count))
    require(in_order, name, "sorted_indices is not each of 0 to N * K - 1 once")
    gathered = permuted_tokens.float()[sorted_indices.long()].view(*probs.shape, -1)
    return (gathered * probs.float().unsqueeze(-1)).sum(dim=1).to(permuted_tokens.dtype)


def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, E] -> the k largest of its softmax [N, k], their experts int32, their source rows."""
    name = "npu_moe_gating_top_k_softmax"
    absent(name, finished=finished)
    tensor(name, "x", x, dtypes=FLOATS, dims=(2,))
    require(0 < k <= min(x.shape[1], MAX_TOP_K), name, f"k {k} of {x.shape[1]} experts")
    weights, experts = x.float().softmax(dim=-1).topk(k)
    rows = torch.arange(experts.numel(), dtype=torch.int32).view(k, len(x)).t().contiguous()
    return weights.to(x.dtype), experts.to(torch.int32), rows


def gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best experts of the k_group best groups; a sigmoid's weights sum to one."""
    name = "npu_moe_gating_top_k"
    absent(name, input_ids=input_ids, tid2eid=tid2eid)
    tensor(name, "x", x, dtypes=FLOATS, dims=(2,))
    require(renorm == 0, name, f"renorm {renorm}, only 0 is supported")
    require(norm_type in (0, 1), name, f"norm_type {norm_type}")
    require(group_select_mode in (0, 1), name, f"group_select_mode {group_select_mode}")
    num_experts = x.shape[1]
    require(num_experts <= 2048, name, f"{num_experts} experts")
    require(1 <= k_group <= group_count, name, f"k_group {k_group} of {group_count}")
    require(num_experts % group_count == 0, name, f"{group_count} groups of {num_experts}")
    per_group = num_experts // group_count
    require(per_group > 2, name, f"{per_group} experts a group, must be more than 2")
    require(1 <= k <= per_group * k_group, name, f"k {k}")
    if bias is not None:
        tensor(name, "bias", bias, dtypes=(x.dtype,), dims=(1,))
        require(len(bias) == num_experts, name, f"{len(bias)} biases")
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    ranked = _in_best_groups(
        scores if bias is None else scores + bias.float(), group_count, k_group, group_select_mode
    )
    experts = ranked.topk(k).indices
    weights = scores.gather(1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, experts.to(torch.int32), scores if out_flag else torch.empty(0)


def _in_best_groups(
    scores: torch.Tensor, group_count: int, k_group: int, select_mode: int
) -> torch.Tensor:
    """The scores, minus infinity outside each row's k_group best groups."""
    groups = scores.view(len(scores), group_count, -1)
    best = groups.amax(-1) if select_mode == 0 else groups.topk(2).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(k_group).indices, True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(scores)
