"""Where SGLang's LoRA asks for an accelerator on every device: pinned memory, and a kernel for MLA.

    layers are wrapped --[Unpinned]--> nothing is pinned

    q_nope w_kc --> [apply_q_correction] --> attention --> w_vc --> [apply_v_correction]

Under absorbed MLA kv_b_proj itself is never called: its two halves are products of their own, and
SGLang adds LoRA's part to them by a Triton kernel. The two functions here stand for those that
launch it; hook_table.py says where each one goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def apply_q_correction(
    attn_module: Any, q_nope: torch.Tensor, q_nope_out: torch.Tensor
) -> torch.Tensor:
    """q_nope_out [num_tokens, heads, kv_rank] += scaling * (q_nope B_k) A, in place.

    q_nope [num_tokens, heads, nope].
    """
    layer, nope = attn_module.kv_b_proj, attn_module.qk_nope_head_dim
    for group, keys_values in _halves(attn_module):
        inner = torch.einsum("thn,hnr->thr", q_nope[group.rows], keys_values[:, :nope])
        q_nope_out[group.rows] += inner * group.scaling @ layer.A_buffer[group.slot, : group.rank]
    return q_nope_out


def apply_v_correction(
    attn_module: Any, attn_output: torch.Tensor, attn_bmm_flat: torch.Tensor
) -> torch.Tensor:
    """attn_bmm_flat [num_tokens, heads * value] += scaling * (attn_output A^T) B_v^T, in place.

    attn_output [num_tokens, heads, kv_rank].
    """
    layer, nope = attn_module.kv_b_proj, attn_module.qk_nope_head_dim
    by_head = attn_bmm_flat.view(-1, attn_module.num_local_heads, attn_module.v_head_dim)
    for group, keys_values in _halves(attn_module):
        inner = attn_output[group.rows] @ layer.A_buffer[group.slot, : group.rank].T
        by_head[group.rows] += torch.einsum(
            "thr,hvr->thv", inner * group.scaling, keys_values[:, nope:]
        )
    return attn_bmm_flat


def _halves(attn_module: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each adapter's rows, and its B as [heads, nope + value, rank]."""
    layer = attn_module.kv_b_proj
    batch = layer.lora_backend.batch_info
    width = attn_module.qk_nope_head_dim + attn_module.v_head_dim
    groups: Any = () if batch is None else batch.groups
    for group in groups:
        of_slot = layer.B_buffer[group.slot, :, : group.rank]
        yield group, of_slot.view(attn_module.num_local_heads, width, group.rank)


class Unpinned(TorchFunctionMode):
    """While it is entered, nothing is pinned: SGLang's LoRA layers ask for it on every device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return args[0] if func is torch.Tensor.pin_memory else func(*args, **kwargs)
