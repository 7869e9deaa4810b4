"""Quantised experts on the CPU, each as SGLang's method left it in its row.

    TritonMoeQuantInfo of the layer -> [experts_of] -> Experts -> moe.py (which rows, and the sum)
    int4, a loaded expert -> [pack_int4] -> the same row, as torch's kernel reads it

Weights alone are quantised here: inputs stay as they are, where SGLang's w8a8 kernels on a GPU
round them to 8 bits too, so answers lie closer to the unquantised model's. int8 and int4 in
bfloat16 go through packed kernels, which read a weight once and in its few bits, and whose result
for a token does not depend on the others: torch's, and for int8 our own where there is AVX-512. All
else is dequantised, one projection at a time, and multiplied in float32: right, and not fast. Those
kernels have no fast float16 or float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import functional as F

from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.platform.moe import Experts, PlainExperts
from sgl_esft_kernels import reroute_cpu

_KERNEL_DTYPE: Final = torch.bfloat16
# The int8 kernel loads so many values of a row at a time, past its end too, from aligned addresses.
_INT8_STEP: Final = 16
_INT8_ALIGNMENTS: Final = (32, 16)  # bytes; of the input, of the weight
_INT4_ROWS: Final = 16  # a multiple of so many can be packed
_INT4_GROUPS: Final = (32, 64, 128, 256)
_INNER_K_TILES: Final = 1  # of the packing operator, which does not look at it on a CPU
_ZERO: Final = 8  # of int4

_UNKNOWN: Final = ("b13", "b2", "w13_zp", "w2_zp", "a13_scale", "a2_scale")
_Project = Callable[[torch.Tensor], torch.Tensor]  # [n, in] -> float32 [n, out]


@dataclass(frozen=True)
class Int8Experts:
    """Value = number times the scale of its row.

    w13 [num_rows, 2I, H], w2 [num_rows, H, I], int8; scales [num_rows, 2I, 1] and [num_rows, H, 1],
    float32. In bfloat16 torch's kernel sums up numbers times inputs in float32 and rounds the sum
    to bfloat16; scales are multiplied afterwards, in float32, because it would round them as well.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def compute(self, x: torch.Tensor, row: int) -> torch.Tensor:
        return _expert(
            x,
            lambda inputs: _by_int8(inputs, self.w13[row], self.w13_scale[row]),
            lambda inputs: _by_int8(inputs, self.w2[row], self.w2_scale[row]),
        )


@dataclass(frozen=True)
class Int4Experts:
    """Value = (number - 8) times the scale of its group along the input.

    w13 [num_rows, 2I, H / 2], w2 [num_rows, H, I / 2], uint8, two numbers a byte, each row as
    `pack_int4` returns it; scales [num_rows, 2I, H / group] and [num_rows, H, I / group], in the
    dtype of the input.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def compute(self, x: torch.Tensor, row: int) -> torch.Tensor:
        if x.dtype != self.w13_scale.dtype:
            raise InvariantError(f"an input in {x.dtype}, scales in {self.w13_scale.dtype}")
        return _expert(
            x,
            lambda inputs: _by_int4(inputs, self.w13[row], self.w13_scale[row]),
            lambda inputs: _by_int4(inputs, self.w2[row], self.w2_scale[row]),
        )


@dataclass(frozen=True)
class Fp8Experts:
    """Value = number times the scale of its block, or of its whole tensor.

    w13 [num_rows, 2I, H], w2 [num_rows, H, I], float8_e4m3fn; scales float32: [num_rows], one for
    gate and up together, or, where `block` is (rows, columns), one for each block of w13 and of w2,
    the last ones cut. Multiplied in float32.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    block: tuple[int, int] | None

    def compute(self, x: torch.Tensor, row: int) -> torch.Tensor:
        wide = _expert(
            x.float(),
            lambda inputs: self._project(inputs, self.w13[row], self.w13_scale[row]),
            lambda inputs: self._project(inputs, self.w2[row], self.w2_scale[row]),
        )
        return wide.to(x.dtype)

    def _project(
        self, inputs: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        if self.block is not None:
            rows, columns = self.block
            scale = scale.repeat_interleave(rows, 0)[: numbers.shape[0]]
            scale = scale.repeat_interleave(columns, 1)[:, : numbers.shape[1]]
        return F.linear(inputs, numbers.float().mul_(scale))


def experts_in(rows: Sequence[torch.Tensor]) -> Experts:
    """Those of w13 and w2, or in int8 with the scales of both behind them, each [num_rows, ...]."""
    return PlainExperts(*rows) if len(rows) == 2 else Int8Experts(*rows)


def experts_of(weights: Any) -> Experts:
    """The experts that SGLang's TritonMoeQuantInfo describes; PlainExperts are themselves.

    Raises UnsupportedModelError, naming what they have, for others than those of `Experts` here.
    """
    if type(weights) is PlainExperts:
        return weights
    parts = (weights.w13_weight, weights.w2_weight, weights.w13_scale, weights.w2_scale)
    unknown = [name for name in _UNKNOWN if getattr(weights, name) is not None]
    block = weights.block_shape
    if unknown:
        raise _unsupported(", ".join(unknown))
    if weights.use_int8_w8a8 and weights.per_channel_quant and block is None:
        return Int8Experts(*parts)
    if weights.use_fp8_w8a8 and not weights.per_channel_quant:
        return Fp8Experts(*parts, block=None if block is None else (block[0], block[1]))
    if weights.use_int4_w4a16:
        return Int4Experts(*parts)
    if weights.w13_scale is not None or weights.w2_scale is not None:
        raise _unsupported(f"weights in {weights.w13_weight.dtype} and scales of another kind")
    return PlainExperts(*parts[:2])


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"experts with {what}: the CPU platform computes unquantised experts, w8a8_int8, fp8 with "
        "dynamic activations and symmetric int4 (sgl-esft quantise writes them)"
    )


def pack_int4(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One expert's w13 or w2 as `Int4Experts` wants it in its row: same shape, dtype and size.

    numbers uint8 [out, in / 2], the lower of two values first in a byte; scales [out, in / group].
    Not to be packed twice. Where the kernel does not take them, they are returned as they are.
    """
    if not _is_packed(numbers, scales):
        return numbers
    packed: torch.Tensor = torch._convert_weight_to_int4pack_for_cpu(
        _unpacked(numbers).to(torch.int32), _INNER_K_TILES
    )
    return packed


def _is_packed(numbers: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether an expert like this one has been packed. Looks at shapes and dtypes alone."""
    num_rows, num_bytes = numbers.shape
    group = 2 * num_bytes // scales.shape[1]
    return scales.dtype is _KERNEL_DTYPE and num_rows % _INT4_ROWS == 0 and group in _INT4_GROUPS


def _unpacked(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] -> 0..15 in uint8 [out, in]."""
    return torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)


def _expert(x: torch.Tensor, to_gate_and_up: _Project, to_down: _Project) -> torch.Tensor:
    """In float32 but for what a kernel is given: float16 would overflow where numbers are large."""
    inputs = x if x.dtype is _KERNEL_DTYPE else x.float()
    gate, up = to_gate_and_up(inputs).chunk(2, dim=-1)
    return to_down((F.silu(gate) * up).to(inputs.dtype)).to(x.dtype)


def _by_int8(inputs: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    is_kernels = inputs.dtype is _KERNEL_DTYPE
    native = reroute_cpu.int8_linear() if is_kernels else None
    if native is not None and inputs.is_contiguous() and numbers.is_contiguous():
        return native(inputs, numbers, scale.squeeze(-1))
    if is_kernels and _fits_int8_kernel(inputs, numbers):
        ones = inputs.new_ones(numbers.shape[0])
        sums = torch._weight_int8pack_mm(inputs, numbers, ones).float()
    else:
        sums = F.linear(inputs.float(), numbers.float())
    return sums.mul_(scale.squeeze(-1))


def _fits_int8_kernel(inputs: torch.Tensor, numbers: torch.Tensor) -> bool:
    """It does not look itself: it would read past the end, or the processor would fault."""
    alignments = zip((inputs, numbers), _INT8_ALIGNMENTS, strict=True)
    return numbers.shape[1] % _INT8_STEP == 0 and all(
        tensor.is_contiguous() and tensor.data_ptr() % alignment == 0
        for tensor, alignment in alignments
    )


def _by_int4(inputs: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    group = 2 * numbers.shape[1] // scales.shape[1]
    if _is_packed(numbers, scales):
        # The kernel's zero points are added to what it multiplied, and 8 is taken off before.
        scales_and_zeros = scales.new_zeros((*reversed(scales.shape), 2))
        scales_and_zeros[..., 0] = scales.t()
        found = torch._weight_int4pack_mm_for_cpu(inputs, numbers, group, scales_and_zeros)
        return found.float()
    values = _unpacked(numbers).float().sub_(_ZERO).unflatten(1, (-1, group))
    return F.linear(inputs.float(), values.mul_(scales.float().unsqueeze(-1)).flatten(1))
