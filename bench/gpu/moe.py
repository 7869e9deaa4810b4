"""How a GPU computes a MoE layer, for bench/gpu/run.py: each method the same on any kind of memory.

    Batch (which tokens go to which slots) -> method -> function of a layer
    hidden states, weights, slot ids -> [experts_here] -> hidden states, inside a CUDA graph

Which slots a method reads: those that tokens go to, or the base's. A slot without memory is never
one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bench.kernels.moe_layer import Batch, cpu_forward
from sgl_esft.ports import pick_free_port
from sgl_esft.weave.moe_layer import WovenLayer

# What SGLang may raise where it is half installed, or is another version than the one tried.
_CANNOT = (
    ImportError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

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
    compute = _sglang_experts()
    return lambda layer: compute(
        batch.hidden, batch.topk_weights, batch.slot_ids, layer.w13, layer.w2
    )


@dataclass(frozen=True)
class Experts:
    """What computes a layer's experts inside a graph: any routing, no waiting for the host.

    compute: (hidden [num_tokens, H], topk_weights and slot_ids [num_tokens, k],
    w13 [num_slots, 2I, H], w2 [num_slots, H, I]) -> [num_tokens, H].
    """

    name: str
    compute: Callable[..., torch.Tensor]


def experts_here() -> Experts:
    """SGLang's kernel where it runs, else torch's grouped matmul; the name says why."""
    if not torch.cuda.is_available():
        return Experts("torch grouped_mm (no GPU)", grouped_experts)
    try:
        return Experts("sglang fused_experts", _tried(_sglang_experts()))
    except _CANNOT as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        return Experts(f"torch grouped_mm (SGLang: {reason})", grouped_experts)


def _tried(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`compute` after it has answered once, on a small layer."""
    hidden, w13, w2 = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((2, 64), (4, 128, 64), (4, 64, 64))
    )
    slot_ids = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    compute(hidden, slot_ids.float(), slot_ids, w13, w2)
    torch.cuda.synchronize()
    return compute


def _sglang_experts() -> Callable[..., torch.Tensor]:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    _be_a_server()
    config = MoeRunnerConfig(inplace=False)

    def compute(
        hidden: torch.Tensor,
        topk_weights: torch.Tensor,
        slot_ids: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        topk = StandardTopKOutput(topk_weights, slot_ids, topk_weights)
        return fused_experts(hidden, w13, w2, topk, config)

    return compute


@functools.cache
def _be_a_server() -> None:
    """SGLang's kernels ask for a server's arguments and for its groups, of one rank here."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{pick_free_port()}",
        backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    initialize_model_parallel()


def grouped_experts(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    slot_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """As `grouped_mm`, with the alignment inside: sort by slot, two grouped matmuls, weighted sum.

    Every slot id must be a slot; the sum's order is that of k, so a moved expert changes no bit.
    """
    num_tokens, top_k = slot_ids.shape
    slots, order = slot_ids.reshape(-1).sort(stable=True)
    every_slot = torch.arange(w13.shape[0], device=slots.device, dtype=slots.dtype)
    ends = torch.searchsorted(slots, every_slot, right=True, out_int32=True)
    gate, up = torch._grouped_mm(hidden[order // top_k], w13.transpose(-2, -1), offs=ends).chunk(
        2, -1
    )
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends)
    by_token = torch.empty_like(out).index_copy_(0, order, out).view(num_tokens, top_k, -1)
    return (by_token * topk_weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


METHODS: dict[str, Callable[[Batch], Forward]] = {
    "sglang fused_experts": sglang_fused_experts,
    "torch grouped_mm": grouped_mm,
    "torch bmm over the base": batched_mm,
    "by slot": by_slot,
}
