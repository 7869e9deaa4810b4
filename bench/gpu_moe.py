"""How a GPU computes a MoE layer, for bench/gpu.py: each method the same on any kind of memory.

    Batch (which tokens go to which slots) -> method -> function of a layer

Which slots a method reads: those that tokens go to, or the base's. A slot without memory is never
one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.moe_layer import Batch, cpu_forward
from sgl_esft.moe_layer import WovenLayer

Forward = Callable[[WovenLayer], torch.Tensor]


def by_slot(batch: Batch) -> Forward:
    """The CPU platform's forward; on a GPU it waits for the host between slots."""
    return lambda layer: cpu_forward(layer, batch)


def grouped_mm(batch: Batch) -> Forward:
    """One grouped matmul of torch over all slots for each of the two weights."""
    flat = batch.slot_ids.reshape(-1).long()
    order = flat.argsort(stable=True)
    rows = batch.hidden[order // batch.slot_ids.shape[1]]

    def forward(layer: WovenLayer) -> torch.Tensor:
        counts = torch.bincount(flat, minlength=layer.w13.shape[0])
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, layer.w13.transpose(-2, -1), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, layer.w2.transpose(-2, -1), offs=ends)

    return forward


def batched_mm(batch: Batch) -> Forward:
    """Batched matmuls over the base's slots, every token at each."""

    def forward(layer: WovenLayer) -> torch.Tensor:
        base = slice(0, layer.layout.num_base)
        rows = batch.hidden.expand(layer.layout.num_base, -1, -1)
        gate, up = torch.bmm(rows, layer.w13[base].transpose(1, 2)).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, layer.w2[base].transpose(1, 2))

    return forward


def sglang_fused_experts(batch: Batch) -> Forward:
    """SGLang's Triton kernel, as a server runs it. Raises ImportError where SGLang is not."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    topk = StandardTopKOutput(batch.topk_weights, batch.slot_ids, batch.topk_weights)
    config = MoeRunnerConfig(inplace=False)
    return lambda layer: fused_experts(batch.hidden, layer.w13, layer.w2, topk, config)


METHODS: dict[str, Callable[[Batch], Forward]] = {
    "sglang fused_experts": sglang_fused_experts,
    "torch grouped_mm": grouped_mm,
    "torch bmm over the base": batched_mm,
    "by slot": by_slot,
}
