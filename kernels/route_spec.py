"""What a fused router computes: its parameters, which of them can be fused, checks of its inputs.

model config -> [RouterSpec] -> route_ref.py (the definition), route_triton.py (CUDA)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sgl_esft_kernels.checks import ID_DTYPES, check_tensor, check_where
from sgl_esft_kernels.errors import KernelInputError

MAX_TOP_K = 32
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Added to the sum of a token's weights before they are divided by it: DeepSeek's own gate has it.
RENORMALIZE_EPSILON = 1e-20
# A choice that is NaN or below counts as this, so that every expert has a rank; two can be added.
LOWEST_CHOICE = -1e38


@dataclass(frozen=True)
class RouterSpec:
    """How one model's router turns logits into experts; the names in brackets are SGLang's.

    top_k: columns of the result, fused shared experts included.
    scoring: "softmax" or "sigmoid" (scoring_func).
    has_bias: a correction bias is added to the scores for the choice, not for the weights.
    num_expert_groups, topk_groups: experts lie in groups of equal size, and only those of the
        best groups are chosen from (num_expert_group, topk_group). 1 group = no groups.
        A group's score is its best expert's, with a bias the sum of its best two.
    renormalize: divide the weights by the sum over the routed experts.
    routed_scaling_factor: None = 1. The shared experts' weight is divided by it; the others'
        are multiplied only with scale_output (apply_routed_scaling_factor_on_output).
    num_fused_shared_experts: appended to each token, with expert ids after the routed ones.
    shared_experts_scaling_factor: None = 1; times the shared experts' weight
        (fused_shared_experts_scaling_factor).

    Raises KernelInputError for numbers that no router has.
    """

    top_k: int
    scoring: str = "softmax"
    has_bias: bool = False
    num_expert_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    routed_scaling_factor: float | None = None
    scale_output: bool = False
    num_fused_shared_experts: int = 0
    shared_experts_scaling_factor: float | None = None

    def __post_init__(self) -> None:
        _check_range("num_fused_shared_experts", self.num_fused_shared_experts, 0, self.top_k - 1)
        _check_range("topk_groups", self.topk_groups, 1, self.num_expert_groups)
        _check_factor("routed_scaling_factor", self.routed_scaling_factor)
        _check_factor("shared_experts_scaling_factor", self.shared_experts_scaling_factor)

    @property
    def num_routed(self) -> int:
        """Routed experts a token."""
        return self.top_k - self.num_fused_shared_experts

    @property
    def routed_scale(self) -> float:
        """routed_scaling_factor, 1 where there is none."""
        return 1.0 if self.routed_scaling_factor is None else self.routed_scaling_factor

    @property
    def shared_scale(self) -> float:
        """shared_experts_scaling_factor, 1 where there is none."""
        factor = self.shared_experts_scaling_factor
        return 1.0 if factor is None else factor


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise KernelInputError(f"{name} is {value}, must be in {low}..{high}")


def _check_factor(name: str, factor: float | None) -> None:
    if factor is not None and not (math.isfinite(factor) and factor > 0):
        raise KernelInputError(f"{name} is {factor}, must be finite and above 0, or None")


def unsupported_reason(spec: RouterSpec) -> str | None:
    """Why this router cannot be fused, or None. SGLang's own CUDA path is what must be matched."""
    if spec.scoring not in ("softmax", "sigmoid"):
        return f"scoring {spec.scoring!r}: there are softmax and sigmoid"
    if spec.top_k > MAX_TOP_K:
        return f"{spec.top_k} experts a token: at most {MAX_TOP_K}"
    if spec.scoring == "softmax" and spec.has_bias:
        return "softmax with a correction bias: SGLang's routers ignore one of the two"
    if spec.scale_output and not spec.renormalize:
        return "scaling of weights that are not renormalised: SGLang's routers do not agree on it"
    is_grouped = spec.num_expert_groups > 1
    if is_grouped and spec.has_bias and not spec.renormalize:
        return "biased groups without renormalising: SGLang's router renormalises all the same"
    return _unsupported_shared(spec.num_fused_shared_experts, spec.scoring, is_grouped)


def _unsupported_shared(num_shared: int, scoring: str, is_grouped: bool) -> str | None:
    if num_shared > 0 and scoring == "softmax" and not is_grouped:
        return "shared experts after an ungrouped softmax: SGLang's routers do not agree on them"
    if num_shared > 1 and is_grouped:
        return (
            f"{num_shared} fused shared experts with groups: SGLang's routers do not agree on "
            "their ids; one is supported"
        )
    return None


def check_route_inputs(
    router_logits: torch.Tensor,
    token_adapter_slots: torch.Tensor,
    expert_map: torch.Tensor,
    spec: RouterSpec,
    correction_bias: torch.Tensor | None,
    num_token_non_padded: torch.Tensor | None,
    where: torch.Tensor | None,
) -> None:
    """What route_ref.py says of the inputs, for every implementation. Raises KernelInputError."""
    device = expert_map.device
    check_tensor(router_logits, "router_logits", ndim=2, dtypes=LOGIT_DTYPES, device=device)
    check_tensor(
        token_adapter_slots, "token_adapter_slots", ndim=1, dtypes=(torch.int32,), device=device
    )
    check_tensor(expert_map, "expert_map", ndim=2, dtypes=(torch.int32,), device=device)
    num_tokens, num_experts = router_logits.shape
    _check_same("tokens", "token_adapter_slots", token_adapter_slots.shape[0], num_tokens)
    _check_same(
        "columns", "expert_map", expert_map.shape[1], num_experts + spec.num_fused_shared_experts
    )
    if expert_map.shape[0] == 0:
        raise KernelInputError("expert_map has no rows, must have the base's")
    _check_groups(spec, num_experts)
    _check_bias(correction_bias, spec, num_experts, device)
    _check_count(num_token_non_padded, device)
    if where is not None:
        check_where(where, device)


def _check_same(what: str, name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise KernelInputError(f"{name} has {found} {what}, must have {wanted}")


def _check_groups(spec: RouterSpec, num_experts: int) -> None:
    """The spec's groups and choices against the number of routed experts."""
    group_size, rest = divmod(num_experts, spec.num_expert_groups)
    if rest:
        raise KernelInputError(
            f"{num_experts} experts do not divide into {spec.num_expert_groups} groups"
        )
    if spec.has_bias and spec.num_expert_groups > 1 and group_size < 2:
        raise KernelInputError("groups of one expert have no best two: leave num_expert_groups 1")
    _check_range("routed experts a token", spec.num_routed, 1, spec.topk_groups * group_size)


def _check_bias(
    correction_bias: torch.Tensor | None, spec: RouterSpec, num_experts: int, device: torch.device
) -> None:
    if (correction_bias is not None) != spec.has_bias:
        raise KernelInputError(
            f"correction_bias is {'missing' if spec.has_bias else 'given'}, "
            f"the router's has_bias is {spec.has_bias}"
        )
    if correction_bias is not None:
        check_tensor(correction_bias, "correction_bias", ndim=1, dtypes=LOGIT_DTYPES, device=device)
        _check_same("experts", "correction_bias", correction_bias.shape[0], num_experts)


def _check_count(num_token_non_padded: torch.Tensor | None, device: torch.device) -> None:
    if num_token_non_padded is None:
        return
    count = num_token_non_padded.view(-1)
    check_tensor(count, "num_token_non_padded", ndim=1, dtypes=ID_DTYPES, device=device)
    _check_same("values", "num_token_non_padded", count.shape[0], 1)
