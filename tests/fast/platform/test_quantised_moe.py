"""Quantised experts on the CPU: each scheme's arithmetic, and what must not change a bit of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.platform import moe
from sgl_esft.platform.cpu_hooks import quantise_fp8
from sgl_esft.platform.quantised_moe import (
    Fp8Experts,
    Int4Experts,
    Int8Experts,
    experts_of,
    pack_int4,
)
from sgl_esft.quant.rounding import Parts, dequantise, quantise
from sgl_esft_kernels import reroute_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_EXPERTS = 5
# Relative to a token's whole output. bfloat16 rounds inputs, sums and outputs to 2^-9 each.
BOUNDS = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
SCHEMES = {
    "int8": ExpertScheme("int8", 1, 0),
    "fp8": ExpertScheme("fp8", 128, 128),
    "fp8-tensor": ExpertScheme("fp8-tensor", 0, 0),
    "int4": ExpertScheme("int4", 1, 32, "bfloat16"),
}
KERNELS = ("int8", "int4")  # in bfloat16
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
each_dtype = pytest.mark.parametrize("dtype", BOUNDS)


class Layer:
    """Random experts, quantised; their values, and their numbers and scales as SGLang lays them."""

    def __init__(self, name: str, hidden: int, width: int, dtype: torch.dtype, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        scheme = SCHEMES[name]
        if name == "int4":
            scheme = ExpertScheme("int4", 1, 32, str(dtype).removeprefix("torch."))
        self.scheme, self.dtype, self.generator = scheme, dtype, generator
        w13 = [self._draw(2 * width, hidden) for _ in range(NUM_EXPERTS)]
        w2 = [self._draw(hidden, width) for _ in range(NUM_EXPERTS)]
        self.w13 = [dequantise(parts, scheme).double() for parts in w13]
        self.w2 = [dequantise(parts, scheme).double() for parts in w2]
        self.parts = (*self._stacked(w13), *self._stacked(w2))
        self.hidden = hidden

    def _draw(self, num_out: int, num_in: int) -> Parts:
        # Rows and columns of other sizes, so that a scale in another's place shows.
        weight = torch.randn(num_out, num_in, generator=self.generator) / num_in**0.5
        sizes = 0.2 + 2 * torch.rand(num_out, 1, generator=self.generator)
        return quantise(weight * sizes, self.scheme)

    def _stacked(self, every: list[Parts]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = (
            torch.stack(part) for part in zip(*(p.values() for p in every), strict=True)
        )
        if self.scheme.name != "int4":
            return numbers, scales
        scales = scales.mT.contiguous()
        packed = zip(numbers.mT.contiguous().view(torch.uint8), scales, strict=True)
        return torch.stack([pack_int4(*each) for each in packed]), scales

    def experts(self, order: Any = slice(None)) -> moe.Experts:
        w13, w13_scale, w2, w2_scale = (part[order] for part in self.parts)
        parts = w13, w2, w13_scale, w2_scale
        if self.scheme.name == "int8":
            return Int8Experts(*parts)
        if self.scheme.name == "int4":
            return Int4Experts(*parts)
        return Fp8Experts(*parts, block=(128, 128) if self.scheme.name == "fp8" else None)

    def inputs(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.hidden, generator=self.generator).to(self.dtype)

    def exact(self, x: torch.Tensor, row: int) -> torch.Tensor:
        gate, up = (x.double() @ self.w13[row].t()).chunk(2, dim=1)
        return (gate / (1 + (-gate).exp()) * up) @ self.w2[row].t()


def largest_error(seen: torch.Tensor, exact: torch.Tensor) -> float:
    """Of any token, relative to its output."""
    return float(((seen.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


@each_dtype
@pytest.mark.parametrize(
    ("scheme", "hidden", "width"),
    [
        ("int8", 128, 64),
        ("int8", 2048, 176),
        ("int8", 40, 24),  # no multiples of 16: the kernel would read behind the weights
        ("fp8", 256, 128),
        ("fp8", 200, 128),  # blocks that are cut
        ("fp8-tensor", 40, 24),
        *(
            ("int4", hidden, width)
            for hidden, width in ((32, 32), (96, 160), (128, 64), (2048, 96))
        ),
    ],
)
def test_an_expert_is_that_of_its_dequantised_weights(
    scheme: str, hidden: int, width: int, dtype: torch.dtype
) -> None:
    layer = Layer(scheme, hidden, width, dtype)
    x = layer.inputs(7)
    for row in range(NUM_EXPERTS):
        seen = layer.experts().compute(x, row)
        assert seen.dtype == dtype
        assert largest_error(seen, layer.exact(x, row)) <= BOUNDS[dtype]


@pytest.mark.parametrize("scheme", KERNELS)
@pytest.mark.parametrize(("hidden", "width"), [(128, 64), (512, 160)])
def test_a_token_does_not_depend_on_the_batch(scheme: str, hidden: int, width: int) -> None:
    layer = Layer(scheme, hidden, width, torch.bfloat16)
    x = layer.inputs(37)
    together = layer.experts().compute(x, 2)
    for n in (1, 2, 3, 4, 5, 8):
        for start in range(0, 37 - n, 6):
            some = slice(start, start + n)
            assert torch.equal(layer.experts().compute(x[some].clone(), 2), together[some])


@each_dtype
@each_scheme
def test_moving_experts_to_other_slots_changes_no_bit(scheme: str, dtype: torch.dtype) -> None:
    layer = Layer(scheme, 256, 128, dtype)
    x, order = layer.inputs(9), [3, 0, 4, 2, 1]
    weights, ids = torch.rand(9, 3), torch.randint(-1, NUM_EXPERTS, (9, 3))
    expected = moe.weighted_sum(x, layer.experts(), weights, ids)
    slot_of = torch.tensor(order).argsort()
    slots = slot_of[ids].masked_fill(ids < 0, -1)
    assert torch.equal(moe.weighted_sum(x, layer.experts(order), weights, slots), expected)
    assert float(expected.abs().max()) > 0


@pytest.mark.parametrize(
    ("num_out", "num_in", "group"),
    [(32, 32, 32), (96, 160, 32), (160, 96, 32), (64, 192, 64), (64, 2048, 128)],
)
def test_packing_moves_values_and_changes_none(num_out: int, num_in: int, group: int) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (num_out, num_in), generator=generator)
    scales = torch.rand(num_out, num_in // group, generator=generator).to(torch.bfloat16)
    numbers = (steps[:, 0::2] | steps[:, 1::2] << 4).to(torch.uint8)
    packed = pack_int4(numbers, scales)
    assert (packed.shape, packed.dtype) == (numbers.shape, torch.uint8)
    zeros = torch.zeros_like(scales.t())
    found = torch._weight_int4pack_mm_for_cpu(
        torch.eye(num_in, dtype=torch.bfloat16), packed, group, torch.stack([scales.t(), zeros], -1)
    )
    values = (steps - 8).float() * scales.float().repeat_interleave(group, 1)
    assert torch.equal(found, values.t().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("num_out", "dtype"), [(24, torch.bfloat16), (32, torch.float16), (32, torch.float32)]
)
def test_what_the_kernel_does_not_take_is_not_packed(num_out: int, dtype: torch.dtype) -> None:
    numbers = torch.arange(num_out * 16).reshape(num_out, 16).to(torch.uint8)
    assert torch.equal(pack_int4(numbers, torch.ones(num_out, 1, dtype=dtype)), numbers)


def one_value(number: int, scale: float) -> Int8Experts:
    """An expert of 16 widths with one gate of 32 and one up of 2^-5, whose product is 1; it goes
    through `number` times `scale`, in the first up and in every row of down.
    """
    w13, w2 = torch.zeros(1, 32, 16, dtype=torch.int8), torch.zeros(1, 16, 16, dtype=torch.int8)
    w13[0, 0, 0], w13[0, 16, 0], w2[0, :, 0] = 32, number, number
    w13_scale, w2_scale = torch.ones(1, 32, 1), torch.full((1, 16, 1), scale)
    w13_scale[0, 16] = scale
    return Int8Experts(w13, w2, w13_scale, w2_scale)


def test_int8_scales_are_not_rounded_to_the_inputs_dtype() -> None:
    scale = 1 + 2**-8 + 2**-10  # bfloat16 has 1 and 1 + 2^-7 beside it
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1
    for number in (1, 3, 5, 77, 127):
        value = torch.tensor(number * scale)
        hidden = (32 * value).to(torch.bfloat16)
        product = hidden.float() * number
        if reroute_cpu.int8_linear() is None:  # torch's kernel rounds it
            product = product.to(torch.bfloat16).float()
        expected = product * scale
        seen = one_value(number, scale).compute(x, 0)
        assert torch.equal(seen, expected.to(torch.bfloat16).expand(1, 16))


def test_int8_beyond_float16_is_right_where_the_output_is_not() -> None:
    """Numbers times inputs sum up to 26 million, and gate times up to one million."""
    hidden, width = 2048, 16
    w13 = torch.full((1, 2 * width, hidden), 127, dtype=torch.int8)
    w2 = torch.full((1, hidden, width), 127, dtype=torch.int8)
    scales = torch.full((1, 2 * width, 1), 4e-5), torch.full((1, hidden, 1), 1e-7)
    x = torch.full((1, hidden), 100.0, dtype=torch.float16)
    gate = 127 * 100 * hidden * 4e-5
    expected = torch.full((1, hidden), gate * gate * 127 * width * 1e-7).half()
    seen = Int8Experts(w13, w2, *scales).compute(x, 0)
    torch.testing.assert_close(seen, expected, rtol=2**-9, atol=0)


def test_inputs_and_weights_that_are_not_aligned_are_computed_without_the_kernel() -> None:
    """Its loads are aligned: the processor would fault."""
    layer = Layer("int8", 64, 32, torch.bfloat16)
    x = layer.inputs(3)
    elsewhere = torch.empty(1 + x.numel(), dtype=x.dtype)[1:].view_as(x).copy_(x)
    assert elsewhere.data_ptr() % 32 != 0
    assert largest_error(layer.experts().compute(elsewhere, 1), layer.exact(x, 1)) <= 2**-7
    shifted = []
    for part in layer.parts:
        size = part.numel() * part.itemsize
        room = torch.empty(size + 4, dtype=torch.uint8)[4:].view(part.dtype)
        shifted.append(room.view_as(part).copy_(part))
    w13, w13_scale, w2, w2_scale = shifted
    assert w13.data_ptr() % 16 != 0
    seen = Int8Experts(w13, w2, w13_scale, w2_scale).compute(x, 1)
    assert largest_error(seen, layer.exact(x, 1)) <= 2**-7


def test_int4_experts_of_another_dtype_than_their_input_are_a_mistake_of_ours() -> None:
    layer = Layer("int4", 64, 32, torch.bfloat16)
    with pytest.raises(InvariantError, match="float16"):
        layer.experts().compute(layer.inputs(1).half(), 0)


@each_scheme
def test_only_the_rows_asked_for_are_read(scheme: str) -> None:
    layer = Layer(scheme, 128, 128, torch.bfloat16)
    x = layer.inputs(4)
    expected = layer.experts().compute(x, 3)
    for part in layer.parts:
        others = [row for row in range(NUM_EXPERTS) if row != 3]
        part[others] = float("nan") if part.is_floating_point() else 7
    assert torch.equal(layer.experts().compute(x, 3), expected)


# ---- what SGLang asks a compiled kernel for after loading ----


def test_fp8_is_rounded_to_the_nearest_and_what_is_too_large_to_the_largest() -> None:
    weight = torch.tensor([[2.0, 17.0, 19.0, 1e6, -1e6, float("inf"), float("nan"), 0.0]])
    numbers, scale = quantise_fp8(weight, torch.tensor(2.0))
    expected = torch.tensor([[1.0, 8.0, 10.0, 448, -448, 448, float("nan"), 0.0]])
    torch.testing.assert_close(numbers.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert (numbers.dtype, float(scale)) == (torch.float8_e4m3fn, 2.0)
    with pytest.raises(UnsupportedModelError, match="--to fp8-tensor"):
        quantise_fp8(weight)
    with pytest.raises(UnsupportedModelError, match="--to fp8-tensor"):
        quantise_fp8(weight, scale, num_token_padding=8)


# ---- what SGLang describes ----


def described(**given: Any) -> SimpleNamespace:
    """As TritonMoeQuantInfo, nothing quantised."""
    tensor = torch.zeros(1, 2, 2)
    known = {
        **dict.fromkeys(("b13", "b2", "w13_zp", "w2_zp", "a13_scale", "a2_scale"), None),
        **dict.fromkeys(("w13_scale", "w2_scale", "block_shape"), None),
        **dict.fromkeys(("use_mxfp8", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16"), False),
        **dict.fromkeys(("use_int4_w4a16", "per_channel_quant"), False),
        "w13_weight": tensor,
        "w2_weight": tensor,
    }
    return SimpleNamespace(**{**known, **given})


def test_plain_experts_are_themselves() -> None:
    """Of a layer without quantisation SGLang is asked for no description: tiers are given these."""
    plain = moe.PlainExperts(torch.zeros(1, 4, 2), torch.zeros(1, 2, 2))
    assert experts_of(plain) is plain


SCALES = {"w13_scale": torch.ones(1), "w2_scale": torch.ones(1)}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, moe.PlainExperts),
        ({"use_int8_w8a8": True, "per_channel_quant": True, **SCALES}, Int8Experts),
        ({"use_fp8_w8a8": True, **SCALES}, Fp8Experts),
        ({"use_fp8_w8a8": True, "block_shape": [128, 128], **SCALES}, Fp8Experts),
        ({"use_int4_w4a16": True, "block_shape": [0, 32], **SCALES}, Int4Experts),
    ],
)
def test_sglangs_description_chooses_the_arithmetic(given: Any, kind: type) -> None:
    found = experts_of(described(**given))
    assert type(found) is kind
    if isinstance(found, Fp8Experts):
        assert found.block == ((128, 128) if "block_shape" in given else None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b13": torch.ones(1)}, "b13"),
        ({"use_int4_w4a16": True, "w13_zp": 1, "w2_zp": 1, **SCALES}, "w13_zp, w2_zp"),
        ({"use_fp8_w8a8": True, "a13_scale": 1, **SCALES}, "a13_scale"),
        ({"use_fp8_w8a8": True, "per_channel_quant": True, **SCALES}, "another kind"),
        ({"use_int8_w8a8": True, **SCALES}, "another kind"),
        (
            {"use_int8_w8a8": True, "per_channel_quant": True, "block_shape": [1, 2], **SCALES},
            "kind",
        ),
        ({"use_int8_w8a16": True, **SCALES}, "another kind"),
        ({"use_mxfp8": True, **SCALES}, "another kind"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        experts_of(described(**given))
