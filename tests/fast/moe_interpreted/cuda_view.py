"""SGLang's MoE modules as they are where there is CUDA, over CPU tensors in Triton's interpreter.

    as_cuda() -> FusedMoE and TopK take `forward_cuda`, kernels run in the interpreter

SGLang decides at import, by a module's `_is_cuda`, which operators it calls. Only the modules of
the MoE path are told so, and only what is compiled is stood in for (compiled_operators.py).
TRITON_INTERPRET must be 1 before Triton is imported.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.fast.moe_interpreted import compiled_operators
from tests.fast.moe_interpreted.bfloat16 import mend_bfloat16
from tests.fast.moe_interpreted.float8 import mend_float8

DEVICE_NAME = "NVIDIA H100 80GB HBM3"
_MOE = "sglang.srt.layers.moe"
_TRITON = f"{_MOE}.moe_runner.triton_utils"
PYTHON_OPERATORS = ("inplace_fused_experts", "outplace_fused_experts")

# Names that these modules have everywhere, with what they are where there is CUDA.
REPLACED: dict[str, dict[str, Any]] = {
    # An H100 reduces by SGLang's Triton kernel. The kernels themselves are told otherwise: the
    # instructions for overlapping launches cannot be interpreted.
    f"{_TRITON}.fused_moe": {"_is_cuda": True, "is_arch_support_pdl": lambda: True},
    f"{_TRITON}.moe_align_block_size": {"_is_cuda": True},
    f"{_MOE}.topk": {"_is_cuda": True},
    "sglang.srt.layers.quantization.unquant": {"_is_cuda": True},
    "sglang.srt.layers.quantization.fp8": {"_is_cuda": True, "_is_cpu": False},
    # An H100 swaps the operands of some blocks.
    "sglang.kernels.ops.moe.fused_moe_triton_kernels": {
        "should_enable_swap_ab": lambda block_m, block_n: block_m < 64 and block_n >= 64
    },
    f"{_TRITON}.fused_moe_triton_config": {"get_device_name": lambda: DEVICE_NAME},
    f"{_MOE}.token_dispatcher.standard": {"get_device": lambda: "cpu"},
    "sglang.kernels.fused_op": {
        "_oot_dispatch_key": lambda: None,
        "_platform_key": lambda: "cuda",
    },
}
# Names that they import where there is CUDA alone.
STAND_INS: dict[str, dict[str, Any]] = {
    f"{_TRITON}.fused_moe": {
        "silu_and_mul": compiled_operators.silu_and_mul,
        "moe_sum_reduce": compiled_operators.sum_reduce,
        "per_token_group_quant": compiled_operators.per_token_group_quant,
    },
    f"{_TRITON}.moe_align_block_size": {
        "sgl_moe_align_block_size": compiled_operators.align_block_size
    },
    "sglang.kernels.ops.quantization.fp8_kernel": {
        "sgl_per_tensor_quant_fp8": compiled_operators.per_tensor_quant_fp8,
    },
    f"{_MOE}.topk": {
        "mask_topk_ids": compiled_operators.mask_topk_ids,
        "fused_topk_deepseek": None,  # flashinfer's; without it SGLang's own Triton router runs
    },
}
_library = torch.library.Library("sglang", "FRAGMENT")


def as_cuda() -> None:
    """For the rest of this process."""
    for name, values in REPLACED.items():
        module = import_module(name)
        for key in values:
            assert hasattr(module, key), f"{name} has no {key}: see this version of SGLang"
    for table in (REPLACED, STAND_INS):
        for name, values in table.items():
            vars(import_module(name)).update(values)
    _import_small_alignment()
    _operators_on_cpu()
    mend_bfloat16()
    mend_float8()
    # What torch.empty gives is NaN, or the largest integer, until somebody has written it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def _import_small_alignment() -> None:
    """SGLang's own Triton kernel for few rows and many experts, imported where there is CUDA."""
    small = import_module("sglang.kernels.ops.moe.moe_align_small_numel")
    align = vars(import_module(f"{_TRITON}.moe_align_block_size"))
    for name in ("SMALL_NUMEL_LIMIT", "moe_align_small_numel"):
        align[name] = getattr(small, name)


def _operators_on_cpu() -> None:
    """SGLang registers its Python operators for CUDA alone; here CPU tensors reach them."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name in PYTHON_OPERATORS:
        operator = getattr(torch.ops.sglang, name).default
        _library.impl(name, partial(operator.redispatch, cuda), "CPU")


def is_interpreted() -> bool:
    """Whether SGLang's kernels are Triton's interpreted ones."""
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(fused_moe_kernel, InterpretedFunction) and not torch.cuda.is_available()
