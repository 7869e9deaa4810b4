"""A projection's weight as numbers and scales, and back: the same bytes on every machine.

    weight [out, in] --[quantise]--> its parts -> write.py: checkpoint -> SGLang's loader
    adapter's expert --[quantise_expert]--> parts of gate, up and down -> expert tensor
    parts --[dequantise]--> float32 [out, in], as SGLang's kernels take them

Each step is one operation that IEEE 754 defines to the last bit, on float32: the largest magnitude,
a division by a constant, a division by the scale, and one rounding to the nearest number, ties to
the even one. Nothing is summed up, so neither threads nor devices have an order of their own, and a
scale depends on its own block alone (fp8-tensor: on gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.nn import functional as F

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.expert_scheme import NIBBLES, ExpertScheme, SchemeName
from sgl_esft.formats.model_spec import PROJS, Proj

Parts = dict[str, torch.Tensor]
"""Suffix of a tensor's name -> tensor, as `ExpertScheme.parts` describes them."""

# The magnitude that becomes the largest number; for int4, from -8 to 7, half of the way between.
_TOPS: Final[Mapping[SchemeName, float]] = {
    "int8": 127.0,
    "fp8": 448.0,
    "fp8-tensor": 448.0,
    "int4": 7.5,
}
# Blocks of zeros have a scale too. Int8's is that of SGLang's per_token_quant_int8. Fp8MoEMethod
# takes one tensor's numbers times the scale to float16 and back, which is exact from here on.
_SMALLEST_SCALES: Final[Mapping[SchemeName, float]] = {
    "int8": 1e-10 / 127.0,
    "fp8": 1e-12 / 448.0,
    "fp8-tensor": 2.0**-14,
}
_ZERO: Final = 8  # of int4: fused_moe_kernel_gptq_awq's b_zp_num


def quantise(
    weight: torch.Tensor,
    scheme: ExpertScheme,
    partner: torch.Tensor | None = None,
    name: str = "the weight",
) -> Parts:
    """Round one projection [out, in] of any float dtype, on its own device.

    `partner`: the projection of `scheme.partner`, where there is one. `name` is for the error:
    raises UnsupportedModelError for a NaN or an infinity. int4 needs `in` to be a multiple of its
    group.
    """
    values = _finite(weight, name)
    largest = _largest(values, scheme)
    if partner is not None:
        largest = torch.maximum(largest, _largest(_finite(partner, name), scheme))
    scales = _scales(largest, scheme)
    numbers = values.div_(_spread(scales, values, scheme))
    return _packed(numbers, scales, scheme)


def quantise_expert(
    weights: Mapping[Proj, torch.Tensor], scheme: ExpertScheme
) -> dict[Proj, Parts]:
    """Round one expert's gate and up [I, H] and down [H, I]. Raises as `quantise` does."""
    parts = {}
    for proj in PROJS:
        partner = scheme.partner(proj)
        other = None if partner is None else weights[partner]
        parts[proj] = quantise(weights[proj], scheme, other, f"the {proj} projection")
    return parts


def dequantise(parts: Mapping[str, torch.Tensor], scheme: ExpertScheme) -> torch.Tensor:
    """Float32 [out, in] of one projection's parts: exactly what SGLang multiplies with.

    Agrees with `block_dequant` of int8_utils.py (int8), `block_quant_dequant` of fp8_utils.py
    (fp8), and for int4 with what MoeWNA16Method's loader and `fused_moe_kernel_gptq_awq` make of
    them, before a kernel rounds to its compute type. SGLang's `per_tensor_dequantize` (fp8-tensor)
    rounds to float16 besides.
    """
    scales = next(tensor for suffix, tensor in parts.items() if "scale" in suffix).float()
    if scheme.name == "int4":
        numbers, scales = _unpacked(parts["qweight"]), scales.t()
    else:
        numbers = parts["weight"].float()
        scales = scales.reshape(1, 1) if scales.ndim == 0 else scales
    return numbers.mul_(_spread(scales, numbers, scheme))


def _finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    """A float32 copy. A NaN would become some number, and an infinity make its block zeros."""
    values = weight.to(torch.float32, copy=True)
    if not bool(torch.isfinite(values).all()):
        raise UnsupportedModelError(
            f"{name} has a NaN or an infinity, which no quantised tensor can say: save it from a "
            "checkpoint before its loss diverged."
        )
    return values


def _largest(values: torch.Tensor, scheme: ExpertScheme) -> torch.Tensor:
    """Largest magnitude of each block, [blocks of rows, blocks of columns]; edges may be cut."""
    rows, columns = _block(values, scheme)
    num_out, num_in = values.shape
    whole = F.pad(values.abs(), (0, -num_in % columns, 0, -num_out % rows))
    blocks: torch.Tensor = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amax(dim=(1, 3))


def _block(values: torch.Tensor, scheme: ExpertScheme) -> tuple[int, int]:
    return scheme.rows or values.shape[0], scheme.columns or values.shape[1]


def _scales(largest: torch.Tensor, scheme: ExpertScheme) -> torch.Tensor:
    """One float32 a block, with no more digits than the checkpoint will hold of it."""
    scales = largest / _TOPS[scheme.name]
    if scheme.name == "int4":
        # Rounded before it is used, so that the numbers are the nearest for the scale in use.
        kept = scales.to(getattr(torch, scheme.scale_dtype)).float()
        return torch.where(kept == 0, 1.0, kept)
    return scales.clamp_(min=_SMALLEST_SCALES[scheme.name])


def _spread(scales: torch.Tensor, values: torch.Tensor, scheme: ExpertScheme) -> torch.Tensor:
    """The scale of each value: broadcast where a block is a row or everything, else [out, in]."""
    rows, columns = _block(values, scheme)
    if scales.shape[0] > 1:
        scales = scales.repeat_interleave(rows, dim=0)[: values.shape[0]]
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(columns, dim=1)[:, : values.shape[1]]
    return scales


def _packed(numbers: torch.Tensor, scales: torch.Tensor, scheme: ExpertScheme) -> Parts:
    """Each rounded to the nearest, ties to even, as torch.round and its cast to float8 do."""
    num, scale = scheme.parts((numbers.shape[0], numbers.shape[1]))
    if scheme.name == "int4":
        steps = numbers.round_().add_(_ZERO).clamp_(0, 15)
        scales = scales.t().to(getattr(torch, scheme.scale_dtype))
        return {num.suffix: _nibbles(steps), scale.suffix: scales.contiguous()}
    # The largest is off its top by one unit in the last place at most, which rounds to the top.
    numbers = numbers.round_() if scheme.name == "int8" else numbers
    numbers = numbers.to(getattr(torch, num.dtype))
    return {num.suffix: numbers, scale.suffix: scales.reshape(scale.shape)}


def _nibbles(steps: torch.Tensor) -> torch.Tensor:
    """0..15 as float32 [out, in] -> int32 [in / 8, out], the first of eight in the lowest bits."""
    by_input: torch.Tensor = steps.to(torch.int32).t().unflatten(0, (-1, NIBBLES))
    words = by_input[:, 0].contiguous()  # of [in / 8, 8, out]
    for place in range(1, NIBBLES):
        words |= by_input[:, place] << 4 * place
    return words


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [in / 8, out] -> -8..7 as float32 [out, in]."""
    places = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=words.device)
    steps = (
        words[:, None, :] >> places[None, :, None]
    ) & 15  # the sign bit comes along, & drops it
    values: torch.Tensor = (steps - _ZERO).flatten(0, 1).t().contiguous()
    return values.float()
