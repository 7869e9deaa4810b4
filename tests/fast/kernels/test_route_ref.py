"""The fused router's definition against SGLang's own routers in plain torch, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from sglang.srt.layers.moe import topk as sglang_topk

from sgl_esft_kernels import NOT_HERE, KernelInputError, reroute_unfused
from sgl_esft_kernels.route_ref import route_and_reroute, select_experts
from sgl_esft_kernels.route_spec import RouterSpec
from tests.fast.kernels.routers import ROUTERS, Router

# What SGLang has in plain torch: the ids of one shared expert at most.
IN_SGLANG = [each for each in ROUTERS if each.spec.num_fused_shared_experts <= 1]


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def by_sglang(
    logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and expert ids of the function that SGLang has for this router."""
    common = {"hidden_states": logits, "gating_output": logits, "topk": spec.top_k}
    common["renormalize"] = spec.renormalize
    if spec.num_expert_groups == 1:
        return sglang_topk.fused_topk_torch_native(
            **common, correction_bias=bias, scoring_func=spec.scoring
        )
    grouped = {
        "num_expert_group": spec.num_expert_groups,
        "topk_group": spec.topk_groups,
        "num_fused_shared_experts": spec.num_fused_shared_experts,
        "routed_scaling_factor": spec.routed_scaling_factor,
        "apply_routed_scaling_factor_on_output": spec.scale_output,
    }
    if bias is None:
        return sglang_topk.grouped_topk_gpu(**common, **grouped, scoring_func=spec.scoring)
    return sglang_topk.biased_grouped_topk_impl(**common, **grouped, correction_bias=bias)


def sorted_by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang does not say in which order a token's experts come."""
    order = ids.argsort(dim=1)
    return weights.gather(1, order), ids.gather(1, order)


@pytest.mark.parametrize("router", IN_SGLANG, ids=str)
def test_chooses_and_weighs_like_sglang(router: Router) -> None:
    logits, tags, table, spec, bias, _ = router.with_tokens(133).make()
    spec = replace(spec, shared_experts_scaling_factor=None)
    theirs_weights, theirs_ids = sorted_by_id(*by_sglang(logits, spec, bias))
    weights, ids = sorted_by_id(*select_experts(logits, spec, bias))
    assert torch.equal(ids, theirs_ids.to(torch.int32))
    torch.testing.assert_close(weights, theirs_weights.float(), rtol=2e-6, atol=1e-8)
    _, expert_ids = select_experts(logits, spec, bias)
    _, slot_ids = route_and_reroute(logits, tags, table, spec, bias)
    assert torch.equal(slot_ids, reroute_unfused(expert_ids, tags, table))


def test_a_small_batch_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.0], [3.0, 3.0, 0.0, 3.0], [9.0, 0.0, 0.0, 0.0]]).log()
    table = torch.tensor([[0, 4, 2, 3, 6], [0, 1, 5, -1, 6], [0, 1, 2, 3, 6]], dtype=torch.int32)
    tags = torch.tensor([0, 1, -1], dtype=torch.int32)
    spec = RouterSpec(3, num_fused_shared_experts=1, routed_scaling_factor=4.0)
    weights, slot_ids = route_and_reroute(
        logits, tags, table, spec, num_token_non_padded=torch.tensor(2)
    )
    assert slot_ids.tolist() == [[2, 4, 6], [0, 1, 6], [-1, -1, -1]]
    expected = torch.tensor([[2 / 3, 1 / 3, 1 / 4], [1 / 2, 1 / 2, 1 / 4], [0, 0, 0]])
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_with_where_a_slot_becomes_its_row(router: Router) -> None:
    arguments = router.make()
    weights, slot_ids = route_and_reroute(*arguments)
    where = torch.full((arguments[2].numel(),), NOT_HERE, dtype=torch.int32)
    asked = slot_ids[slot_ids >= 0].unique().long()
    where[asked] = torch.arange(len(asked), dtype=torch.int32)
    same_weights, rows = route_and_reroute(*arguments, where=where)
    assert torch.equal(weights, same_weights)
    expected = [[int(where[slot]) if slot >= 0 else -1 for slot in each] for each in slot_ids]
    assert rows.tolist() == expected
    if len(asked):
        where[asked[0]] = NOT_HERE
        with pytest.raises(KernelInputError, match=f"its slot {asked[0]} is not here"):
            route_and_reroute(*arguments, where=where)


def test_of_equal_experts_and_groups_the_lowest_wins() -> None:
    grouped = RouterSpec(3, num_expert_groups=4, topk_groups=2)
    assert select_experts(torch.zeros(1, 12), RouterSpec(3), None)[1].tolist() == [[0, 1, 2]]
    assert select_experts(torch.zeros(1, 12), grouped, None)[1].tolist() == [[0, 1, 2]]
    logits = torch.tensor([[1.0, 0.0, 0.0, -0.0, 1.0, 1.0]])
    assert select_experts(logits, RouterSpec(5), None)[1].tolist() == [[0, 4, 5, 1, 2]]


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.tensor([[2.0, 0.0, -2.0]]), torch.tensor([0.0, 0.0, 5.0])
    weights, ids = select_experts(logits, RouterSpec(1, "sigmoid", True, renormalize=False), bias)
    assert ids.tolist() == [[2]]
    assert weights.item() == torch.tensor(-2.0).sigmoid().item()


def test_what_is_no_number_is_chosen_last() -> None:
    logits = torch.tensor([[float("nan"), -1e30, float("-inf"), 1.0]])
    assert select_experts(logits, RouterSpec(4), None)[1].tolist() == [[3, 1, 0, 2]]
