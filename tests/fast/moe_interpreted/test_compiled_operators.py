"""The stand-ins for compiled operators keep those operators' documented contracts.

Where SGLang has a second implementation of an operator in Triton, the two must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.moe.fused_moe_triton_kernels import (
    act_and_mul_triton,
    moe_sum_reduce_triton,
)
from sglang.kernels.ops.moe.moe_align_small_numel import moe_align_small_numel
from sglang.kernels.ops.quantization.fp8_kernel import (
    _per_token_group_quant_8bit_raw,
    per_tensor_quant_mla_fp8,
    static_quant_fp8,
)
from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8
from torch.nn import functional as F
from triton.language.extra.cuda import libdevice
from triton.runtime.interpreter import interpreter_builder

from tests.fast.kernels.interpreted import interpreter
from tests.fast.moe_interpreted import compiled_operators as subject
from tests.fast.moe_interpreted.bfloat16 import mend_bfloat16
from tests.fast.moe_interpreted.float8 import half_away_from_zero, mend_float8

pytestmark = pytest.mark.usefixtures("one_thread", "_mended")
POISON = 0x5A5A5A5A
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Aligned = tuple[list[int], list[int], int]


@pytest.fixture(scope="module")
def _mended() -> Iterator[None]:
    with patch.dict(vars(interpreter_builder)), patch.object(libdevice, "round", libdevice.round):
        mend_bfloat16()
        mend_float8()
        yield


def align(topk_ids: torch.Tensor, buckets: int, block: int, pad: bool = True) -> Aligned:
    """(sorted ids, experts of blocks, padded rows); outputs are larger than needed and poisoned."""
    rows = torch.full((topk_ids.numel() + buckets * block,), POISON, dtype=torch.int32)
    experts = torch.full((rows.numel() // block,), POISON, dtype=torch.int32)
    total = torch.full((1,), POISON, dtype=torch.int32)
    scratch = torch.full((buckets + 1,), POISON, dtype=torch.int32)
    subject.align_block_size(topk_ids, buckets, block, rows, experts, total, scratch, pad)
    return rows.tolist(), experts.tolist(), int(total)


def drawn(seed: int, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, top_k)
    return torch.randint(-1, num_experts, shape, generator=generator, dtype=torch.int32)


def test_the_example_in_sglangs_documentation() -> None:
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], dtype=torch.int32)
    rows, experts, total = align(ids, 6, 4)
    assert rows[:total] == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert experts[: total // 4] == [1, 2, 3, 4]


@given(
    seed=st.integers(0, 1 << 30),
    num_tokens=st.integers(0, 12),
    top_k=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    block=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=60)
def test_alignment(seed, num_tokens, top_k, num_experts, block, dtype) -> None:
    ids = drawn(seed, num_tokens, top_k, num_experts).to(dtype)
    rows, experts, total = align(ids, num_experts + 1, block)
    flat, padding = ids.flatten().tolist(), ids.numel()
    blocks = [rows[i : i + block] for i in range(0, total, block)]
    assert sorted(row for row in rows[:total] if row != padding) == list(range(padding))
    for expert, members in zip(experts, blocks, strict=False):
        live = [row for row in members if row != padding]
        assert live, "a block of nobody"
        assert members == live + [padding] * (block - len(live))
        assert {flat[row] for row in live} == {expert}
    used = total // block
    assert experts[:used] == sorted(experts[:used]), "blocks by expert, -1 first"
    for expert in set(flat):
        assert experts[:used].count(expert) == -(-flat.count(expert) // block), "only the last pads"
    assert set(rows[total:]) <= {padding}
    assert set(experts[used:]) <= {POISON}, "what lies behind the blocks is left as it was"


def test_padding_is_only_written_when_asked_for() -> None:
    rows, _, total = align(torch.tensor([[0, 2]], dtype=torch.int32), 4, 4, pad=False)
    assert (total, rows[:8]) == (8, [0, POISON, POISON, POISON, 1, POISON, POISON, POISON])


@pytest.mark.parametrize("seed", range(4))
def test_alignment_is_sglangs_own_in_triton(seed: int) -> None:
    """The one for few rows and many experts, which SGLang says has the same contract."""
    ids, buckets, block = drawn(seed, 5, 4, 70), 71, 16
    rows, experts, total = align(ids, buckets, block)
    found = [torch.full((len(n),), POISON, dtype=torch.int32) for n in (rows, experts, [0])]
    with interpreter():
        moe_align_small_numel(ids, buckets, block, *found)
    assert int(found[2]) == total
    assert found[0][:total].tolist() == rows[:total]
    assert found[1].tolist() == experts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 32, generator=generator).to(dtype)
    exact = F.silu(rows[:, :16].double()) * rows[:, 16:].double()
    one_step = torch.finfo(dtype).eps
    torch.testing.assert_close(subject.silu_and_mul(rows).double(), exact, rtol=one_step, atol=0)
    ids, out = torch.tensor([3, -1, 0], dtype=torch.int32), torch.full((6, 16), 7.0, dtype=dtype)
    subject.silu_and_mul(rows, out, ids, 2)
    assert torch.equal(out[[0, 1, 4, 5]], subject.silu_and_mul(rows)[[0, 1, 4, 5]])
    assert (out[2:4] == 7).all(), "rows of nobody are left as they were"


def test_what_lies_sorted() -> None:
    """Blocks of 4 rows of [2, 3] ids, one of them nobody's: its block, padding, and the rest."""
    ids = torch.tensor([[2, -1, 0], [0, 2, 2]], dtype=torch.int32)
    rows, experts, total = align(ids, 4, 4)
    assert (rows[:total], experts[:3]) == ([1, 6, 6, 6, 2, 3, 6, 6, 0, 4, 5, 6], [-1, 0, 2])
    blocks = {
        "sorted_token_ids": torch.tensor(rows, dtype=torch.int32),
        "num_tokens_post_padded": torch.tensor([total], dtype=torch.int32),
        "num_valid_tokens": ids.numel(),
    }
    values = torch.randn(total + 4, 64, generator=torch.Generator().manual_seed(8))
    out, of_blocks = torch.full((total + 4, 32), 7.0), torch.tensor([*experts[:3], 0])
    subject.silu_and_mul(values, out, of_blocks.int(), 4, **blocks)
    live = [4, 5, 8, 9, 10]
    assert torch.equal(out[live], subject.silu_and_mul(values)[live])
    assert (out != 7).any(dim=1).nonzero().flatten().tolist() == live
    with interpreter():
        numbers, scales = subject.per_token_group_quant(values, group_size=32, **blocks)
        expected = _per_token_group_quant_8bit_raw(values, 32)
    read = [0, *live]  # the first is nobody's, and might have been left out
    assert torch.equal(scales[read], expected[1][read])
    assert torch.equal(numbers.float()[read], expected[0].float()[read])
    others = [row for row in range(total + 4) if row not in read]
    assert scales[others].isnan().all()
    assert numbers.float()[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_is_sglangs_own_in_triton(dtype: torch.dtype) -> None:
    """Which rounds once more, between silu and the product."""
    rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids, out = (
        torch.tensor([[3, -1], [0, 1], [-1, 2]], dtype=torch.int32),
        torch.zeros(6, 16).to(dtype),
    )
    with interpreter():
        act_and_mul_triton(rows, out, {"BLOCK_SIZE_M": 16}, ids)
    ours = subject.silu_and_mul(rows, torch.zeros_like(out), ids.flatten())
    torch.testing.assert_close(ours, out, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduction_is_sglangs_own_in_triton(dtype: torch.dtype) -> None:
    parts = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, expected = torch.empty(5, 32, dtype=dtype), torch.empty(5, 32, dtype=dtype)
    subject.sum_reduce(parts, found, 2.5)
    with interpreter():
        moe_sum_reduce_triton(parts, expected, 2.5)
    assert torch.equal(found, expected)


def to_float8(
    values: torch.Tensor, scale: float = 0.0, is_static: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = torch.empty_like(values, dtype=torch.float8_e4m3fn), torch.tensor([scale])
    subject.per_tensor_quant_fp8(values, numbers, scales, is_static)
    return numbers.float(), scales


def spread(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of every magnitude that float8 has, and below."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**powers).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_scale_of_float8_is_sglangs_own_in_triton(dtype: torch.dtype) -> None:
    """Static, and that of the largest magnitude, which SGLang's has for MLA's queries."""
    values = spread((6, 2, 16), dtype, 4)
    numbers, scale = to_float8(values)
    rows, expected = values.view(12, 16), torch.zeros(1)
    with interpreter():
        theirs, expected = per_tensor_quant_mla_fp8(values, expected)
        static, _ = static_quant_fp8(rows, scale, repeat_scale=False)
    assert torch.equal(scale, expected)
    assert torch.equal(numbers, theirs.float())
    assert torch.equal(numbers.view(12, 16), static.float())
    assert torch.equal(numbers, to_float8(values, float(scale), is_static=True)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_float8_of_groups_in_triton(dtype: torch.dtype) -> None:
    """SGLang's Triton kernel, which here is in the place of its compiled one."""
    values = spread((5, 256), dtype, 5)
    with interpreter():
        numbers, scales = _per_token_group_quant_8bit_raw(values, 128)
    groups = values.float().view(5, 2, 128)
    expected = groups.abs().amax(2).clamp(min=1e-10) / 448
    scaled = (groups * (1 / expected)[:, :, None]).clamp(-448, 448)
    assert torch.equal(scales, expected)
    assert torch.equal(numbers.float().view(5, 2, 128), scaled.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_of_rows_in_triton(dtype: torch.dtype) -> None:
    """SGLang's Triton kernel, whose `round` goes away from zero."""
    values = spread((5, 64), dtype, 6)
    values[4] = torch.arange(64) - 31.5  # halves, which are ties
    values[4, 0] = 127
    with interpreter():
        numbers, scales = per_token_quant_int8(values)
    largest = values.float().abs().amax(1, keepdim=True)
    steps = values.float() * (127 / largest)
    assert torch.equal(scales, largest / 127)
    assert torch.equal(numbers.float(), steps.sign() * (steps.abs().double() + 0.5).floor().float())


def test_rounding_away_from_zero() -> None:
    values = [0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388607.5, 8388609.0, -0.25]
    expected = [1, -1, 2, 3, -3, 0, 8388608, 8388609, 0]
    assert half_away_from_zero(np.array(values, np.float32)).tolist() == expected


def test_mask() -> None:
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    subject.mask_topk_ids(ids[:, :2], torch.tensor([3], dtype=torch.int32))
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [-1, -1, 11]]


IDS = torch.tensor([[0, 1]], dtype=torch.int32)
ROWS = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: align(IDS, 2, 4), "topk_ids: 0..1 has no bucket"),
        (lambda: align(IDS - 2, 4, 4), "topk_ids: -2..-1 has no bucket"),
        (lambda: align(IDS.float(), 4, 4), "topk_ids: torch.float32"),
        (lambda: align(IDS.expand(2, 2).T, 4, 4), r"topk_ids: not \[num_tokens, k\]"),
        (lambda: align(IDS, 8193, 4), "num_experts: 8193 buckets"),
        (lambda: align_into(rows=7), "sorted_token_ids: 8 rows do not fit"),
        (lambda: align_into(blocks=1), "expert_ids: too few"),
        (lambda: align_into(scratch=4), "cumsum_buffer: 4 entries"),
        (lambda: align_into(dtype=torch.int64), r"outputs: not \[n\] int32"),
        (lambda: subject.silu_and_mul(ROWS[:, :6].clone()), "no whole vectors"),
        (lambda: subject.silu_and_mul(ROWS, ROWS), r"out: \(4, 16\)"),
        (lambda: subject.silu_and_mul(ROWS, None, IDS[0]), "expert_ids: too few for 4 rows"),
        (lambda: subject.silu_and_mul(ROWS.double()), "input: torch.float64"),
        (lambda: subject.sum_reduce(ROWS[None], ROWS), r"output: \(4, 16\)"),
        (lambda: subject.sum_reduce(ROWS[None], ROWS[:1].half()), "output: not like input"),
        (lambda: subject.mask_topk_ids(IDS.long(), IDS[0, :1]), r"topk_ids: not \[n, k\] int32"),
        (lambda: subject.mask_topk_ids(IDS, IDS[0]), "num_token_non_padded: not one int32"),
        (lambda: to_float8(ROWS / 0), "input: NaN, so rows that nobody has written"),
        (lambda: to_float8(ROWS, 2.0), "output_s: not zero"),
        (lambda: to_float8(ROWS.double()), "input: torch.float64"),
        (lambda: subject.per_tensor_quant_fp8(ROWS, ROWS, ROWS[0, :1]), "output_q: torch.float32"),
    ],
)
def test_what_the_compiled_operators_do_not_take(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(subject.OperatorContractError, match=said):
        call()


def align_into(
    rows: int = 8, blocks: int = 2, scratch: int = 5, dtype: torch.dtype = torch.int32
) -> None:
    outputs = [torch.empty(n, dtype=dtype) for n in (rows, blocks, 1, scratch)]
    subject.align_block_size(IDS, 4, 4, *outputs)


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr) -> None:
    cells = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + cells), tl.load(b_ptr + cells))
    tl.store(c_ptr + cells, product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_interpreters_dot(dtype: torch.dtype) -> None:
    """As mended for bfloat16: products and sums in float32."""
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    product = torch.empty(16, 16)
    with interpreter():
        _dot_kernel[(1,)](a, b, product, N=16)
    torch.testing.assert_close(product, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def _float8_kernel(numbers_ptr, values_ptr, back_ptr, product_ptr, N: tl.constexpr) -> None:
    cells = tl.arange(0, N)
    numbers = tl.load(numbers_ptr + cells, mask=cells < N, other=0.0)
    tl.store(values_ptr + cells, numbers.to(tl.float32))
    tl.store(back_ptr + cells, tl.load(values_ptr + cells).to(tl.float8e4nv))
    square = tl.reshape(numbers, (16, 16))
    places = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(product_ptr + places, tl.dot(square, tl.trans(square, (1, 0))))


def test_the_interpreters_float8() -> None:
    """As mended: each of the 256 there and back, NaN among them, and multiplied exactly."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values, back, product = torch.empty(256), torch.empty_like(numbers), torch.empty(16, 16)
    with interpreter():
        _float8_kernel[(1,)](numbers, values, back, product, N=256)
    torch.testing.assert_close(values, numbers.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back.float(), numbers.float(), rtol=0, atol=0, equal_nan=True)
    square = numbers.float().view(16, 16)
    torch.testing.assert_close(product, square @ square.T, equal_nan=True)
    assert product.isnan().any()


@given(st.floats(-512, 512, width=32))
def test_float8_is_rounded_to_the_nearest(value: float) -> None:
    """Ties to even; against all numbers that there are."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    found = abs(float(to_float8(torch.tensor([value]), 1.0, is_static=True)[0]))
    distance = (numbers - abs(value)).abs()
    nearest = (distance == distance.min()).nonzero().flatten().tolist()
    assert found == numbers[min(nearest, key=lambda place: place % 2)]
