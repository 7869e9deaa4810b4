"""Weaving on Ascend: SGLang's core for NPUs over slots, through its own doors; no hook.

    MoeRunner --> [make_runner_core]: SGLang's own core, over weights that stay where they are
    plugin/runner_core.py --> [over_ascend]: SGLang's AscendTPDispatcher and core, told of slots

SGLang routes before its runner core there: tokens come to the core sorted, with a count for each
expert. So its dispatcher goes to work after rerouting: the layer gets a `StandardDispatcher`, which
leaves tokens as they are, and the inner core asks the device's. What its operators are asked for is
in their documents (docs/ascend.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import PermuteMethodPool
from sglang.srt.layers.moe.token_dispatcher.ascend_tp import AscendTPDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatcher,
)
from sglang.srt.runtime_context import get_parallel

from sgl_esft.errors import UnsupportedModelError
from sgl_esft.weave import page_source
from sgl_esft.weave.slot_layout import SlotLayout

MAX_GROUPS = 1024  # npu_grouped_matmul: groups of one weight tensor
_DTYPES = (torch.bfloat16, torch.float16)  # SGLang's core asks for one of them as its output
_ROWS_BY_TOKEN_WITH_HOLES = 3  # npu_moe_finalize_routing's only mode by token that takes -1


def make_runner_core(config: Any) -> Any:
    """SGLang's core for a layer that it is just making; a woven one keeps its weights as they are.

    Raises UnsupportedModelError for a woven layer that NPUs cannot compute, or were not shown to.
    """
    from sglang.srt.layers.moe.moe_runner.ascend import AscendRunnerCore

    core = AscendRunnerCore(config)
    layer = config.layer
    layout = getattr(layer, "esft_layout", None)
    if layout is not None:
        _check_woven(layer, layout, core)
        layer.w13_kernel = UncastExperts(layer.w13_kernel)
        layer.w2_kernel = UncastExperts(layer.w2_kernel)
    return core


def _check_woven(layer: Any, layout: SlotLayout, core: Any) -> None:
    where = f"MoE layer {layer.layer_id} on Ascend"
    if layout.num_slots > MAX_GROUPS:
        raise UnsupportedModelError(
            f"{where}: {layout.num_slots} slots, its grouped matmul takes {MAX_GROUPS}: lower "
            "--max-adapters or --max-experts-per-adapter"
        )
    if layer.params_dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{where}: experts of {layer.params_dtype}: SGLang computes them in bfloat16 or "
            "float16 there; choose one by --dtype"
        )
    activation = type(core.activation).__name__
    if activation != "NPUSwiglu":
        raise UnsupportedModelError(f"{where}: activation {activation}: only SiLU was shown")


@dataclass(frozen=True)
class UncastExperts:
    """SGLang's kernel of w13 or w2, without its cast of the weights to blocks (FRACTAL_NZ).

    The cast reads all slots, those without memory too, and puts the weights elsewhere; an adapter
    that comes later is copied in as rows.
    """

    kernel: Any

    def process_weights_after_loading(self, layer: Any, weight_prefix: str) -> None:
        """Only what SGLang does beside the cast."""
        if weight_prefix == "w13":
            layer.dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return self.kernel.apply(*args, **kwargs)


@dataclass(frozen=True)
class SlotRouting:
    """Where the dispatcher has SGLang's init routing: rows are sorted by slot, not by expert."""

    num_slots: int

    def _init_routing(
        self, hidden_states: torch.Tensor, slot_ids: torch.Tensor, num_experts: int, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """hidden_states [N, H], slot_ids [N, K] int32, -1 = another rank's, or no expert.

        Returns rows [N * K, H], of which those of pairs that are computed here are defined; row of
        each pair [N * K] int32, -1 = not computed here; rows of each slot [num_slots] int64.
        """
        # The operator has no meaning for a negative id: those get one outside the active range.
        slot_ids = slot_ids.masked_fill(slot_ids < 0, self.num_slots)
        rows, row_of_pair, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            hidden_states,
            slot_ids,
            active_num=slot_ids.numel(),
            expert_num=self.num_slots + 1,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, self.num_slots],
            quant_mode=-1,
        )
        return rows, row_of_pair, counts.to(torch.int64), None


class SlotCombine:
    """Where the dispatcher has SGLang's finalize routing: a pair without a row adds nothing."""

    def _finalize_routing(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        expanded_row_idx: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        """hidden_states [N * K, H], topk_weights [N, K], expanded_row_idx [N * K], -1 = no row."""
        num_tokens, top_k = topk_weights.shape
        result: torch.Tensor = torch.ops.npu.npu_moe_finalize_routing(
            hidden_states.view(top_k, num_tokens, -1),  # [E, C, H], of which it uses E * C
            skip1=None,
            skip2=None,
            bias=None,
            scales=topk_weights,
            expanded_src_to_dst_row=expanded_row_idx,
            export_for_source_row=None,  # only a bias is found by it
            drop_pad_mode=_ROWS_BY_TOKEN_WITH_HOLES,
        )
        return result


def over_ascend(
    module: Any, core: Any, layout: SlotLayout
) -> Callable[[Any, Any], StandardCombineInput]:
    """SGLang's dispatcher and core for NPUs, told of slots. Raises UnsupportedModelError."""
    _check_shown(module)
    device = module.dispatcher
    device.init, device.finalize = SlotRouting(layout.num_slots), SlotCombine()
    module.dispatcher = StandardDispatcher(core.config)
    permute = PermuteMethodPool.get_pre_permute("ascend_tp", "ascend")
    unpermute = PermuteMethodPool.get_post_permute("ascend", "ascend_tp")

    def run(dispatch_output: Any, weights: Any) -> StandardCombineInput:
        state: dict[str, Any] = {}
        routed = device.dispatch(dispatch_output.hidden_states, dispatch_output.topk_output)
        rows = permute(routed, weights, core.config, state)
        computed = core.run(rows, weights, state)
        combined = device.combine(unpermute(computed, weights, core.config, state))
        return StandardCombineInput(hidden_states=combined)

    return run


def _check_shown(module: Any) -> None:
    where = f"MoE layer {module.layer_id} on Ascend"
    if not isinstance(module.dispatcher, AscendTPDispatcher):
        raise UnsupportedModelError(
            f"{where}: dispatcher {type(module.dispatcher).__name__}: weaving works with "
            "--moe-a2a-backend none"
        )
    if not isinstance(module.w13_kernel, UncastExperts):
        raise UnsupportedModelError(
            f"{where}: SGLang did not ask for our runner core, so it has cast the weights: this "
            "SGLang cannot be woven there"
        )
    if get_parallel().attn_dp_enabled:
        raise UnsupportedModelError(f"{where}: --attn-dp-size was not shown there; use TP and EP")
    if page_source.current() is not None:
        raise UnsupportedModelError(f"{where}: --elastic was not shown there; leave it out")
