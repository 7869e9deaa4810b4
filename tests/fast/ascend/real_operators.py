"""The operators of this machine's NPU beside the simulated ones: what to run first on an NPU.

    python -m tests.fast.ascend.real_operators [DEVICE]  ->  lines, and status 1 if one differs

What the documents leave undefined is not compared. The calls are those that weaving makes: weights
in rows, transposed views, slots without rows, fewer rows than x has, pairs without a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.npu_simulator import matmul, routing

NUM_TOKENS, TOP_K, HIDDEN, WIDTH = 48, 6, 256, 128
DTYPES = (torch.bfloat16, torch.float16)
NUM_SLOTS = (80, 1024)  # a small tensor, and the most that its grouped matmul takes
TOLERANCE = 2e-2  # of the largest value; integers are compared exactly

Results = tuple[torch.Tensor, ...]


def ids(num_slots: int, seed: int) -> torch.Tensor:
    """[N, K] int32 slots; every third token's last pair has none, which is id `num_slots`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(num_slots, generator=generator)[:TOP_K]] * NUM_TOKENS)
    drawn = (drawn + torch.arange(NUM_TOKENS).unsqueeze(1)) % (num_slots // 2)
    drawn[::3, -1] = num_slots
    return drawn.to(torch.int32)


def comparisons(dtype: torch.dtype, num_slots: int) -> Iterator[tuple[str, Any, Any, list[Any]]]:
    """(name, simulated, real, arguments on the host), each step on the simulated one's result."""
    real = torch.ops.npu
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype)
    w13 = torch.randn(num_slots, 2 * WIDTH, HIDDEN, generator=generator).to(dtype) / 16
    slots = ids(num_slots, 0)

    def route(operator: Callable[..., Any]) -> Callable[..., Results]:
        def call(x: torch.Tensor, slots: torch.Tensor) -> Results:
            rows, row_of_pair, counts, _ = operator(
                x,
                slots,
                active_num=slots.numel(),
                expert_num=num_slots + 1,
                expert_tokens_num_type=1,
                expert_tokens_num_flag=True,
                active_expert_range=[0, num_slots],
                quant_mode=-1,
            )
            return rows[: int(counts.sum())], row_of_pair, counts.to(torch.int64)

        return call

    def multiply(operator: Callable[..., Any]) -> Callable[..., Results]:
        def call(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> Results:
            (result,) = operator(
                [rows],
                [weight.transpose(1, 2)],
                group_list=counts,
                group_list_type=1,
                split_item=2,
                group_type=0,
                output_dtype=dtype,
            )
            return (result[: int(counts.sum())],)

        return call

    def combine(operator: Callable[..., Any]) -> Callable[..., Results]:
        def call(rows: torch.Tensor, weights: torch.Tensor, row_of_pair: torch.Tensor) -> Results:
            holes = rows.view(TOP_K, NUM_TOKENS, -1)
            return (operator(holes, None, None, None, weights, row_of_pair, None, 3),)

        return call

    yield (
        "npu_moe_init_routing_v2",
        route(routing.init_routing_v2),
        route(real.npu_moe_init_routing_v2),
        [x, slots],
    )
    active, row_of_pair, counts = route(routing.init_routing_v2)(x, slots)
    rows = torch.zeros(slots.numel(), HIDDEN, dtype=dtype)
    rows[: len(active)] = active
    yield (
        "npu_grouped_matmul",
        multiply(matmul.grouped_matmul),
        multiply(real.npu_grouped_matmul),
        [rows, w13, counts],
    )
    wide = torch.randn(slots.numel(), 2 * WIDTH, generator=generator).to(dtype)
    yield (
        "npu_swiglu",
        lambda value: (matmul.swiglu(value),),
        lambda value: (real.npu_swiglu(value),),
        [wide],
    )
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=generator).to(dtype)
    rows[len(active) :] = float("nan")  # nobody has written them
    yield (
        "npu_moe_finalize_routing",
        combine(routing.finalize_routing),
        combine(real.npu_moe_finalize_routing),
        [rows, weights, row_of_pair],
    )


def difference(found: Results, wanted: Results) -> str:
    """What is wrong, or nothing."""
    for seen, right in zip(found, wanted, strict=True):
        if seen.shape != right.shape or seen.dtype is not right.dtype:
            return f"{tuple(seen.shape)} {seen.dtype}, not {tuple(right.shape)} {right.dtype}"
        if not seen.is_floating_point() and not torch.equal(seen, right):
            return f"{int((seen != right).sum())} of {seen.numel()} integers differ"
        limit = TOLERANCE * right.abs().max().float() if right.is_floating_point() else 0
        if not ((seen.float() - right.float()).abs() <= limit).all():
            return f"values differ by {(seen.float() - right.float()).abs().max().item()}"
    return ""


def compare_all(device: str) -> dict[str, str]:
    """Operator, dtype and slots -> what is wrong."""
    found = {}
    for dtype in DTYPES:
        for num_slots in NUM_SLOTS:
            for name, simulated, real, arguments in comparisons(dtype, num_slots):
                case = f"{name} {dtype} {num_slots} slots"
                try:
                    seen = real(*(argument.to(device) for argument in arguments))
                    found[case] = difference(tuple(t.cpu() for t in seen), simulated(*arguments))
                except RuntimeError as error:
                    found[case] = f"{type(error).__name__}: {error}"
    return found


def main() -> int:
    import torch_npu  # noqa: F401 - registers the operators

    found = compare_all(sys.argv[1] if len(sys.argv) > 1 else "npu:0")
    for case, wrong in found.items():
        sys.stdout.write(f"{'differs' if wrong else 'equal':8}{case}  {wrong}\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
