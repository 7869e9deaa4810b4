"""`reroute` on Ascend: blocks for the unified buffer, one launch on the vector cores.

    load() -> op.reroute -> torch.ops.sgl_esft.reroute[_out|_rows] -> launch_reroute -> kernel
    sizes -> plan_blocks -> Blocks: the kernel's compile-time arguments

The kernels and how they differ from CUDA's: reroute_triton_ascend_kernel.py. They were lowered by
the vendor's compiler and interpreted, and have not run on an NPU (docs/ascend_kernel.md).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sgl_esft_kernels.checks import check_reroute_inputs, check_values, is_debug
from sgl_esft_kernels.errors import KernelInputError, KernelUnavailableError
from sgl_esft_kernels.op import RerouteFunction, implement, reroute
from sgl_esft_kernels.reroute_ref import check_resident

# Sized for the unified buffer, 192 KiB on a vector core of the 910B: 4 KiB for int32 lanes, 16 KiB
# for a tile. All values that the lowered kernel names fit at once, those that are copied from
# global memory twice, so that one can arrive while the other is used: docs/ascend_kernel.md.
LANES = 1024  # expert ids a block, and the most that a token may have
MAX_TOKENS = 512  # a block
MAX_TILE = 4096  # cells of the map: 20 adapters of 160 experts fit in one tile
# With `where`, which has a tile and vectors of its own: half the lanes leave room for them.
ROWS_LANES = 512
MAX_WHERE_TILE = 2048  # slots
SHIFT = 20  # lane // k by multiplication is exact where lane * k stays below 2**SHIFT

# What the vendor's packages are for, by the module that each must have.
NEEDED = {
    "torch_npu": "torch-npu, and the CANN toolkit under it",
    "triton.backends.ascend.driver": "triton-ascend, installed over any other triton",
}


@dataclass(frozen=True)
class Blocks:
    """How one vector core cuts its work; the fields are the kernel's, in lower case."""

    k: int
    tokens: int
    tag_lanes: int
    lanes: int
    tile: int
    multiplier: int
    shift: int

    def constants(self) -> dict[str, int]:
        return {name.upper(): value for name, value in asdict(self).items()}


def plan_blocks(k: int, num_cells: int, most_lanes: int = LANES) -> Blocks:
    """Blocks for k experts a token and a map of num_cells. Raises KernelInputError."""
    if not 1 <= k <= most_lanes:
        raise KernelInputError(f"topk_ids has {k} experts a token, must have 1 to {most_lanes}")
    tokens = min(most_lanes // k, MAX_TOKENS)
    lanes = _power_of_two(tokens * k)
    return Blocks(
        k=k,
        tokens=tokens,
        tag_lanes=_power_of_two(-(-lanes // k)),
        lanes=lanes,
        tile=min(MAX_TILE, _power_of_two(num_cells)),
        multiplier=-(-(2**SHIFT) // k),
        shift=SHIFT,
    )


def plan_rows(k: int, num_cells: int, num_slots: int) -> dict[str, int]:
    """The same for `where` of num_slots, as the kernel's arguments. Raises KernelInputError."""
    constants = plan_blocks(k, num_cells, ROWS_LANES).constants()
    tile = min(MAX_WHERE_TILE, _power_of_two(num_slots))
    return constants | {"NUM_SLOTS": num_slots, "WHERE_TILE": tile}


def launch_reroute(
    kernel: Any,
    num_cores: int,
    topk_ids: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    out: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reroute` (op.py has the contract), as one launch of `kernel` on at most num_cores programs.

    kernel: reroute_kernel; with `where`, reroute_rows_kernel.
    Allocates nothing when `out` is given. No ids, no launch. Raises KernelInputError.
    """
    check_reroute_inputs(topk_ids, token_adapter_slots, expert_map, out, where)
    if is_debug():
        check_values(topk_ids, token_adapter_slots, expert_map)
        if where is not None:
            check_resident(topk_ids, token_adapter_slots, expert_map, where)
    out = torch.empty_like(topk_ids) if out is None else out
    if topk_ids.numel() == 0:
        return out
    num_tokens, k = topk_ids.shape
    num_rows, num_experts = expert_map.shape
    if where is None:
        constants = plan_blocks(k, expert_map.numel()).constants()
    else:
        constants = plan_rows(k, expert_map.numel(), where.shape[0])
    kernel[(min(num_cores, -(-num_tokens // constants["TOKENS"])),)](
        topk_ids,
        token_adapter_slots,
        expert_map,
        *([] if where is None else [where]),
        out,
        num_tokens,
        NUM_ROWS=num_rows,
        NUM_EXPERTS=num_experts,
        **constants,
    )
    return out


@functools.cache
def load() -> RerouteFunction:
    """Register the operators for the NPU and return `reroute`. Raises KernelUnavailableError."""
    driver = [_import_needed(name, what) for name, what in NEEDED.items()][-1]
    register(driver.NPUUtils().get_aivector_core_num())
    return reroute


def register(num_cores: int) -> None:
    """Make this the NPU's implementation of the operators; once a process."""
    from sgl_esft_kernels.reroute_triton_ascend_kernel import reroute_kernel, reroute_rows_kernel

    def launch(
        topk_ids: torch.Tensor,
        token_adapter_slots: torch.Tensor,
        expert_map: torch.Tensor,
        out: torch.Tensor | None = None,
        where: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel = reroute_kernel if where is None else reroute_rows_kernel
        inputs = (topk_ids, token_adapter_slots, expert_map)
        return launch_reroute(kernel, num_cores, *inputs, out, where)

    implement(launch, "PrivateUse1")


def _import_needed(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise KernelUnavailableError(
            f"reroute 'triton_ascend' needs {what}: importing {name} failed ({error})"
        ) from error


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
