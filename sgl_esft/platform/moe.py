"""The MoE layer of the CPU reference platform: visit only the experts a batch touches.

    topk_ids -> rows grouped by slot -> [Experts.compute] for each touched slot -> weighted sum

It finds an expert by its row in the weight, so an adapter's slot is an expert
like any other, and it skips id -1 (another rank's expert, or a padding row).
Experts that are quantised: quantised_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch.nn import functional as F

from sgl_esft.errors import UnsupportedModelError

FAILED: Final = -1  # a row: the slot's weights could not be had
# slots that are needed, ascending -> (slot, its row of w13 and w2 or FAILED), each slot once, in
# the order in which they can be computed; asking for the next says that the last is computed
Arrivals = Callable[[Sequence[int]], Iterable[tuple[int, int]]]


class Experts(Protocol):
    """One layer's experts on this rank, each in a row of its tensors."""

    def compute(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """The expert in this row, of x [n, H], contiguous: [n, H] in the dtype of x."""


@dataclass(frozen=True)
class PlainExperts:
    """Experts without quantisation, in the dtype of their input.

    w13 [num_rows, 2I, H], gate rows, then up rows; w2 [num_rows, H, I].
    """

    w13: torch.Tensor
    w2: torch.Tensor

    def compute(self, x: torch.Tensor, row: int) -> torch.Tensor:
        gate, up = F.linear(x, self.w13[row]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w2[row])


def moe_forward(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    arrivals: Arrivals | None = None,
) -> torch.Tensor:
    """`weighted_sum` over experts without quantisation: w13 [num_rows, 2I, H] (gate rows, then up
    rows), w2 [num_rows, H, I].
    """
    experts = PlainExperts(w13, w2)
    return weighted_sum(hidden_states, experts, topk_weights, topk_ids, arrivals)


def weighted_sum(
    hidden_states: torch.Tensor,
    experts: Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    arrivals: Arrivals | None = None,
) -> torch.Tensor:
    """Sum over k of ``topk_weights[t, k] * expert[topk_ids[t, k]](hidden_states[t])``.

    hidden_states [num_tokens, H]; topk_weights, topk_ids [num_tokens, k], id -1 = skip.
    Returns [num_tokens, H] in the dtype of hidden_states. The order of a token's
    sum is the order of its k, whatever the slots' numbers are and whenever they arrive, so moving
    an expert to another slot leaves every bit as it was. A token with an expert that FAILED is NaN:
    it must not pass for an answer.
    """
    num_tokens, top_k = topk_ids.shape
    flat_ids = topk_ids.reshape(-1)
    expert_out = hidden_states.new_zeros((num_tokens * top_k, hidden_states.shape[1]))
    order = flat_ids.argsort(stable=True)
    slots, counts = flat_ids[order].unique_consecutive(return_counts=True)
    ends, end = {}, 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        end += count
        if slot >= 0:
            ends[slot] = end - count, end
    compute = experts.compute
    # Without tiers every slot is a row of its own.
    for slot, row in zip(ends, ends, strict=True) if arrivals is None else arrivals(list(ends)):
        start, end = ends[slot]
        of_slot = order[start:end]  # pairs of token and k
        if row == FAILED:
            expert_out[of_slot] = torch.nan
        else:
            expert_out[of_slot] = compute(hidden_states[of_slot // top_k], row)
    by_token = expert_out.view(num_tokens, top_k, hidden_states.shape[1])
    weighted = by_token.to(topk_weights.dtype)
    return (weighted * topk_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def check_runner_config(config: object) -> None:
    """Refuse what no `Experts` computes. Raises UnsupportedModelError."""
    activation = getattr(config, "activation", "silu")
    if activation != "silu" or getattr(config, "gemm1_alpha", None) is not None:
        raise UnsupportedModelError(
            f"MoE activation {activation!r}: the CPU platform computes plain SiLU experts"
        )
    if getattr(config, "apply_router_weight_on_input", False):
        raise UnsupportedModelError(
            "apply_router_weight_on_input: the CPU platform weighs experts' outputs only"
        )
