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

DEVICE_NAME = "NVIDIA H100 80GB HBM3"
_MOE = "sglang.srt.layers.moe"
_TRITON = f"{_MOE}.moe_runner.triton_utils"
PYTHON_OPERATORS = ("inplace_fused_experts", "outplace_fused_experts")
_library = torch.library.Library("sglang", "FRAGMENT")
CUDA_MODULES = (
    f"{_TRITON}.fused_moe",
    f"{_TRITON}.moe_align_block_size",
    f"{_MOE}.topk",
    "sglang.srt.layers.quantization.unquant",
)


def as_cuda() -> None:
    """For the rest of this process."""
    for name in CUDA_MODULES:
        _replace(import_module(name), _is_cuda=True)
    fused_moe = import_module(f"{_TRITON}.fused_moe")
    align = import_module(f"{_TRITON}.moe_align_block_size")
    small = import_module("sglang.kernels.ops.moe.moe_align_small_numel")
    fused_moe.silu_and_mul = compiled_operators.silu_and_mul
    fused_moe.moe_sum_reduce = compiled_operators.sum_reduce
    align.sgl_moe_align_block_size = compiled_operators.align_block_size
    align.SMALL_NUMEL_LIMIT = small.SMALL_NUMEL_LIMIT
    align.moe_align_small_numel = small.moe_align_small_numel
    topk = import_module(f"{_MOE}.topk")
    topk.mask_topk_ids = compiled_operators.mask_topk_ids
    topk.fused_topk_deepseek = None  # flashinfer's, where there is flashinfer; else SGLang's Triton
    _replace(
        import_module("sglang.kernels.fused_op"),
        _oot_dispatch_key=lambda: None,
        _platform_key=lambda: "cuda",
    )
    _replace(
        import_module(f"{_TRITON}.fused_moe_triton_config"), get_device_name=lambda: DEVICE_NAME
    )
    _operators_on_cpu()
    mend_bfloat16()
    # What torch.empty gives is NaN, or the largest integer, until somebody has written it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def _operators_on_cpu() -> None:
    """SGLang registers its Python operators for CUDA alone; here CPU tensors reach them."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name in PYTHON_OPERATORS:
        operator = getattr(torch.ops.sglang, name).default
        _library.impl(name, partial(operator.redispatch, cuda), "CPU")


def _replace(module: Any, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}: see this SGLang's version"
        setattr(module, name, value)


def is_interpreted() -> bool:
    """Whether SGLang's kernels are Triton's interpreted ones."""
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(fused_moe_kernel, InterpretedFunction) and not torch.cuda.is_available()
