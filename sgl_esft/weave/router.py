"""Rerouting inside the router: SGLang's top-k and the lookup in the expert map, as one kernel.

    router logits -> [FusedRouter] -> weights, slot ids -> SGLang's dispatch, experts and combine

For `--reroute router`. It computes what `sglang.srt.layers.moe.topk.select_experts` computes for
the models that are woven; what it does not know is refused when the model has been loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_esft.errors import UnsupportedDeviceError, UnsupportedModelError
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_map import ExpertMap
from sgl_esft_kernels import (
    KernelInputError,
    KernelUnavailableError,
    RouterFunction,
    RouterSpec,
    check_map_height,
    choose_router,
    unsupported_reason,
)

# Parts of SGLang's TopKConfig that change what the router computes and that no spec has.
_FOREIGN = {
    "custom_routing_function": None,
    "fused_gate_packed_ids": False,
    "sqrtsoftplus_log1p": False,
}


class FusedRouter:
    """One layer's step from router logits to weights and slot ids."""

    def __init__(
        self, topk_config: Any, expert_map: ExpertMap, tags: BatchTags, route: RouterFunction
    ) -> None:
        """Raises UnsupportedModelError for a router that the kernel does not compute."""
        check_map_height(expert_map.table, expert_map.num_rows - 1)
        self.spec = spec_of(topk_config)
        self._bias = topk_config.correction_bias
        self._table = expert_map.table
        self._tags = tags
        self._route = route

    def __call__(
        self, router_logits: torch.Tensor, num_token_non_padded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, M] logits -> weights float32 and slot ids int32, both [num_tokens, k]."""
        tags = self._tags.token_adapter_slots(router_logits.shape[0])
        return self._route(
            router_logits.contiguous(),
            tags,
            self._table,
            self.spec,
            correction_bias=self._bias,
            num_token_non_padded=num_token_non_padded,
        )


def load_router(device: torch.device) -> RouterFunction:
    """The fused router of a device. Raises UnsupportedDeviceError where there is none."""
    try:
        return choose_router(device.type)
    except KernelUnavailableError as error:
        raise UnsupportedDeviceError(f"--reroute router: {error}") from error


def spec_of(topk_config: Any) -> RouterSpec:
    """SGLang's TopKConfig as the kernel's spec. Raises UnsupportedModelError."""
    for name, value in _FOREIGN.items():
        if getattr(topk_config, name) != value:
            raise UnsupportedModelError(
                f"--reroute router does not compute a router with {name} "
                f"{getattr(topk_config, name)!r}: use --reroute fused"
            )
    spec = _as_spec(topk_config)
    reason = unsupported_reason(spec)
    if reason is not None:
        raise UnsupportedModelError(f"--reroute router: {reason}; use --reroute fused")
    return spec


def _as_spec(topk_config: Any) -> RouterSpec:
    is_grouped = bool(topk_config.use_grouped_topk)
    try:
        return RouterSpec(
            top_k=topk_config.top_k,
            scoring=topk_config.scoring_func,
            num_expert_groups=topk_config.num_expert_group if is_grouped else 1,
            topk_groups=topk_config.topk_group if is_grouped else 1,
            renormalize=topk_config.renormalize,
            routed_scaling_factor=topk_config.routed_scaling_factor,
            scale_output=topk_config.apply_routed_scaling_factor_on_output,
            has_bias=topk_config.correction_bias is not None,
            num_fused_shared_experts=topk_config.num_shared_topk_slots,
            shared_experts_scaling_factor=topk_config.fused_shared_experts_scaling_factor,
        )
    except KernelInputError as error:
        raise UnsupportedModelError(f"--reroute router: {error}; use --reroute fused") from error
