"""A tiered layer by a device's own kernels: all experts that are in rows at a time, then the next.

    slots (virtual) -> which, on the host -> tier.waves -> rows of each wave
        -> the device's core, over the rows of the wave, the others as nobody's -> sum

One copy of ids to the host a layer: who is needed decides what is loaded, so a graph cannot hold
it. SGLang's breakable decode graphs are left for it and entered again:

    graph: attention, router, rerouting | [GraphBreak]: a layer's experts | graph: their sum, ...

resolved.py refuses graphs of a whole step with tiers. Of more waves than one the sums are rounded
once more than by one kernel; one wave gives every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sgl_esft import sglang_api
from sgl_esft.errors import ConfigError, UnsupportedModelError
from sgl_esft.offload.device_rows import DeviceRows, Read, make_seats, page_lock, seat_bytes
from sgl_esft.offload.host_tier import HostTier, seats_within
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
        self,
        tier: ExpertTier,
        index: int,
        rows: DeviceRows,
        inner: Inner,
        seen: Seen,
        num_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        """num_tokens: () -> how many of a pass's tokens are not a graph's padding; None = all."""
        self._num_tokens = num_tokens
        self._tier = tier
        self._index = index
        self._rows = rows
        self._inner = inner
        self._seen = seen

    def __call__(self, dispatch_output: Any, weights: Any) -> Any:
        """ids are virtual slots, -1 = nobody's."""
        slots = dispatch_output.topk_output.topk_ids
        asked = slots[: self._num_tokens()].unique().tolist()
        needed = [slot for slot in asked if slot != NOBODY]
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


class GraphBreak:
    """A layer's core, between the graphs that SGLang captures of a decode step's rest."""

    def __init__(self, core: Inner) -> None:
        self._core = core

    def __call__(self, dispatch_output: Any, weights: Any) -> Any:
        """Raises UnsupportedModelError in a graph, for a dispatch with more tensors than these."""
        if not sglang_api.is_in_breakable_graph():
            return self._core(dispatch_output, weights)
        hidden, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        output = torch.empty_like(hidden)  # of the graph before, for the graph after
        self._run(
            partial(_dispatch, *_bare(dispatch_output)),
            (hidden, topk.topk_weights, topk.topk_ids, topk.router_logits),
            output,
            weights,
        )
        return sglang_api.make_combine_input(hidden_states=output)

    @sglang_api.graph_break
    def _run(
        self,
        make: Callable[..., Any],
        given: Sequence[torch.Tensor],
        output: torch.Tensor,
        weights: Any,
    ) -> None:
        """In a replay `given` is where the capture had it, as the graph before has filled it."""
        output.copy_(self._core(make(*given), weights).hidden_states)


def _bare(dispatch_output: Any) -> tuple[Any, Any]:
    """A dispatch and its top-k without tensors: who kept those would keep the graph's memory."""
    topk = dispatch_output.topk_output._replace(
        topk_weights=None, topk_ids=None, router_logits=None
    )
    bare = dispatch_output._replace(hidden_states=None, topk_output=None)
    if any(isinstance(each, torch.Tensor) for each in (*bare, *topk)):
        raise UnsupportedModelError(
            "--expert-cache in decode graphs: this model's layers hand experts more than hidden "
            "states and top-k; use --cuda-graph-backend-decode disabled"
        )
    return bare, topk


def _dispatch(
    bare: Any,
    topk: Any,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    router_logits: torch.Tensor,
) -> Any:
    whole = topk._replace(topk_weights=topk_weights, topk_ids=topk_ids, router_logits=router_logits)
    return bare._replace(hidden_states=hidden, topk_output=whole)


def rows_on_device(
    rows: Sequence[torch.Tensor], read: Read, host_bytes: int, num_readers: int
) -> DeviceRows:
    """rows: one layer's, each [num_rows, ...], as `TierLayer.at` has them. Raises ConfigError.

    num_readers: threads that may read at a time, or be held up while they do.
    """
    device = rows[0].device.type
    if device != "cuda":
        raise ConfigError(f"--expert-cache on {device}: host memory is page-locked for CUDA only")
    num_seats = seats_within(host_bytes, seat_bytes(rows), num_readers)
    seats = make_seats(rows, num_seats, page_lock(torch.cuda.cudart()))
    return DeviceRows(torch.cuda, seats, read, HostTier(num_seats, keeps=host_bytes > 0))


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
