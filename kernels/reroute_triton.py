"""`reroute` on CUDA: one launch of a Triton kernel, graph-safe and allowed in place.

    load() -> op.reroute -> torch.ops.sgl_esft.reroute[_out] -> launch_reroute -> kernel

A program takes BLOCK ids of the flattened [num_tokens, k]. Each lane reads its own id,
tag and map cell before it writes, and no other lane reads that id: `out` may be
`topk_ids`. k, M and N are constants of the kernel; num_tokens is not, so batches of any
size share one binary. Offsets into the ids have 64 bits only where 32 cannot hold them.

SGL_ESFT_DEBUG_KERNELS=1 asserts on the device that ids and adapter slots are in range.
"""

# ruff: noqa: N803 -- a kernel's compile-time arguments are in capitals, as usual in Triton
from __future__ import annotations

import functools

import torch

from sgl_esft_kernels.checks import check_reroute_inputs, is_debug
from sgl_esft_kernels.errors import KernelUnavailableError
from sgl_esft_kernels.op import RerouteFunction, implement, reroute

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise KernelUnavailableError(
        "reroute 'triton' needs triton, which is not installed: install the cuda extra"
    ) from error

BLOCK = 128  # ids a program
NUM_WARPS = 4  # one id a thread: a launch of a few thousand ids waits for latency, not bandwidth


# num_ids changes with each batch; with one id a thread no load is wide, so alignment gains nothing.
@triton.jit(
    do_not_specialize=["num_ids"],
    do_not_specialize_on_alignment=[
        "topk_ids_ptr",
        "token_adapter_slots_ptr",
        "expert_map_ptr",
        "out_ptr",
    ],
)
def reroute_kernel(
    topk_ids_ptr: tl.tensor,  # [num_tokens, K] int32 or int64
    token_adapter_slots_ptr: tl.tensor,  # [num_tokens] int32
    expert_map_ptr: tl.tensor,  # [NUM_ROWS, NUM_EXPERTS] int32
    out_ptr: tl.tensor,  # [num_tokens, K], dtype of topk_ids; may be topk_ids_ptr
    num_ids: tl.tensor,  # num_tokens * K
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # whether num_ids needs 64 bits
    CHECK: tl.constexpr,
) -> None:
    """out[i] = expert_map[token_adapter_slots[i // K], topk_ids[i]], or -1 where the id is."""
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
    tl.store(out_ptr + offsets, slot_ids.to(out_ptr.dtype.element_ty), mask=is_ours)


def launch_reroute(
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reroute` (op.py has the contract), as one launch on the current stream.

    Never waits for the device, and allocates nothing when `out` is given. No tokens, no launch.
    Raises KernelInputError.
    """
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out)
    out = torch.empty_like(topk_ids) if out is None else out
    num_ids = topk_ids.numel()
    if num_ids == 0:
        return out
    reroute_kernel[(triton.cdiv(num_ids, BLOCK),)](
        topk_ids,
        token_adapter_slots,
        expert_map,
        out,
        num_ids,
        **constants(topk_ids.shape[1], expert_map, num_ids),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        debug=is_debug(),
    )
    return out


def constants(top_k: int, expert_map: torch.Tensor, num_ids: int) -> dict[str, int]:
    """The kernel's compile-time arguments for these sizes."""
    num_rows, num_experts = expert_map.shape
    return {
        "K": top_k,
        "NUM_ROWS": num_rows,
        "NUM_EXPERTS": num_experts,
        "BLOCK": BLOCK,
        "WIDE": num_ids + BLOCK > 2**31,
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
    """Make this the CUDA implementation of both operators, once a process."""
    implement(launch_reroute, "CUDA")
