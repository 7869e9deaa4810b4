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

import numpy as np
import torch
from triton import language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from tests.fast.moe_interpreted import compiled_operators

DEVICE_NAME = "NVIDIA H100 80GB HBM3"
_MOE = "sglang.srt.layers.moe"
_TRITON = f"{_MOE}.moe_runner.triton_utils"
PYTHON_OPERATORS = ("inplace_fused_experts", "outplace_fused_experts")
_library = torch.library.Library("sglang", "FRAGMENT")  # noqa: TOR901
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
    import_module(f"{_MOE}.topk").fused_topk_deepseek = None  # flashinfer's, where it is installed
    _replace(
        import_module("sglang.kernels.fused_op"),
        _oot_dispatch_key=lambda: None,
        _platform_key=lambda: "cuda",
    )
    _replace(
        import_module(f"{_TRITON}.fused_moe_triton_config"), get_device_name=lambda: DEVICE_NAME
    )
    _operators_on_cpu()
    mend_bfloat16_dot()


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


def mend_bfloat16_dot() -> None:
    """Triton's interpreter multiplies the bit patterns of bfloat16: widen them, which is exact."""
    dot = type(interpreter_builder).create_dot

    def create_dot(a: TensorHandle, b: TensorHandle, *args: Any) -> TensorHandle:
        return dot(interpreter_builder, _widened(a), _widened(b), *args)

    interpreter_builder.create_dot = create_dot


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def is_interpreted() -> bool:
    """Whether SGLang's kernels are Triton's interpreted ones."""
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(fused_moe_kernel, InterpretedFunction) and not torch.cuda.is_available()
