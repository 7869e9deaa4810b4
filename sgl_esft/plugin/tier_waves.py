"""A tiered layer by a device's own kernels: all experts that are in rows at a time, then the next.

    slots (virtual) -> which, on the host -> tier.waves -> rows of each wave
        -> the device's core, over the rows of the wave, the others as nobody's -> sum

One copy of ids to the host a layer: who is needed decides what is loaded, so a graph cannot capture
it (resolved.py refuses decode graphs with tiers). Of more waves than one the sums are rounded once
more than by one kernel; one wave gives every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_esft.offload.device_rows import DeviceRows
from sgl_esft.offload.routing import Floats
from sgl_esft.offload.tier import ExpertTier
from sgl_esft.platform.moe import FAILED

NOBODY = -1  # what every kernel passes over
# (StandardDispatchOutput, quant info) -> CombineInput, by rows
Inner = Callable[[Any, Any], Any]
# A layer's dispatch -> what looks ahead by it: probabilities, hidden states
Seen = Callable[[Any], tuple[Floats | None, Floats | None]]


class WaveCore:
    """One layer's core on a device whose rows `rows` fills."""

    def __init__(
        self, tier: ExpertTier, index: int, rows: DeviceRows, inner: Inner, seen: Seen
    ) -> None:
        self._tier = tier
        self._index = index
        self._rows = rows
        self._inner = inner
        self._seen = seen

    def __call__(self, dispatch_output: Any, weights: Any) -> Any:
        """ids are virtual slots, -1 = nobody's."""
        slots = dispatch_output.topk_output.topk_ids
        needed = [slot for slot in slots.unique().tolist() if slot != NOBODY]
        probs, hidden = self._seen(dispatch_output)
        total: Any = None
        lost: list[int] = []
        for wave in self._tier.waves(self._index, needed, probs, hidden):
            lost += [slot for slot, row in wave if row == FAILED]
            here = [(slot, row) for slot, row in wave if row != FAILED]
            part = self._run(dispatch_output, weights, here)
            total = part if total is None else _added(total, part)
        if total is None:
            total = self._run(dispatch_output, weights, [])
        return total if not lost else _without(total, slots, lost)

    def _run(self, dispatch_output: Any, weights: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        rows = [row for _, row in pairs]
        self._rows.before(self._index, rows)
        topk = dispatch_output.topk_output
        part = self._inner(
            dispatch_output._replace(
                # SGLang's cores may answer where they were asked; the next wave needs it too.
                hidden_states=dispatch_output.hidden_states.clone(),
                topk_output=topk._replace(topk_ids=rows_of(topk.topk_ids, pairs)),
            ),
            weights,
        )
        self._rows.after(self._index, rows)
        return part


def rows_of(slots: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """[num_tokens, k] slots -> rows of these (slot, row) pairs, NOBODY for all others."""
    height = max((slot for slot, _ in pairs), default=0) + 2
    where = torch.full((height,), NOBODY, dtype=slots.dtype)
    for slot, row in pairs:
        where[slot] = row
    # Slots beyond the table and -1 alike find its last entry, which is nobody's.
    inside = slots.clamp(max=height - 1).to(torch.int64)
    return where.to(slots.device)[inside]


def _added(one: Any, other: Any) -> Any:
    return one._replace(hidden_states=one.hidden_states + other.hidden_states)


def _without(total: Any, slots: torch.Tensor, lost: Sequence[int]) -> Any:
    """Tokens with an expert that could not be had are no answers: NaN."""
    is_lost = torch.isin(slots, torch.tensor(lost, dtype=slots.dtype, device=slots.device))
    of_token = is_lost.any(dim=1, keepdim=True)
    return total._replace(hidden_states=total.hidden_states.masked_fill(of_token, torch.nan))
