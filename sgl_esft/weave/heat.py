"""Which experts work for whom: tokens by adapter, MoE layer and expert id, of sampled steps.

    lora_manager.py: a step begins --> [HeatSampler.begin_step] -> sampled, or not
    reroute.py: a layer's top-k --> [LayerHeat]  expert ids and tags, before rerouting
    GET /v1/heat               <-- [HeatSampler.report]

A sampled step costs each layer one scatter on the device. What it counted is fetched when the next
step begins, which waits for the device once. Steps that replay a CUDA graph run no Python, so they
are never sampled. Counts are since start, as a Prometheus counter's: a reader takes differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from sgl_esft.http.record import BASE, NO_ADAPTER, OTHERS

# Adapters that are told apart. Names come and go for as long as a rank serves, and each report,
# which is made between two steps, has all of them: 64 names of DeepSeek-V3 are 1 M numbers.
MAX_NAMES: Final = 64

LayerHeat = Callable[[torch.Tensor, torch.Tensor], None]  # `HeatSampler.count` of one layer
OnDistinct = Callable[[int, int], None]  # (layer id, experts that the step read)


@dataclass(frozen=True)
class SlotOwner:
    """Who sits in an adapter slot."""

    name: str
    experts: Mapping[int, tuple[int, ...]]  # layer id -> expert ids that it replaces


Owners = Callable[[], Mapping[int, SlotOwner]]  # adapter slot -> owner, now


class HeatSampler:
    """The counts of one rank. Every rank that shares the experts sees the same tokens."""

    def __init__(
        self,
        layer_ids: Sequence[int],
        num_adapters: int,
        num_experts: int,
        every: int,
        owners: Owners,
        device: torch.device | str,
        on_distinct: OnDistinct | None = None,
    ) -> None:
        """every: one in so many steps is sampled, at least 1; the first one is."""
        self.layer_ids = tuple(layer_ids)
        self.num_experts = num_experts
        self._every = every
        self._owners = owners
        self._on_distinct = on_distinct
        num_layers = len(self.layer_ids)
        # Row 0 is the base's, row a + 1 adapter slot a's, the last one padding's. Column 0 is for
        # "no expert", column e + 1 for expert e: so nothing has to be masked.
        shape = (num_layers, num_adapters + 2, num_experts + 1)
        self._step = torch.zeros(shape, dtype=torch.int64, device=device)
        self._real_tokens: int | torch.Tensor = 0
        self._first_cells: torch.Tensor | None = None  # [num_rows, 1] of the step at hand
        self._ones = torch.ones(0, dtype=torch.int64, device=device)
        self._step_owners: Mapping[int, SlotOwner] = {}
        self._replaced = torch.zeros((num_layers, num_adapters + 1, num_experts), dtype=torch.bool)
        self._replaced_by: Mapping[int, SlotOwner] = {}
        self.reset()

    def reset(self) -> None:
        """Nothing is counted yet. Totals are [num_layers, num_experts] int64 on the host."""
        self._step.zero_()
        self._turn = -1  # steps so far, less one
        self._has_run = True  # whether a layer has run since the last step began
        self._is_sampled = False
        num_layers = len(self.layer_ids)
        self._base = torch.zeros((num_layers, self.num_experts), dtype=torch.int64)
        self._totals: dict[str, torch.Tensor] = {}  # by adapter, the one counted longest ago first
        self._others = torch.zeros_like(self._base)
        self._sampled_steps = 0
        self._distinct_sum = torch.zeros(num_layers, dtype=torch.int64)
        self._distinct_last = torch.zeros(num_layers, dtype=torch.int64)

    def layer(self, layer_id: int) -> LayerHeat:
        """What a layer's rerouting calls."""
        return partial(self.count, self.layer_ids.index(layer_id))

    def begin_step(self, real_tokens: int | torch.Tensor) -> None:
        """A forward pass is about to run.

        real_tokens: the number of rows that are tokens, or a bool mask of them [num_rows]; all
        else is padding. SGLang may announce a pass twice, and replays of graphs run no layer.
        """
        if self._has_run:
            self._harvest()
            self._has_run = False
            self._turn += 1
            self._is_sampled = self._turn % self._every == 0
        if self._is_sampled:
            self._real_tokens = real_tokens
            self._first_cells = None
            self._step_owners = dict(self._owners())

    def count(self, layer_idx: int, topk_ids: torch.Tensor, tags: torch.Tensor) -> None:
        """[num_rows, k] expert ids (-1 = none) and [num_rows] adapter slots (-1 = base)."""
        self._has_run = True
        if not self._is_sampled or _is_capturing(topk_ids):
            return
        if self._first_cells is None:  # the same for all layers
            self._first_cells = self._rows(tags)[:, None] * self._step.shape[2] + 1
            self._ones = torch.ones(topk_ids.numel(), dtype=torch.int64, device=topk_ids.device)
        cells = self._first_cells + topk_ids
        self._step[layer_idx].view(-1).scatter_add_(0, cells.view(-1), self._ones)

    def _rows(self, tags: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64: the row that counts each token, the last one for padding."""
        padding = self._step.shape[1] - 1
        # A tag is an adapter slot, or that in the rows of the token's source; -1 is the base too.
        rows = (tags.to(torch.int64).remainder(padding) + 1).remainder(padding)
        if isinstance(self._real_tokens, int):
            rows[self._real_tokens :] = padding
            return rows
        rows[self._real_tokens.shape[0] :] = padding
        rows[: self._real_tokens.shape[0]][~self._real_tokens[: rows.shape[0]]] = padding
        return rows

    def by_expert(self) -> dict[int, list[int]]:
        """Layer id -> tokens by expert id, the base's and all adapters' together, up to now."""
        self._harvest()
        total = self._base + self._others
        for counts in self._totals.values():
            total += counts
        return dict(zip(self.layer_ids, total.tolist(), strict=True))

    def report(self) -> dict[str, Any]:
        """GET /v1/heat's answer, up to now."""
        self._harvest()
        steps = self._sampled_steps
        totals = {BASE: self._base, **self._totals}
        if self._others.any():
            totals[OTHERS] = self._others
        return {
            "layers": list(self.layer_ids),
            "num_experts": self.num_experts,
            "sampled_steps": steps,
            "adapters": {name: counts.tolist() for name, counts in totals.items()},
            "distinct_experts_per_step": {
                "mean": [total / steps if steps else 0.0 for total in self._distinct_sum.tolist()],
                "last": self._distinct_last.tolist(),
            },
        }

    def _harvest(self) -> None:
        """Add what the last sampled step has counted."""
        if not (self._is_sampled and self._has_run):
            return
        self._is_sampled = False
        counts = self._step[:, :-1, 1:].clone().cpu()
        self._step.zero_()
        if not counts.any():
            return
        self._sampled_steps += 1
        self._base += counts[:, 0]
        for slot in counts[:, 1:].any(dim=2).any(dim=0).nonzero().flatten().tolist():
            owner = self._step_owners.get(slot)
            name = NO_ADAPTER if owner is None else owner.name
            self._add(name, counts[:, slot + 1])
        self._note_owners()
        self._add_distinct(distinct_experts(counts > 0, self._replaced))

    def _add(self, name: str, counts: torch.Tensor) -> None:
        before = self._totals.pop(name, 0)
        self._totals[name] = before + counts
        if len(self._totals) > MAX_NAMES:
            self._others += self._totals.pop(next(iter(self._totals)))

    def _note_owners(self) -> None:
        """`_replaced`: which experts each row has of its own."""
        if self._replaced_by == self._step_owners:
            return
        self._replaced_by = self._step_owners
        self._replaced.zero_()
        for slot, owner in self._step_owners.items():
            for layer_idx, layer_id in enumerate(self.layer_ids):
                self._replaced[layer_idx, slot + 1, list(owner.experts.get(layer_id, ()))] = True

    def _add_distinct(self, distinct: torch.Tensor) -> None:
        self._distinct_sum += distinct
        self._distinct_last = distinct
        if self._on_distinct is not None:
            for layer_id, number in zip(self.layer_ids, distinct.tolist(), strict=True):
                self._on_distinct(layer_id, number)


def distinct_experts(used: torch.Tensor, replaced: torch.Tensor) -> torch.Tensor:
    """[num_layers] int64: experts whose weights a step reads.

    used: [num_layers, N + 1, num_experts] bool, row 0 the base's; replaced: alike, where a row has
    an expert of its own. The base's expert is one, whoever uses it; an adapter's own is another.
    """
    own = (used & replaced).sum(dim=(1, 2))
    shared = (used & ~replaced).any(dim=1).sum(dim=1)
    return own + shared


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of replicas that each ran steps of their own. Raises ValueError for none."""
    first, *others = reports
    if not others:
        return dict(first)
    steps = sum(report["sampled_steps"] for report in reports)
    distinct = [report["distinct_experts_per_step"] for report in reports]
    means = [
        torch.tensor(each["mean"], dtype=torch.float64) * report["sampled_steps"]
        for each, report in zip(distinct, reports, strict=True)
    ]
    latest = max(range(len(reports)), key=lambda index: reports[index]["sampled_steps"])
    names = sorted({name for report in reports for name in report["adapters"]})
    return {
        **first,
        "sampled_steps": steps,
        "adapters": {name: _added(name, reports) for name in names},
        "distinct_experts_per_step": {
            "mean": (torch.stack(means).sum(dim=0) / max(steps, 1)).tolist(),
            "last": distinct[latest]["last"],
        },
    }


def _added(name: str, reports: Sequence[Mapping[str, Any]]) -> Any:
    parts = [torch.tensor(r["adapters"][name]) for r in reports if name in r["adapters"]]
    return torch.stack(parts).sum(dim=0).tolist()


def _is_capturing(tensor: torch.Tensor) -> bool:
    """Into a graph nothing may be put: it would be counted in every replay."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
