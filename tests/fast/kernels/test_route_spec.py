"""Routers that there are not, routers that are not fused, and inputs that do not fit a router."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_esft_kernels import KernelInputError
from sgl_esft_kernels.route_ref import route_and_reroute
from sgl_esft_kernels.route_spec import RouterSpec, unsupported_reason
from tests.fast.kernels.routers import DEEPSEEK_V3, Router


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "num_fused_shared_experts is 0, must be in 0..-1"),
        ({"top_k": 2, "num_fused_shared_experts": 2}, "num_fused_shared_experts is 2"),
        ({"top_k": 2, "num_fused_shared_experts": -1}, "num_fused_shared_experts is -1"),
        (
            {"top_k": 2, "num_expert_groups": 4, "topk_groups": 5},
            "topk_groups is 5, must be in 1..4",
        ),
        ({"top_k": 2, "num_expert_groups": 0}, "topk_groups is 1, must be in 1..0"),
        ({"top_k": 2, "routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0"),
        ({"top_k": 2, "shared_experts_scaling_factor": float("nan")}, "scaling_factor is nan"),
    ],
)
def test_numbers_that_no_router_has_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        RouterSpec(**fields)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (RouterSpec(2, "sqrtsoftplus"), "scoring 'sqrtsoftplus'"),
        (RouterSpec(33), "33 experts a token"),
        (RouterSpec(2, has_bias=True), "softmax with a correction bias"),
        (RouterSpec(2, renormalize=False, scale_output=True), "not renormalised"),
        (RouterSpec(2, "sigmoid", True, 4, 2, renormalize=False), "biased groups"),
        (RouterSpec(3, num_fused_shared_experts=1), "after an ungrouped softmax"),
        (RouterSpec(4, "sigmoid", True, 4, 2, num_fused_shared_experts=2), "2 fused shared"),
    ],
)
def test_routers_that_are_not_fused_have_a_reason(spec: RouterSpec, reason: str) -> None:
    found = unsupported_reason(spec)
    assert found is not None
    assert reason in found


def changed(router: Router, **changes: Any) -> dict[str, Any]:
    names = ("router_logits", "token_adapter_slots", "expert_map", "spec")
    names += ("correction_bias", "num_token_non_padded")
    return dict(zip(names, router.make(), strict=True)) | changes


V3 = Router("deepseek-v3", 256, DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_logits": torch.zeros(9, 256).double()}, "router_logits is torch.float64"),
        ({"router_logits": torch.zeros(256, 9).t()}, "router_logits has strides"),
        ({"router_logits": torch.zeros(9, 250)}, "expert_map has 256 columns, must have 250"),
        ({"token_adapter_slots": torch.zeros(8, dtype=torch.int32)}, "has 8 tokens, must have 9"),
        ({"token_adapter_slots": torch.zeros(9)}, "token_adapter_slots is torch.float32"),
        ({"expert_map": torch.zeros(4, 256)}, "expert_map is torch.float32"),
        ({"expert_map": torch.zeros(0, 256, dtype=torch.int32)}, "expert_map has no rows"),
        ({"correction_bias": None}, "correction_bias is missing"),
        ({"correction_bias": torch.zeros(255)}, "correction_bias has 255 experts"),
        ({"correction_bias": torch.zeros(256, device="meta")}, "correction_bias is on meta"),
        ({"spec": RouterSpec(8)}, "correction_bias is given"),
        ({"spec": RouterSpec(8, "sigmoid", True, 7, 4)}, "do not divide into 7 groups"),
        ({"spec": RouterSpec(8, "sigmoid", True, 256, 8)}, "groups of one expert"),
        ({"spec": RouterSpec(33, "sigmoid", True, 8, 1)}, "routed experts a token is 33"),
        ({"spec": RouterSpec(8, "tanh", True)}, "scoring is 'tanh'"),
        ({"where": torch.zeros(4)}, "where is torch.float32"),
        ({"where": torch.zeros(4, 1, dtype=torch.int32)}, "where has 2 dimensions"),
        ({"where": torch.zeros(8, dtype=torch.int32)[::2]}, "where has strides"),
        ({"where": torch.zeros(4, dtype=torch.int32, device="meta")}, "where is on meta"),
        ({"where": torch.zeros(0, dtype=torch.int32)}, "where has no slots"),
        ({"num_token_non_padded": torch.tensor([1, 2])}, "num_token_non_padded has 2 values"),
        ({"num_token_non_padded": torch.tensor(1.0)}, "num_token_non_padded is torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        route_and_reroute(**changed(V3, **changes))
