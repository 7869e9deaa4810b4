"""Kernels that a graph can hold, in place of three that exist for accelerators only.

    a decode step's attention       SGLang's Triton kernel; torch_native loops over lengths
    the experts of a MoE layer      SGLang's Triton kernel; the CPU platform's loops over experts
    a rank's rows of the DP buffer  SGLang's Triton kernel; the CPU platform's slices by values

What the CPU has for them looks at values on the host, which no captured kernel may. These compute
the same from tensors alone, for every shape that a graph is captured for.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from sgl_esft.platform.moe import PlainExperts
from tests.support.graph_simulator import is_current_stream_capturing

CONTEXT = 64  # tokens that a request has at most


def install(runner: Any, *, own_experts: bool) -> None:
    """For the life of the process. own_experts: the experts' kernel is left as it is."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sgl_esft.platform import moe
    from sgl_esft.weave import heat

    TorchNativeAttnBackend._run_sdpa_forward_decode = attend  # type: ignore[method-assign]
    TorchNativeAttnBackend.init_cuda_graph_state = lambda *_: None  # type: ignore[method-assign]
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda _: 1
    if not own_experts:
        mock.patch.object(moe, "weighted_sum", weighted_sum).start()
    # It asks CUDA's tensors only, and there are none here.
    mock.patch.object(heat, "_is_capturing", is_capturing).start()
    mock.patch.object(dp_attention, "memcpy_func", copy_rows).start()


def is_capturing(tensor: torch.Tensor) -> bool:
    return is_current_stream_capturing()


def attend(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *_: Any,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **__: Any,
) -> torch.Tensor:
    """query, output: [num_requests, heads, size]. The cache's rows beyond a request are masked."""
    rows = req_to_token[req_pool_indices, :CONTEXT].to(torch.int64)
    mask = torch.arange(CONTEXT) < seq_lens[:, None]
    # A kernel does not read those; here a weight of 0 would be multiplied by what they hold.
    beyond = ~mask[:, :, None, None]
    found = F.scaled_dot_product_attention(
        query[:, :, None],
        k_cache[rows].masked_fill(beyond, 0).transpose(1, 2),
        v_cache[rows].masked_fill(beyond, 0).transpose(1, 2),
        attn_mask=mask[:, None, None],
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    return output.copy_(found[:, :, 0])


def weighted_sum(
    hidden_states: torch.Tensor,
    experts: PlainExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """sgl_esft.platform.moe.weighted_sum; id -1 adds nothing."""
    slots = topk_ids.to(torch.int64).clamp(min=0)
    gate, up = torch.einsum("th,tkih->tki", hidden_states, experts.w13[slots]).chunk(2, dim=-1)
    found = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, experts.w2[slots])
    weights = topk_weights.masked_fill(topk_ids < 0, 0)
    return torch.einsum("tkh,tk->th", found.to(weights.dtype), weights).to(hidden_states.dtype)


def copy_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    sz: torch.Tensor,
    offset_src: bool,
) -> None:
    """SGLang's memcpy: `sz` rows, from `offset` on in src or in dst."""
    place = torch.arange(dst.shape[0])
    source = place + offset if offset_src else place - offset
    is_copied = (place < sz) if offset_src else (source >= 0) & (source < sz)
    rows = src[source.clamp(0, src.shape[0] - 1)]
    shape = (-1, *(1 for _ in dst.shape[1:]))
    dst.copy_(torch.where(is_copied.view(shape), rows, dst))
