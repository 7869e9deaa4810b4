"""bfloat16 in Triton's interpreter, mended: numpy has none, and the interpreter keeps its bits.

It multiplies and adds those bits as whole numbers, in `tl.dot` too, and cuts float32 off instead
of rounding it. Here operands are widened to float32, which is exact, and results are rounded to
nearest even, as GPUs do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

_ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide)


def mend_bfloat16() -> None:
    """For the rest of this process, or until interpreter_builder's attributes are put back."""
    for function in (create_dot, cast_impl, binary_op):
        setattr(interpreter_builder, function.__name__, function)


def create_dot(a: TensorHandle, b: TensorHandle, *args: Any) -> TensorHandle:
    """In place of the interpreter's."""
    return InterpreterBuilder.create_dot(interpreter_builder, _widened(a), _widened(b), *args)


def cast_impl(source: TensorHandle, wanted: Any) -> TensorHandle:
    """In place of the interpreter's."""
    if source.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
        return _rounded(source)
    return InterpreterBuilder.cast_impl(interpreter_builder, source, wanted)


def binary_op(left: TensorHandle, right: TensorHandle, op: Any) -> TensorHandle:
    """In place of the interpreter's. Raises NotImplementedError for what nobody here has needed."""
    if tl.bfloat16 not in (left.dtype.scalar, right.dtype.scalar):
        return InterpreterBuilder.binary_op(interpreter_builder, left, right, op)
    if op not in _ARITHMETIC:
        raise NotImplementedError(f"{op} of bfloat16: the interpreter would take its bits")
    wide = op(_widened(left).data, _widened(right).data)
    return _rounded(TensorHandle(wide, tl.float32))


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def _rounded(handle: TensorHandle) -> TensorHandle:
    values = torch.from_numpy(np.ascontiguousarray(handle.data)).to(torch.bfloat16)
    return TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)
