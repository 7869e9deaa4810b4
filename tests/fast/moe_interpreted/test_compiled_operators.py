"""The stand-ins for compiled operators keep those operators' documented contracts.

Where SGLang has a second implementation of an operator in Triton, the two must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

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
from torch.nn import functional as F
from triton.runtime.interpreter import interpreter_builder

from tests.fast.kernels.interpreted import interpreter
from tests.fast.moe_interpreted import compiled_operators as subject
from tests.fast.moe_interpreted.bfloat16 import mend_bfloat16

pytestmark = pytest.mark.usefixtures("one_thread", "_mended")
POISON = 0x5A5A5A5A
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Aligned = tuple[list[int], list[int], int]


@pytest.fixture(scope="module")
def _mended() -> Iterator[None]:
    with patch.dict(vars(interpreter_builder)):
        mend_bfloat16()
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
