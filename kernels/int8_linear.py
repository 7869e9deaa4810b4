"""A linear layer with int8 weights on a CPU: the native code of csrc/int8.

    load() -> libsgl_reroute.so (reroute_cpu.py) -> torch.ops.sgl_esft.int8_linear, or None

Made for AVX-512. torch's `_weight_int8pack_mm` runs on any CPU: about half as fast at one token, as
fast from some six on, and somewhat faster between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from sgl_esft_kernels.reroute_cpu import load_library

Int8Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, in], w [out, in] int8, scale [out] float32) -> float32 [T, out]: (x @ w.T) * scale.

Contiguous CPU tensors; x of any floating dtype is taken as float32, so bfloat16 is exact. Sums are
float32, and a token's result does not depend on the other tokens. Raises ValueError for others.
"""


@functools.cache
def load() -> Int8Linear | None:
    """None on a processor without AVX-512.

    Raises KernelUnavailableError when the library is not installed, or was built for another torch.
    """
    load_library()
    if not torch.ops.sgl_esft.int8_linear_is_supported():
        return None
    found: Int8Linear = torch.ops.sgl_esft.int8_linear.default
    return found
