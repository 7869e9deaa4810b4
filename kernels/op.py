"""`reroute` as operators of torch: their schemas and fakes, an implementation for each device type.

    reroute(...)        -> torch.ops.sgl_esft.reroute[_out]       by device: CPU (csrc/reroute),
    reroute(..., where) -> torch.ops.sgl_esft.reroute_rows        CUDA (Triton), NPU (Triton-Ascend)

The operators are defined here; implementations.py brings what runs behind them. `where` has an
operator of its own, so that whoever has no experts in tiers does not even hand over a None: for
one token, the dispatcher's arguments are much of what the call takes. It writes to `out` always.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_esft_kernels.checks import check_reroute_inputs
from sgl_esft_kernels.errors import KernelInputError

NAMESPACE = "sgl_esft"

# What an implementation loads: called as `reroute` below is, with the same contract.
RerouteFunction = Callable[..., torch.Tensor]

# For the life of the process: torch forgets an operator with its Library.
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
LIBRARY.define("reroute(Tensor topk_ids, Tensor token_adapter_slots, Tensor expert_map) -> Tensor")
LIBRARY.define(
    "reroute_out(Tensor topk_ids, Tensor token_adapter_slots, Tensor expert_map, "
    "Tensor(a!) out) -> ()"
)
LIBRARY.define(
    "reroute_rows(Tensor topk_ids, Tensor token_adapter_slots, Tensor expert_map, Tensor where, "
    "Tensor(a!) out) -> ()"
)


def reroute(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's experts, looked up in its adapter's row of the expert map.

    Semantics::

        slot      = expert_map[token_adapter_slots[t], topk_ids[t, k]]   if topk_ids[t, k] >= 0
                  = -1                                                   otherwise
        out[t, k] = slot                                   without `where`, or if slot is -1
                  = where[slot]                            otherwise

    topk_ids: [num_tokens, k] int32 or int64, expert ids in 0..M-1; -1 = no expert.
    token_adapter_slots: [num_tokens] int32, adapter slots in 0..N-1; -1 = base or padding.
    expert_map: [N + 1, M] int32, one row an adapter slot, the last row the base's,
        which is why slot -1 finds it; -1 = the expert lives on another rank.
    out: [num_tokens, k] in the dtype of topk_ids, overwritten; may be topk_ids itself.
    where: [num_slots] int32, for experts in tiers: the slots of the map are virtual, and
        this is the row of a smaller expert tensor that a slot's expert lies in;
        NOT_HERE (-2) = in a lower tier. May not change during the call.
    Returns slot ids, with `where` rows: `out`, or a new tensor when that is None.

    All tensors contiguous and on one device. ExpertWeave section 4.3, one launch.
    Raises KernelInputError for a wrong shape, dtype, device or layout. Values out of
    range raise it on the CPU; on accelerators they are checked in a debug build
    (SGL_ESFT_DEBUG_KERNELS=1) and are undefined otherwise.

    No dispatch may see NOT_HERE: what a MoE kernel makes of a row that does not exist is
    undefined. On the CPU and in a debug build an expert that is not here raises
    KernelInputError with its token, id and slot. On accelerators NOT_HERE is passed through
    otherwise: whoever gives `where` brings every expert that is asked for first.
    """
    if where is not None:
        return _reroute_rows(topk_ids, token_adapter_slots, expert_map, out, where)
    try:
        if out is None:
            slot_ids: torch.Tensor = torch.ops.sgl_esft.reroute.default(
                topk_ids, token_adapter_slots, expert_map
            )
            return slot_ids
        torch.ops.sgl_esft.reroute_out.default(topk_ids, token_adapter_slots, expert_map, out)
    except ValueError as error:  # native code knows that a tensor is wrong, or which value is
        check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out)
        raise KernelInputError(str(error)) from error
    return out


def _reroute_rows(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None,
    where: torch.Tensor,
) -> torch.Tensor:
    """`reroute` with `where`."""
    out = torch.empty_like(topk_ids) if out is None else out
    try:
        torch.ops.sgl_esft.reroute_rows.default(
            topk_ids, token_adapter_slots, expert_map, where, out
        )
    except ValueError as error:
        check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out, where)
        raise KernelInputError(str(error)) from error
    return out


def implement(launch: RerouteFunction, dispatch_key: str) -> None:
    """Make `launch` the operators' implementation on one kind of device; once a process."""

    def launch_out(*tensors: torch.Tensor) -> None:
        launch(*tensors)

    def launch_rows(*tensors: torch.Tensor) -> None:
        *inputs, where, out = tensors
        launch(*inputs, out=out, where=where)

    LIBRARY.impl("reroute", launch, dispatch_key)
    LIBRARY.impl("reroute_out", launch_out, dispatch_key)
    LIBRARY.impl("reroute_rows", launch_rows, dispatch_key)


@torch.library.register_fake(f"{NAMESPACE}::reroute", lib=LIBRARY)
def _reroute_fake(
    topk_ids: torch.Tensor, token_adapter_slots: torch.Tensor, expert_map: torch.Tensor
) -> torch.Tensor:
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map)
    return torch.empty_like(topk_ids)


@torch.library.register_fake(f"{NAMESPACE}::reroute_out", lib=LIBRARY)
def _reroute_out_fake(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor,
) -> None:
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out)


@torch.library.register_fake(f"{NAMESPACE}::reroute_rows", lib=LIBRARY)
def _reroute_rows_fake(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    where: torch.Tensor,
    out: torch.Tensor,
) -> None:
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out, where)
