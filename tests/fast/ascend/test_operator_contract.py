"""The simulated operators do what the vendor's documents say, and refuse what they do not allow.

Each refusal is a call that differs from a right one in one argument.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.npu_simulator.contract import (
    FRACTAL_NZ,
    ND,
    ContractError,
    format_of,
)
from tests.support.npu_simulator.matmul import format_cast, grouped_matmul, swiglu
from tests.support.npu_simulator.routing import (
    finalize_routing,
    gating_top_k,
    gating_top_k_softmax,
    init_routing_v2,
    token_unpermute,
)

NUM_TOKENS, TOP_K, HIDDEN, WIDTH, NUM_EXPERTS = 4, 2, 32, 32, 5
BF16, INT32, INT64 = torch.bfloat16, torch.int32, torch.int64
NUM_PAIRS = NUM_TOKENS * TOP_K
IDS = torch.tensor([[3, 0], [1, 4], [3, 1], [0, 2]], dtype=INT32)


def rows_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=BF16).unsqueeze(1).expand(-1, HIDDEN).contiguous()


def route(**changed: Any) -> Any:
    given = {
        "x": rows_of(0, 1, 2, 3),
        "expert_idx": IDS,
        "active_num": NUM_PAIRS,
        "expert_num": NUM_EXPERTS,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, NUM_EXPERTS],
        "quant_mode": -1,
    } | changed
    return init_routing_v2(given.pop("x"), given.pop("expert_idx"), **given)


def multiply(**changed: Any) -> torch.Tensor:
    given = {
        "x": [torch.ones(NUM_PAIRS, HIDDEN, dtype=BF16)],
        "weight": [torch.ones(NUM_EXPERTS, HIDDEN, WIDTH, dtype=BF16)],
        "group_list": torch.tensor([2, 0, 3, 1, 2]),
        "group_list_type": 1,
        "split_item": 2,
        "group_type": 0,
    } | changed
    (result,) = grouped_matmul(given.pop("x"), given.pop("weight"), **given)
    return result


def combine(**changed: Any) -> torch.Tensor:
    given = {
        "expanded_permuted_rows": rows_of(*range(NUM_PAIRS)),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.ones(NUM_TOKENS, TOP_K, dtype=BF16),
        "expanded_src_to_dst_row": torch.arange(NUM_PAIRS, dtype=INT32),
        "export_for_source_row": IDS,
        "drop_pad_mode": 2,
    } | changed
    return finalize_routing(**given)


def combine_with_holes(**changed: Any) -> torch.Tensor:
    rows = rows_of(*range(NUM_PAIRS)).view(TOP_K, NUM_TOKENS, HIDDEN)
    given = {"expanded_permuted_rows": rows, "export_for_source_row": None, "drop_pad_mode": 3}
    return combine(**(given | changed))


def unpermute(**changed: Any) -> torch.Tensor:
    given = {
        "permuted_tokens": rows_of(*range(NUM_PAIRS)),
        "sorted_indices": torch.arange(NUM_PAIRS, dtype=INT32),
        "probs": torch.ones(NUM_TOKENS, TOP_K, dtype=BF16),
    } | changed
    return token_unpermute(**given)


def gate(**changed: Any) -> Any:
    given = {"x": torch.randn(NUM_TOKENS, 16), "k": 4, "k_group": 2, "group_count": 4} | changed
    return gating_top_k(given.pop("x"), given.pop("k"), **given)


def cast(value: torch.Tensor, acl_format: int = FRACTAL_NZ) -> torch.Tensor:
    return format_cast(value, acl_format)


def test_rows_are_sorted_by_expert_in_the_order_they_came() -> None:
    rows, row_of_pair, counts, _ = route()
    assert rows[:, 0].tolist() == [0, 3, 1, 2, 3, 0, 2, 1]
    assert row_of_pair.tolist() == [5, 0, 2, 7, 6, 3, 1, 4]
    assert counts.tolist() == [2, 2, 1, 2, 1]
    assert counts.dtype is INT64


def test_pairs_outside_the_active_range_have_no_row() -> None:
    rows, row_of_pair, counts, _ = route(active_expert_range=[1, 3])
    assert counts.tolist() == [2, 1]
    assert row_of_pair.tolist() == [-1, -1, 0, -1, -1, 1, -1, 2]
    assert rows[:3, 0].tolist() == [1, 2, 3]
    assert rows[3:].isnan().all(), "rows that are not active are undefined"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"expert_idx": IDS.long()}, "expert_idx is torch.int64"),
        ({"expert_idx": IDS.t()}, "expert_idx is not contiguous"),
        ({"expert_idx": IDS[:2].contiguous()}, "2 rows of ids for 4 of x"),
        ({"expert_idx": IDS - 1}, "expert id -1"),
        ({"expert_num": 4, "active_expert_range": [0, 4]}, "expert id 4 with expert_num 4"),
        ({"expert_num": 0}, "expert_num 0"),
        ({"active_expert_range": [0, NUM_EXPERTS + 1]}, "active_expert_range [0, 6]"),
        ({"active_expert_range": [-1, 2]}, "active_expert_range [-1, 2]"),
        ({"active_num": NUM_TOKENS}, "active_num 4, must be 8"),
        ({"drop_pad_mode": 1}, "drop_pad_mode 1"),
        ({"expert_tokens_num_type": 0}, "expert_tokens_num_type 0"),
        ({"expert_tokens_num_flag": False}, "expert_tokens_num_flag"),
        ({"quant_mode": 1}, "quant_mode 1"),
        ({"row_idx_type": 1}, "row_idx_type 1"),
        ({"scale": torch.ones(NUM_TOKENS)}, "scale given"),
        ({"x": rows_of(0, 1, 2, 3).double()}, "x is torch.float64"),
    ],
)
def test_init_routing_refuses(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match="npu_moe_init_routing_v2") as refused:
        route(**changed)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("list_type", "groups"), [(1, [2, 0, 3, 1, 1]), (0, [2, 2, 5, 6, 7])], ids=["counts", "ends"]
)
def test_each_run_of_rows_meets_its_weight(list_type: int, groups: list[int]) -> None:
    weight = torch.randn(NUM_EXPERTS, WIDTH, HIDDEN).to(BF16).transpose(1, 2)
    x = torch.randn(NUM_PAIRS, HIDDEN).to(BF16)
    y = multiply(x=[x], weight=[weight], group_list=torch.tensor(groups), group_list_type=list_type)
    for row, group in enumerate([0, 0, 2, 2, 2, 3, 4]):
        torch.testing.assert_close(y[row], x[row] @ weight[group], atol=0.05, rtol=0.02)
    assert y[7:].isnan().all(), "a row of no group is not written"


def test_the_weight_of_an_empty_group_is_not_read() -> None:
    weight = torch.ones(NUM_EXPERTS, HIDDEN, WIDTH, dtype=BF16)
    weight[1] = float("nan")
    assert not multiply(weight=[weight]).isnan().any()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_cast_weight_multiplies_as_before_and_reads_as_something_else(transposed: bool) -> None:
    weight = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).to(BF16)
    x = torch.randn(NUM_PAIRS, HIDDEN).to(BF16)
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    cast_weight = cast(stored)
    assert format_of(cast_weight) == FRACTAL_NZ
    assert format_of(stored) == ND
    assert cast_weight.data_ptr() != stored.data_ptr()
    assert not torch.equal(cast_weight, stored), "its bytes lie in blocks"
    given = cast_weight.transpose(1, 2) if transposed else cast_weight
    assert torch.equal(multiply(x=[x], weight=[given]), multiply(x=[x], weight=[weight]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group_list": torch.tensor([2, 0, 3, 1])}, "groupList 4 should be weight dim 0 5"),
        ({"group_list": torch.tensor([2, 0, 3, 1, 3])}, "groups of 9 rows, x has 8"),
        ({"group_list": torch.tensor([2, -1, 3, 1, 3])}, "group_list [2, -1, 3, 1, 3]"),
        ({"group_list": torch.tensor([2, 1, 3, 5, 8]), "group_list_type": 0}, "group_list [2, 1"),
        ({"group_list": torch.tensor([2, 0, 3, 1, 2], dtype=INT32)}, "group_list is torch.int32"),
        ({"group_list_type": 2}, "group_list_type 2"),
        ({"split_item": 0}, "split_item 0"),
        ({"group_type": 2}, "group_type 2"),
        ({"act_type": 5}, "act_type 5"),
        ({"output_dtype": torch.float16}, "output_dtype"),
        ({"x": [torch.ones(NUM_PAIRS, HIDDEN)]}, "weight is torch.bfloat16, x torch.float32"),
        ({"x": [torch.ones(HIDDEN, NUM_PAIRS, dtype=BF16).t()]}, "x is not contiguous"),
        ({"x": [torch.ones(NUM_PAIRS, 8, dtype=BF16)]}, "K 8 and 32"),
        ({"weight": [torch.ones(5, HIDDEN, 2 * WIDTH, dtype=BF16)[:, :, ::2]]}, "strides"),
        ({"weight": [torch.ones(HIDDEN, WIDTH, dtype=BF16)]}, "weight has shape (32, 32)"),
        ({"scale": [torch.ones(1)]}, "scale given"),
    ],
)
def test_grouped_matmul_refuses(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match="npu_grouped_matmul") as refused:
        multiply(**changed)
    assert said in str(refused.value)


def test_grouped_matmul_takes_at_most_1024_groups() -> None:
    def with_groups(count: int) -> torch.Tensor:
        counts = torch.zeros(count, dtype=INT64)
        counts[-1] = NUM_PAIRS
        return multiply(weight=[torch.ones(count, HIDDEN, 16, dtype=BF16)], group_list=counts)

    assert not with_groups(1024).isnan().any()
    with pytest.raises(ContractError, match="1025 groups, at most 1024"):
        with_groups(1025)


def test_a_float32_weight_stays_as_it_is() -> None:
    float32 = torch.ones(NUM_EXPERTS, HIDDEN, WIDTH)
    x = torch.ones(NUM_PAIRS, HIDDEN)
    assert multiply(x=[x], weight=[float32]).eq(HIDDEN).all()
    with pytest.raises(ContractError, match="a float32 weight must be ND"):
        multiply(x=[x], weight=[cast(float32)])


@pytest.mark.parametrize(
    ("value", "acl_format", "said"),
    [
        (torch.ones(2, 24, 32, dtype=BF16), FRACTAL_NZ, "not whole blocks"),
        (torch.ones(2, 32, 24, dtype=BF16), FRACTAL_NZ, "not whole blocks"),
        (torch.ones(2, 32, 32, dtype=BF16).transpose(1, 2), FRACTAL_NZ, "a contiguous matrix"),
        (torch.ones(32, dtype=BF16), FRACTAL_NZ, "a contiguous matrix"),
        (torch.ones(32, 32, dtype=BF16), 3, "acl_format 3"),
    ],
)
def test_a_format_that_cannot_be(value: torch.Tensor, acl_format: int, said: str) -> None:
    with pytest.raises(ContractError, match="npu_format_cast") as refused:
        cast(value, acl_format)
    assert said in str(refused.value)


def test_only_a_weight_may_have_an_internal_format() -> None:
    blocks = cast(torch.ones(16, HIDDEN, dtype=BF16))
    for call in (
        lambda: swiglu(blocks),
        lambda: multiply(x=[blocks]),
        lambda: route(x=blocks, expert_idx=IDS.repeat(4, 1), active_num=4 * NUM_PAIRS),
    ):
        with pytest.raises(ContractError, match="internal format"):
            call()


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    x = torch.randn(3, 2 * WIDTH)
    gate_half, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(gate_half) * up)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(3, 5), "5 columns cannot be halved"),
        (torch.ones(0, 4), "empty"),
        (torch.ones(4, 4).t(), "not contiguous"),
        (torch.ones(4, 4, dtype=torch.int8), "input is torch.int8"),
    ],
)
def test_swiglu_refuses(value: torch.Tensor, said: str) -> None:
    with pytest.raises(ContractError, match="npu_swiglu") as refused:
        swiglu(value)
    assert said in str(refused.value)


def test_a_tokens_rows_are_weighed_and_added() -> None:
    scales = torch.tensor([[1, 2], [0, 1], [1, 1], [3, 0]], dtype=BF16)
    _, row_of_pair, _, _ = route()
    expected = [1 * 5 + 2 * 0, 7, 6 + 3, 3 * 1]
    given = {"scales": scales, "expanded_src_to_dst_row": row_of_pair}
    assert combine(**given)[:, 0].tolist() == expected
    assert combine_with_holes(**given)[:, 0].tolist() == expected
    unpermuted = unpermute(sorted_indices=row_of_pair, probs=scales)
    assert unpermuted[:, 0].tolist() == expected


def test_a_pair_without_a_row_adds_nothing_whatever_is_undefined() -> None:
    indices = torch.arange(NUM_PAIRS, dtype=INT32)
    indices[[0, 5, 6, 7]] = -1
    rows = rows_of(*[float("nan")], 1, 2, 3, 4, *[float("nan")] * 3)
    given = {"expanded_permuted_rows": rows.view(TOP_K, NUM_TOKENS, HIDDEN)}
    seen = combine_with_holes(expanded_src_to_dst_row=indices, **given)
    assert seen[:, 0].tolist() == [1, 5, 4, 0]


HOLE = torch.arange(-1, NUM_PAIRS - 1, dtype=INT32)


@pytest.mark.parametrize(
    ("call", "changed", "said"),
    [
        (combine, {"expanded_src_to_dst_row": HOLE}, "row index -1, must be at least 0"),
        (combine_with_holes, {"expanded_src_to_dst_row": HOLE - 1}, "row index -2"),
        (combine_with_holes, {"expanded_src_to_dst_row": HOLE + 2}, "row index 8 of 8 rows"),
        (combine, {"expanded_src_to_dst_row": HOLE.long() + 1}, "is torch.int64"),
        (combine, {"expanded_src_to_dst_row": HOLE[:4] + 1}, "4 indices"),
        (combine, {"drop_pad_mode": 0}, "drop_pad_mode 0"),
        (combine, {"drop_pad_mode": 3}, "rows has shape (8, 32)"),
        (combine_with_holes, {"drop_pad_mode": 2}, "rows has shape (2, 4, 32)"),
        (combine, {"expanded_permuted_rows": rows_of(1, 2)}, "2 rows for 8 pairs"),
        (
            combine_with_holes,
            {"expanded_permuted_rows": rows_of(*range(NUM_PAIRS)).view(1, NUM_PAIRS, HIDDEN)},
            "E is 1, must be at least K, 2",
        ),
        (combine, {"scales": torch.ones(NUM_TOKENS, TOP_K)}, "scales is torch.float32"),
        (combine, {"export_for_source_row": IDS - 1}, "an expert below 0"),
        (combine_with_holes, {"export_for_source_row": IDS}, "an expert from E, 2"),
        (combine, {"bias": torch.ones(NUM_EXPERTS, HIDDEN, dtype=BF16)}, "bias given"),
        (unpermute, {"sorted_indices": HOLE.abs()}, "each of 0 to N * K - 1 once"),
        (unpermute, {"padded_mode": True}, "padded_mode"),
    ],
)
def test_combining_refuses(call: Any, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError) as refused:
        call(**changed)
    assert said in str(refused.value)


def test_the_router_takes_the_largest_of_the_softmax() -> None:
    x = torch.randn(NUM_TOKENS, 16)
    weights, experts, rows = gating_top_k_softmax(x, k=3)
    expected = x.softmax(-1).topk(3)
    assert torch.equal(weights, expected.values)
    assert torch.equal(experts.long(), expected.indices)
    assert rows[:, 0].tolist() == list(range(NUM_TOKENS))


@pytest.mark.parametrize("norm_type", [0, 1], ids=["softmax", "sigmoid"])
def test_the_router_stays_in_the_best_groups(norm_type: int) -> None:
    x = torch.full((1, 16), -2.0)
    x[0, [0, 4, 8, 9, 12]] = torch.tensor([5.0, 1.0, 3.5, 3.5, 4.0])
    by_best, by_two = (
        gate(x=x, norm_type=norm_type, group_select_mode=mode, k=3)[1].sort().values.tolist()[0]
        for mode in (0, 1)
    )
    assert {0, 12} <= set(by_best)
    assert by_two == [0, 8, 9], "two experts of 3.5 beat one of 4.0"
    weights, *_ = gate(x=x, norm_type=1, routed_scaling_factor=2.0)
    torch.testing.assert_close(weights.sum(), torch.tensor(2.0))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"renorm": 1}, "renorm 1, only 0"),
        ({"k": 9}, "k 9"),
        ({"k_group": 5}, "k_group 5 of 4"),
        ({"group_count": 3}, "3 groups of 16"),
        ({"group_count": 8}, "2 experts a group"),
        ({"norm_type": 2}, "norm_type 2"),
        ({"bias": torch.ones(15)}, "15 biases"),
        ({"bias": torch.ones(16, dtype=BF16)}, "bias is torch.bfloat16"),
        ({"x": torch.ones(1, 4096), "group_count": 4}, "4096 experts"),
    ],
)
def test_the_router_refuses(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match="npu_moe_gating_top_k") as refused:
        gate(**changed)
    assert said in str(refused.value)


def test_the_plain_router_refuses_more_experts_than_there_are() -> None:
    with pytest.raises(ContractError, match="k 17 of 16"):
        gating_top_k_softmax(torch.ones(1, 16), k=17)
