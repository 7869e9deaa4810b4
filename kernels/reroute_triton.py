"""`reroute` on CUDA: one launch of a Triton kernel, graph-safe and allowed in place.

    load() -> op.reroute -> torch.ops.sgl_esft.reroute[_out|_rows] -> launch_reroute -> kernel

A program takes BLOCK ids of the flattened [num_tokens, k]. Each lane reads its own id,
tag and map cell before it writes, and no other lane reads that id: `out` may be
`topk_ids`. k, M and N are constants of the kernel; num_tokens is not, so batches of any
size share one binary. Offsets into the ids have 64 bits only where 32 cannot hold them. With
`where` there is one load more; without it the code of that is not there.

SGL_ESFT_DEBUG_KERNELS=1 asserts on the device that ids and adapter slots are in range, and that
experts are here. Of the last the host names the first one before the launch, except while a graph
is captured, when it cannot wait.
"""

# ruff: noqa: N803 -- a kernel's compile-time arguments are in capitals, as usual in Triton
from __future__ import annotations

import functools

import torch

from sgl_esft_kernels.checks import can_wait, check_reroute_inputs, is_debug
from sgl_esft_kernels.errors import KernelUnavailableError
from sgl_esft_kernels.op import RerouteFunction, implement, reroute
from sgl_esft_kernels.reroute_ref import check_resident

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise KernelUnavailableError(
        "reroute 'triton' needs triton, which is not installed: install the cuda extra"
    ) from error

BLOCK = 128  # ids a program
NUM_WARPS = 4  # one id a thread: a launch of a few thousand ids waits for latency, not bandwidth


@triton.jit
def rows_of(
    slot_ids: tl.tensor,  # int32, -1 = none
    where_ptr: tl.tensor,  # [NUM_SLOTS] int32
    NUM_SLOTS: tl.constexpr,
    CHECK: tl.constexpr,
) -> tl.tensor:
    """where[slot_ids], NOT_HERE too; -1 stays -1 and reads nothing."""
    if CHECK:
        tl.device_assert(slot_ids < NUM_SLOTS, "expert_map has a slot out of range")
    rows = tl.load(where_ptr + slot_ids, mask=slot_ids >= 0, other=slot_ids)
    if CHECK:
        tl.device_assert((slot_ids < 0) | (rows >= 0), "an expert is not here")
    return rows


# num_ids changes with each batch; with one id a thread no load is wide, so alignment gains nothing.
@triton.jit(
    do_not_specialize=["num_ids"],
    do_not_specialize_on_alignment=[
        "topk_ids_ptr",
        "token_adapter_slots_ptr",
        "expert_map_ptr",
        "where_ptr",
        "out_ptr",
    ],
)
def reroute_kernel(
    topk_ids_ptr: tl.tensor,  # [num_tokens, K] int32 or int64
    token_adapter_slots_ptr: tl.tensor,  # [num_tokens] int32
    expert_map_ptr: tl.tensor,  # [NUM_ROWS, NUM_EXPERTS] int32
    where_ptr: tl.tensor,  # [NUM_SLOTS] int32, or None
    out_ptr: tl.tensor,  # [num_tokens, K], dtype of topk_ids; may be topk_ids_ptr
    num_ids: tl.tensor,  # num_tokens * K
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # whether num_ids needs 64 bits
    HAS_WHERE: tl.constexpr,
    CHECK: tl.constexpr,
) -> None:
    """out[i] = expert_map[token_adapter_slots[i // K], topk_ids[i]], or -1 where the id is.

    With where_ptr a slot becomes its row.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    is_ours = offsets < num_ids
    expert_ids = tl.load(topk_ids_ptr + offsets, mask=is_ours, other=-1)
    adapter_slots = tl.load(token_adapter_slots_ptr + offsets // K, mask=is_ours, other=-1)
    if CHECK:
        tl.device_assert((expert_ids >= -1) & (expert_ids < NUM_EXPERTS), "topk_ids out of range")
        tl.device_assert(
            (adapter_slots >= -1) & (adapter_slots < NUM_ROWS - 1),
            "token_adapter_slots out of range",
        )
    rows = tl.where(adapter_slots < 0, NUM_ROWS - 1, adapter_slots)
    cells = rows.to(tl.int64) * NUM_EXPERTS + expert_ids
    slot_ids = tl.load(expert_map_ptr + cells, mask=is_ours & (expert_ids >= 0), other=-1)
    if HAS_WHERE:
        slot_ids = rows_of(slot_ids, where_ptr, NUM_SLOTS, CHECK)
    tl.store(out_ptr + offsets, slot_ids.to(out_ptr.dtype.element_ty), mask=is_ours)


def launch_reroute(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reroute` (op.py has the contract), as one launch on the current stream.

    Never waits for the device, and allocates nothing when `out` is given. No tokens, no launch.
    Raises KernelInputError. A debug build waits with `where`, to name an expert that is not here.
    """
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out, where)
    if where is not None and is_debug() and can_wait(where.device):
        check_resident(topk_ids, token_adapter_slots, expert_map, where)
    out = torch.empty_like(topk_ids) if out is None else out
    num_ids = topk_ids.numel()
    if num_ids == 0:
        return out
    reroute_kernel[(triton.cdiv(num_ids, BLOCK),)](
        topk_ids,
        token_adapter_slots,
        expert_map,
        where,
        out,
        num_ids,
        **constants(topk_ids.shape[1], expert_map, where, num_ids),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        debug=is_debug(),
    )
    return out


def constants(
    top_k: int, expert_map: torch.Tensor, where: torch.Tensor | None, num_ids: int
) -> dict[str, int]:
    """The kernel's compile-time arguments for these sizes."""
    num_rows, num_experts = expert_map.shape
    return {
        "K": top_k,
        "NUM_ROWS": num_rows,
        "NUM_EXPERTS": num_experts,
        "NUM_SLOTS": 0 if where is None else where.shape[0],
        "BLOCK": BLOCK,
        "WIDE": num_ids + BLOCK > 2**31,
        "HAS_WHERE": where is not None,
        "CHECK": is_debug(),
    }


def load() -> RerouteFunction:
    """Register the operators for CUDA and return `reroute`. Raises KernelUnavailableError."""
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            "reroute 'triton' needs a CUDA device, torch sees none: check the driver, "
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build"
        )
    register()
    return reroute


@functools.cache
def register() -> None:
    """Make this the CUDA implementation of the operators, once a process."""
    implement(launch_reroute, "CUDA")
