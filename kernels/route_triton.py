"""The fused router on CUDA: scores, groups, top-k, weights and rerouting in one launch.

    router_logits -> [route_kernel] -> topk_weights, slot_ids: weaving has no launch of its own

Supported: softmax; sigmoid, with or without a correction bias; groups with either; renormalising;
a scaling factor; fused shared experts; a count of tokens that are not padding; up to 1024 experts
and 32 of them a token; maps of expert parallelism. `unsupported_reason` names the rest, so that a
server can refuse it at start-up. Not here: EPLB's redundant experts, custom routing functions,
per-token biases, packed ids, shared experts with a slot for each rank (DeepEP).

How it differs from what SGLang 0.5.21 does on CUDA, beside rerouting:

- Scores are float32 whatever the logits' dtype. SGLang's grouped softmax rounds them to the
  logits' dtype before it chooses, so experts that tie there may be chosen differently.
- Of equal experts and of equal groups the lowest id wins, on every path.
- A padding token has no expert at all and weights of 0. SGLang leaves its weights, and the ids of
  its fused shared experts, as they are; nobody reads them.

How it works: an expert's choice and its id make one 64-bit key that sorts as a pair, so that each
of the top_k rounds is one reduction and ties need no second one. Weights are computed again from
the logits of the few that won, which are in the L1 cache by then.
"""

# ruff: noqa: N803 -- a kernel's compile-time arguments are in capitals, as usual in Triton
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_esft_kernels.checks import can_wait, is_debug
from sgl_esft_kernels.errors import KernelInputError, KernelUnavailableError
from sgl_esft_kernels.reroute_ref import check_resident
from sgl_esft_kernels.route_spec import (
    LOWEST_CHOICE,
    RENORMALIZE_EPSILON,
    RouterSpec,
    check_route_inputs,
    unsupported_reason,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise KernelUnavailableError(
        "the fused router needs triton, which is not installed: install the cuda extra"
    ) from error

from sgl_esft_kernels.reroute_triton import rows_of

MAX_EXPERTS = 1024

_FLOOR = tl.constexpr(LOWEST_CHOICE)
_EPSILON = tl.constexpr(RENORMALIZE_EPSILON)
_NO_KEY = tl.constexpr(-(2**63))  # below the key of every choice
_LOW_BITS = tl.constexpr(2**31 - 1)


@triton.jit
def _key(choice: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64 that sorts by (choice, -index). NaN counts as the lowest number, -0 as 0."""
    choice = tl.where(choice > _FLOOR, choice, _FLOOR)
    choice = tl.where(choice == 0.0, 0.0, choice)
    bits = choice.to(tl.int32, bitcast=True)
    # As integers, negative floats sort the wrong way round: turn all bits but the sign.
    ordered = tl.where(bits < 0, bits ^ _LOW_BITS, bits)
    return (ordered.to(tl.int64) << 32) | (index ^ _LOW_BITS).to(tl.int64)


@triton.jit
def _choice_of(key: tl.tensor) -> tl.tensor:
    """The float32 that a key was made from."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ _LOW_BITS, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key: tl.tensor) -> tl.tensor:
    """The int32 index that a key was made from."""
    return (key & _LOW_BITS).to(tl.int32) ^ _LOW_BITS


@triton.jit
def _in_best_groups(
    keys: tl.tensor,  # [tokens, groups, members] int64
    groups: tl.tensor,  # [1, groups]
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,  # a group's score is the sum of its best two
) -> tl.tensor:
    """The keys, with none for the experts of all groups but the best."""
    best = tl.max(keys, axis=2)
    scores = _choice_of(best)
    if BY_TWO:
        others = tl.where(keys == best[:, :, None], _NO_KEY, keys)
        scores += _choice_of(tl.max(others, axis=2))
    group_keys = tl.where(groups < NUM_GROUPS, _key(scores, groups), _NO_KEY)
    left = group_keys
    last = group_keys
    for _ in tl.static_range(TOPK_GROUPS):
        last = tl.max(left, axis=1)[:, None]
        left = tl.where(left == last, _NO_KEY, left)
    return tl.where((group_keys >= last)[:, :, None], keys, _NO_KEY)


@triton.jit
def _best_indices(
    keys: tl.tensor,  # [tokens, groups, members] int64
    columns: tl.tensor,  # [1, columns]
    COUNT: tl.constexpr,
) -> tl.tensor:
    """[tokens, columns] int32: indices of the COUNT largest keys of each token, best first.

    Groups and members are reduced one after the other: reshaped to one axis, they may lie in lanes
    of a warp that are not side by side, and Triton 3.6 reduces over other lanes then.
    """
    indices = tl.zeros([keys.shape[0], columns.shape[1]], tl.int32)
    is_grouped: tl.constexpr = keys.shape[1] > 1
    if not is_grouped:
        keys = tl.reshape(keys, [keys.shape[0], keys.shape[2]])  # shorter code
    for column in tl.static_range(COUNT):
        if is_grouped:
            best = tl.max(tl.max(keys, axis=2), axis=1)
            keys = tl.where(keys == best[:, None, None], _NO_KEY, keys)
        else:
            best = tl.max(keys, axis=1)
            keys = tl.where(keys == best[:, None], _NO_KEY, keys)
        indices = tl.where(columns == column, _index_of(best)[:, None], indices)
    return indices


@triton.jit
def _choose(
    logits: tl.tensor,  # [tokens, groups, members] float32
    correction_bias_ptr: tl.tensor,
    experts: tl.tensor,  # [groups, members] int32
    is_expert: tl.tensor,
    columns: tl.tensor,  # [1, columns] int32
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    NUM_ROUTED: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
) -> tl.tensor:
    """[tokens, columns] int32: each token's routed experts, best first."""
    # Softmax keeps the order of the logits.
    choice = logits if IS_SOFTMAX else tl.sigmoid(logits)
    if correction_bias_ptr is not None:
        bias = tl.load(correction_bias_ptr + experts, mask=is_expert, other=0.0)
        choice += bias.to(tl.float32)[None, :, :]
    keys = tl.where(is_expert[None, :, :], _key(choice, experts[None, :, :]), _NO_KEY)
    if NUM_GROUPS > 1:
        groups = tl.arange(0, experts.shape[0])[None, :]
        by_two: tl.constexpr = correction_bias_ptr is not None
        keys = _in_best_groups(keys, groups, NUM_GROUPS, TOPK_GROUPS, by_two)
    return _best_indices(keys, columns, NUM_ROUTED)


@triton.jit
def _weigh(
    chosen: tl.tensor,  # [tokens, columns] float32, the logits of the chosen experts
    logits: tl.tensor,  # [tokens, groups, members] float32, -inf where there is no expert
    is_routed: tl.tensor,  # [1, columns]
    IS_SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    ROUTED_SCALE: tl.constexpr,
    SHARED_SCALE: tl.constexpr,
) -> tl.tensor:
    """[tokens, columns] float32: the weights of the routed experts, then of the shared ones."""
    if IS_SOFTMAX:
        peak = tl.max(tl.max(logits, axis=2), axis=1)[:, None]
        spread = tl.exp(logits - peak[:, :, None])
        weights = tl.exp(chosen - peak) / tl.sum(tl.sum(spread, axis=2), axis=1)[:, None]
    else:
        weights = tl.sigmoid(chosen)
    total = tl.sum(tl.where(is_routed, weights, 0.0), axis=1)[:, None]
    weights = tl.where(is_routed, weights, total / ROUTED_SCALE)
    if RENORMALIZE:
        weights = weights / (total + _EPSILON)
    return weights * tl.where(is_routed, OUTPUT_SCALE, OUTPUT_SCALE * SHARED_SCALE)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["token_adapter_slots_ptr", "expert_map_ptr", "where_ptr"],
)
def route_kernel(
    router_logits_ptr: tl.tensor,  # [num_tokens, NUM_EXPERTS]
    correction_bias_ptr: tl.tensor,  # [NUM_EXPERTS], or None
    token_adapter_slots_ptr: tl.tensor,  # [num_tokens] int32
    expert_map_ptr: tl.tensor,  # [NUM_ROWS, NUM_EXPERTS + shared experts] int32
    where_ptr: tl.tensor,  # [NUM_SLOTS] int32, or None
    num_token_non_padded_ptr: tl.tensor,  # one integer, or None
    topk_weights_ptr: tl.tensor,  # [num_tokens, TOP_K] float32
    slot_ids_ptr: tl.tensor,  # [num_tokens, TOP_K] int32
    num_tokens: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_ROUTED: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    ROUTED_SCALE: tl.constexpr,
    SHARED_SCALE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_WHERE: tl.constexpr,
    CHECK: tl.constexpr,
) -> None:
    """A program routes BLOCK_TOKENS tokens, over experts laid out as [group, member]."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = tokens < num_tokens
    is_live = is_token
    if num_token_non_padded_ptr is not None:
        is_live = is_live & (tokens < tl.load(num_token_non_padded_ptr))
    adapter_slots = tl.load(token_adapter_slots_ptr + tokens, mask=is_live, other=-1)
    if CHECK:
        is_slot = (adapter_slots >= -1) & (adapter_slots < NUM_ROWS - 1)
        tl.device_assert(is_slot, "token_adapter_slots out of range")
    groups = tl.arange(0, BLOCK_GROUPS)[:, None]
    members = tl.arange(0, BLOCK_MEMBERS)[None, :]
    experts = groups * (NUM_EXPERTS // NUM_GROUPS) + members
    is_expert = (groups < NUM_GROUPS) & (members < NUM_EXPERTS // NUM_GROUPS)
    logits_of = router_logits_ptr + tokens * NUM_EXPERTS
    is_logit = is_live[:, None, None] & is_expert[None, :, :]
    logits = tl.load(logits_of[:, None, None] + experts[None, :, :], mask=is_logit, other=0.0)
    logits = tl.where(is_expert[None, :, :], logits.to(tl.float32), -float("inf"))

    columns = tl.arange(0, BLOCK_K)[None, :]
    is_routed = columns < NUM_ROUTED
    expert_ids = _choose(
        logits, correction_bias_ptr, experts, is_expert, columns,
        NUM_GROUPS, TOPK_GROUPS, NUM_ROUTED, IS_SOFTMAX,
    )  # fmt: skip
    chosen = tl.load(logits_of[:, None] + expert_ids, mask=is_live[:, None] & is_routed, other=0.0)
    weights = _weigh(
        chosen.to(tl.float32), logits, is_routed,
        IS_SOFTMAX, RENORMALIZE, OUTPUT_SCALE, ROUTED_SCALE, SHARED_SCALE,
    )  # fmt: skip

    is_result = is_token[:, None] & (columns < TOP_K)
    is_rerouted = is_live[:, None] & (columns < TOP_K)
    expert_ids = tl.where(is_routed, expert_ids, NUM_EXPERTS + columns - NUM_ROUTED)
    rows = tl.where(adapter_slots < 0, NUM_ROWS - 1, adapter_slots).to(tl.int64)
    cells = rows[:, None] * (NUM_EXPERTS + TOP_K - NUM_ROUTED) + expert_ids
    slot_ids = tl.load(expert_map_ptr + cells, mask=is_rerouted, other=-1)
    if HAS_WHERE:
        slot_ids = rows_of(slot_ids, where_ptr, NUM_SLOTS, CHECK)
    results = tokens[:, None] * TOP_K + columns
    tl.store(topk_weights_ptr + results, tl.where(is_rerouted, weights, 0.0), mask=is_result)
    tl.store(slot_ids_ptr + results, slot_ids, mask=is_result)


def route_and_reroute(
    router_logits: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    spec: RouterSpec,
    correction_bias: torch.Tensor | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_and_reroute` (route_ref.py has the contract), as one launch on the current stream.

    Never waits for the device; its only allocations are its results. No tokens, no launch.
    Raises KernelInputError, also for a router that is not supported. Adapter slots out of
    range are checked in a debug build (SGL_ESFT_DEBUG_KERNELS=1) and are undefined otherwise.
    With `where` such a build waits for the device, to name an expert that is not here.
    """
    inputs = (spec, correction_bias, num_token_non_padded)
    check_route_inputs(router_logits, token_adapter_slots, expert_map, *inputs, where)
    _check_supported(spec, router_logits.shape[1])
    if where is not None and is_debug() and can_wait(where.device):
        _check_resident(router_logits, token_adapter_slots, expert_map, *inputs, where)
    num_tokens = router_logits.shape[0]
    shape, device = (num_tokens, spec.top_k), router_logits.device
    topk_weights = torch.empty(shape, dtype=torch.float32, device=device)
    slot_ids = torch.empty(shape, dtype=torch.int32, device=device)
    if num_tokens == 0:
        return topk_weights, slot_ids
    constants = kernel_constants(spec, router_logits.shape[1], expert_map.shape[0], where)
    route_kernel[(triton.cdiv(num_tokens, constants["BLOCK_TOKENS"]),)](
        router_logits,
        correction_bias,
        token_adapter_slots,
        expert_map,
        where,
        num_token_non_padded,
        topk_weights,
        slot_ids,
        num_tokens,
        **constants,
    )
    return topk_weights, slot_ids


def _check_resident(
    router_logits: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    spec: RouterSpec,
    correction_bias: torch.Tensor | None,
    num_token_non_padded: torch.Tensor | None,
    where: torch.Tensor,
) -> None:
    """Raises KernelInputError for an expert that this kernel will choose and that is not here.

    Which ones, the kernel itself says, with a map that leaves ids as they are.
    """
    experts = torch.arange(expert_map.shape[1], dtype=torch.int32, device=expert_map.device)
    as_they_are = experts.expand_as(expert_map).contiguous()
    _, expert_ids = route_and_reroute(
        router_logits, token_adapter_slots, as_they_are, spec, correction_bias, num_token_non_padded
    )
    check_resident(expert_ids, token_adapter_slots, expert_map, where)


def kernel_constants(
    spec: RouterSpec, num_experts: int, num_rows: int, where: torch.Tensor | None
) -> dict[str, Any]:
    """The kernel's compile-time arguments and options: the same for batches of any size."""
    block_groups = triton.next_power_of_2(spec.num_expert_groups)
    block_members = triton.next_power_of_2(num_experts // spec.num_expert_groups)
    block_experts = block_groups * block_members
    return {
        "NUM_EXPERTS": num_experts,
        "NUM_ROWS": num_rows,
        "NUM_SLOTS": 0 if where is None else where.shape[0],
        "NUM_GROUPS": spec.num_expert_groups,
        "TOPK_GROUPS": spec.topk_groups,
        "TOP_K": spec.top_k,
        "NUM_ROUTED": spec.num_routed,
        "IS_SOFTMAX": spec.scoring == "softmax",
        "RENORMALIZE": spec.renormalize,
        "OUTPUT_SCALE": spec.routed_scale if spec.scale_output else 1.0,
        "ROUTED_SCALE": spec.routed_scale,
        "SHARED_SCALE": spec.shared_scale,
        # About 256 experts a warp: reductions stay inside a warp, and few tokens fill many SMs.
        "BLOCK_TOKENS": max(1, min(4, 256 // block_experts)),
        "BLOCK_GROUPS": block_groups,
        "BLOCK_MEMBERS": block_members,
        "BLOCK_K": triton.next_power_of_2(spec.top_k),
        "HAS_WHERE": where is not None,
        "CHECK": is_debug(),
        "num_warps": 1 if block_experts <= 512 else 4,
        "enable_fp_fusion": False,  # a fused multiply-add could decide between close experts
        "debug": is_debug(),
    }


def _check_supported(spec: RouterSpec, num_experts: int) -> None:
    reason = unsupported_reason(spec)
    if reason is None and num_experts > MAX_EXPERTS:
        reason = f"{num_experts} experts: at most {MAX_EXPERTS}"
    if reason is not None:
        raise KernelInputError(f"the fused router does not support {reason}")


def load() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return `route_and_reroute` where it can run. Raises KernelUnavailableError."""
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "the fused router needs a CUDA device, torch sees none: check the driver, "
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build"
        )
    return route_and_reroute
