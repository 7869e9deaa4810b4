"""float8 and CUDA's `round` in Triton's interpreter, mended: it has them wrong, or not at all.

Its float8 has no NaN (the bits of NaN are 480 to it), and float32 is cut off rather than rounded to
it. Here float8 becomes float32, which is exact, and float32 becomes float8 by torch, to nearest
even. It can call nothing of libdevice: here it has `round`, which SGLang's int8 kernels call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

FLOAT8 = tl.float8e4nv


def mend_float8() -> None:
    """For the rest of this process, or until the attributes of interpreter_builder and libdevice
    are put back.

    After mend_bfloat16(), whose functions take what these leave.
    """
    inner_dot = interpreter_builder.create_dot

    def create_dot(a: TensorHandle, b: TensorHandle, *args: Any) -> TensorHandle:
        return inner_dot(widened(a), widened(b), *args)

    interpreter_builder.create_dot = create_dot
    interpreter_builder.create_fp_to_fp = create_fp_to_fp
    libdevice.round = round_float32


def create_fp_to_fp(source: TensorHandle, wanted: Any, rounding_mode: Any) -> TensorHandle:
    """In place of the interpreter's, which Triton asks for casts from and to float8."""
    if FLOAT8 not in (source.dtype.scalar, wanted.scalar):
        return InterpreterBuilder.create_fp_to_fp(
            interpreter_builder, source, wanted, rounding_mode
        )
    if wanted.scalar == FLOAT8:
        return _rounded(interpreter_builder.cast_impl(source, tl.float32))
    return interpreter_builder.cast_impl(widened(source), wanted)


def round_float32(values: tl.tensor) -> tl.tensor:
    """In place of libdevice's `round`, for float32."""
    assert values.dtype == tl.float32
    return tl.tensor(TensorHandle(half_away_from_zero(values.handle.data), tl.float32), values.type)


def half_away_from_zero(values: np.ndarray) -> np.ndarray:
    """Float32 to whole numbers, as C's roundf; each step is exact."""
    whole = np.trunc(values)
    is_up = np.abs(values - whole) >= 0.5
    result: np.ndarray = whole + np.where(is_up, np.copysign(np.float32(1), values), np.float32(0))
    return result.astype(np.float32)


def widened(handle: TensorHandle) -> TensorHandle:
    """Float8 as float32; anything else as it is."""
    if handle.dtype.scalar != FLOAT8:
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data))
    return TensorHandle(bits.view(torch.float8_e4m3fn).float().numpy(), tl.float32)


def _rounded(handle: TensorHandle) -> TensorHandle:
    values = torch.from_numpy(np.ascontiguousarray(handle.data)).to(torch.float8_e4m3fn)
    return TensorHandle(values.view(torch.uint8).numpy(), FLOAT8)
