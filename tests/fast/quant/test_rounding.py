"""Numbers and scales of one projection, against brute force over every number there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.model_spec import PROJS, Proj
from sgl_esft.quant.rounding import Parts, dequantise, quantise, quantise_expert
from tests.fast.quant.test_scheme import FP8, FP8_TENSOR, INT4, INT8, SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)

ALL_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
FLOAT8 = ALL_FLOAT8[ALL_FLOAT8.isfinite()].unique()
NUMBERS = {
    "int8": torch.arange(-127, 128).double(),
    "fp8": FLOAT8,
    "fp8-tensor": FLOAT8,
    "int4": torch.arange(-8, 8).double(),
}


def draw(num_out: int, num_in: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Noise whose rows and columns differ in size."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_out, num_in, generator=generator) * 0.02
    return noise * torch.linspace(1, spread, num_out)[:, None] * torch.linspace(spread, 1, num_in)


def scale_of_each(parts: Parts, scheme: ExpertScheme, shape: tuple[int, int]) -> torch.Tensor:
    """Float64 [out, in], spread by hand."""
    scales = next(t for suffix, t in parts.items() if "scale" in suffix).double()
    if scheme.name == "fp8-tensor":
        return scales.expand(shape)
    rows = torch.arange(shape[0])[:, None] // (scheme.rows or shape[0])
    columns = torch.arange(shape[1])[None, :] // (scheme.columns or shape[1])
    return scales[columns, rows] if scheme.name == "int4" else scales[rows, columns]


def unpacked(qweight: torch.Tensor) -> torch.Tensor:
    """-8..7 as float64 [out, in]: eight along the input in a word, the first lowest, as GPTQ's."""
    words = qweight.t().to(torch.int64) & 0xFFFF_FFFF
    steps = [words // 16**place % 16 for place in range(8)]
    return torch.stack(steps, dim=-1).flatten(1).double() - 8


def same(one: Parts, other: Parts) -> bool:
    """Equal in names, types, shapes and every bit."""
    return one.keys() == other.keys() and all(
        (one[k].dtype, one[k].shape) == (other[k].dtype, other[k].shape)
        and torch.equal(one[k].flatten().view(torch.uint8), other[k].flatten().view(torch.uint8))
        for k in one
    )


@each_scheme
@pytest.mark.parametrize("shape", [(128, 128), (192, 320), (8, 64), (300, 128)])
def test_parts_are_those_that_the_scheme_says(scheme: ExpertScheme, shape: tuple[int, int]) -> None:
    parts = quantise(draw(*shape), scheme)
    seen = [(suffix, str(t.dtype)[6:], tuple(t.shape)) for suffix, t in parts.items()]
    assert seen == [(part.suffix, part.dtype, part.shape) for part in scheme.parts(shape)]
    assert all(tensor.is_contiguous() for tensor in parts.values())


@each_scheme
def test_every_value_becomes_the_nearest_number(scheme: ExpertScheme) -> None:
    weight = draw(160, 192, spread=50.0)
    parts = quantise(weight, scheme)
    scale = scale_of_each(parts, scheme, (160, 192))
    number = parts["weight"].double() if "weight" in parts else unpacked(parts["qweight"])
    # As the division in float32 sees it: with all digits, other values would be ties.
    wanted = (weight / scale.float()).double()
    numbers = NUMBERS[scheme.name]
    above = torch.searchsorted(numbers, wanted).clamp(1, len(numbers) - 1)
    gap = torch.minimum((wanted - numbers[above]).abs(), (wanted - numbers[above - 1]).abs())
    assert torch.equal((wanted - number).abs(), gap)
    assert bool(torch.isin(number, numbers).all())


@each_scheme
def test_bounds_of_the_error(scheme: ExpertScheme) -> None:
    weight = draw(256, 256, spread=20.0)
    parts = quantise(weight, scheme)
    scale = scale_of_each(parts, scheme, (256, 256))
    error = (dequantise(parts, scheme).double() - weight.double()).abs()
    if scheme.name.startswith("fp8"):  # 4 digits, and steps of 2^-9 near zero
        bound = torch.maximum(weight.double().abs() * 2**-4, scale * 2**-10)
    else:  # int4's largest is 7.5 steps, and its scale is rounded to 8 bits
        bound = scale * (0.5 if scheme.name == "int8" else 0.54)
    assert bool((error <= bound * (1 + 1e-5)).all())
    assert bool((error > bound / 2).any()), "the bound says something"


def test_relative_errors_in_their_order() -> None:
    weight = draw(256, 256)
    errors = [
        float((dequantise(quantise(weight, s), s) - weight).norm() / weight.norm())
        for s in (INT8, FP8, FP8_TENSOR, INT4)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.01
    assert errors[1] < 0.03
    assert errors[3] < 0.11


@pytest.mark.parametrize(
    ("scheme", "largest", "values", "expected"),
    [
        (INT8, 127.0, [0.5, 1.5, 2.5, -0.5, -1.5, -2.5], [0, 2, 2, 0, -2, -2]),
        (FP8, 448.0, [17, 19, 21, -17, -19, 0.5 * 2**-9], [16, 20, 20, -16, -20, 0]),
        (FP8_TENSOR, 448.0, [17, 19, 21, -17, -19, 1.5 * 2**-9], [16, 20, 20, -16, -20, 2**-8]),
        (INT4, 7.5, [0.5, 1.5, 2.5, -0.5, -1.5, -7.5], [0, 2, 2, 0, -2, -8]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_ties_go_to_the_even_number(
    scheme: ExpertScheme, largest: float, values: list[float], expected: list[float]
) -> None:
    weight = torch.zeros(8, 64)
    weight[0, :7] = torch.tensor([largest, *values])
    seen = dequantise(quantise(weight, scheme), scheme)
    assert seen[0, 1:7].tolist() == expected, "the scale is 1"
    assert seen[0, 0] == (7 if scheme is INT4 else largest)


@each_scheme
def test_zeros(scheme: ExpertScheme) -> None:
    weight = draw(256, 256)
    weight[:128] = 0
    for each in (weight, torch.zeros(128, 128)):
        parts = quantise(each, scheme)
        assert all(bool(t.float().isfinite().all()) for t in parts.values())
        assert bool((scale_of_each(parts, scheme, tuple(each.shape)) > 0).all())  # type: ignore[arg-type]
        assert not dequantise(parts, scheme)[:128].any()


@each_scheme
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-30, 1e-12, 1e-6, 1e4, 3e38])
def test_very_small_and_very_large_values(scheme: ExpertScheme, size: float) -> None:
    weight = torch.full((128, 128), size)
    weight[::2] *= -1
    seen = dequantise(quantise(weight, scheme), scheme)
    assert bool(seen.isfinite().all())
    if size >= 1e-6:
        assert torch.allclose(seen, weight, rtol=0.08)
    else:
        assert float((seen - weight).abs().max()) <= max(size, 1e-9)


@each_scheme
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_no_number_can_say(
    scheme: ExpertScheme, bad: float, dtype: torch.dtype
) -> None:
    weight = draw(128, 128).to(dtype)
    weight[127, 3] = bad
    with pytest.raises(UnsupportedModelError, match="tensor x has a NaN or an infinity"):
        quantise(weight, scheme, name="tensor x")
    weights: dict[Proj, torch.Tensor] = dict.fromkeys(PROJS, draw(128, 128))
    with pytest.raises(UnsupportedModelError, match="the up projection has a NaN"):
        quantise_expert({**weights, "up": weight}, INT8)
    with pytest.raises(UnsupportedModelError, match="has a NaN"):
        quantise(draw(128, 128), FP8_TENSOR, partner=weight)


@each_scheme
def test_a_block_knows_no_other(scheme: ExpertScheme) -> None:
    weight = draw(192, 192)
    rows, columns = scheme.rows or 192, scheme.columns or 192
    whole = dequantise(quantise(weight, scheme), scheme)
    corners = itertools.product(range(0, 192, rows), range(0, 192, columns))
    for row, column in itertools.islice(corners, 0, None, 37 if rows == 1 else 1):
        block = (slice(row, row + rows), slice(column, column + columns))
        alone = dequantise(quantise(weight[block].contiguous(), scheme), scheme)
        assert torch.equal(whole[block], alone)


@each_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_values_count(scheme: ExpertScheme, dtype: torch.dtype) -> None:
    """Not their type, nor how they lie in memory; and they stay as they were."""
    weight = draw(128, 192).to(dtype)
    before, expected = weight.clone(), quantise(weight.float(), scheme)
    assert same(quantise(weight, scheme), expected)
    assert same(quantise(weight.t().contiguous().t(), scheme), expected)
    assert torch.equal(weight, before)
    quantise(floats := weight.float(), scheme)
    assert torch.equal(floats, before.float())


def test_where_int4_puts_a_value() -> None:
    weight = torch.zeros(16, 64)
    weight[:, 0] = -7.5  # a scale of 1
    weight[3, 13], weight[3, 15] = 5.0, 7.0
    parts = quantise(weight, INT4)
    assert int(parts["qweight"][1, 3]) & 0xFFFF_FFFF == 0xF8D8_8888
    assert int(parts["qweight"][0, 3]) & 0xFFFF_FFFF == 0x8888_8880
    assert torch.equal(unpacked(parts["qweight"]).float(), dequantise(parts, INT4))


def test_int4_uses_the_scale_that_it_stores() -> None:
    """Stored in bfloat16; the numbers are nearest for that one, not for the one of all digits."""
    weight = draw(64, 64)
    parts = quantise(weight, INT4)
    exact = weight.abs().amax(1) / 7.5
    assert torch.equal(parts["scales"][0], exact.bfloat16())
    assert not torch.equal(parts["scales"][0].float(), exact)
    numbers = (weight / parts["scales"][0].float()[:, None]).round().clamp(-8, 7)
    assert torch.equal(dequantise(parts, INT4), numbers * parts["scales"][0].float()[:, None])


def test_gate_and_up_share_one_scale() -> None:
    weights: dict[Proj, torch.Tensor] = {
        "gate": draw(64, 128, 1) * 2,
        "up": draw(64, 128, 2),
        "down": draw(128, 64, 3) * 3,
    }
    weights["up"][5, 5] = 0.7
    parts = quantise_expert(weights, FP8_TENSOR)
    assert float(parts["gate"]["weight_scale"]) == float(parts["up"]["weight_scale"])
    assert parts["gate"]["weight_scale"] == torch.tensor(0.7) / 448
    assert parts["down"]["weight_scale"] == weights["down"].abs().max() / 448
    assert same(parts["up"], quantise(weights["up"], FP8_TENSOR, weights["gate"]))


@pytest.mark.parametrize("scheme", [INT8, FP8, INT4], ids=lambda s: s.name)
def test_an_expert_is_its_projections(scheme: ExpertScheme) -> None:
    make: Callable[[int], torch.Tensor] = lambda seed: draw(128, 128, seed)  # noqa: E731
    weights = {proj: make(seed) for seed, proj in enumerate(PROJS)}
    parts = quantise_expert(weights, scheme)
    assert list(parts) == list(PROJS)
    assert all(same(parts[proj], quantise(weights[proj], scheme)) for proj in PROJS)


@pytest.mark.parametrize("scale", [2.0**-14, 7.1e-5, 1e-4, 3.3e-3, 0.9])
def test_one_scale_survives_float16(scale: float) -> None:
    """SGLang's `per_tensor_dequantize` and back, for every number and scale that can be written."""
    numbers = FLOAT8.float()
    weight = (numbers * scale).expand(2, -1)
    parts = quantise(weight, FP8_TENSOR)
    through = parts["weight"].half() * parts["weight_scale"]
    assert through.dtype == torch.float16
    again = (through.float() / parts["weight_scale"]).to(torch.float8_e4m3fn)
    assert torch.equal(again.float(), parts["weight"].float())
    assert torch.equal(parts["weight"].float(), numbers.expand(2, -1))


def test_one_scale_has_a_smallest() -> None:
    """Below it, float16 would not hold the smallest numbers, and SGLang would round them anew."""
    parts = quantise(torch.full((8, 8), 1e-4), FP8_TENSOR)
    assert parts["weight_scale"] == 2.0**-14
