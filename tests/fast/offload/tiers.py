"""A rank's tier over real files, beside the same experts all in memory. Used by tests only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from sgl_esft.formats.checkpoint import open_checkpoint
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.offload.ahead import Ahead, SlotsOf
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.loader import Loader, LoadJob
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.reader import ExpertReader, Preadv
from sgl_esft.offload.source import ExpertSource
from sgl_esft.offload.tier import ExpertTier, TierLayer
from sgl_esft.platform.moe import moe_forward


@dataclass
class Rank:
    """One layer's experts both ways. `w13`, `w2`: [num_base, ...] whole, by slot."""

    spec: MoeSpec
    tier: ExpertTier
    source: ExpertSource
    reader: ExpertReader
    w13: list[torch.Tensor]
    w2: list[torch.Tensor]

    def whole(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With every expert in memory."""
        return moe_forward(hidden, self.w13[layer], self.w2[layer], _weights(ids), ids)

    def tiered(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With rows."""
        rows = self.tier.layers[layer]
        arrivals = partial(self.tier.arrivals, layer)
        return moe_forward(hidden, rows.w13, rows.w2, _weights(ids), ids, arrivals)


def _weights(ids: torch.Tensor) -> torch.Tensor:
    """Different for each k."""
    return torch.linspace(0.2, 0.7, ids.shape[1]).repeat(ids.shape[0], 1)


@contextmanager
def open_rank(
    base: Path,
    num_rows: int,
    policy: str = "lru",
    *,
    predictor: Predictor | None = None,
    loads_per_layer: float = 0.0,
    os_preadv: Preadv = os.preadv,
    throttle_bytes_per_s: float | None = None,
    slots_of: SlotsOf = lambda layer, adapter_slot, ids: ids,
) -> Iterator[Rank]:
    """All of a base's MoE layers on one rank, each with `num_rows` rows."""
    source = ExpertSource(base)
    spec = source.spec
    dtype = getattr(torch, spec.dtype)
    width, hidden = spec.expert_intermediate_size, spec.hidden_size
    reader = ExpertReader(
        range(width), False, dtype, os_preadv=os_preadv, throttle_bytes_per_s=throttle_bytes_per_s
    )
    layers = [
        TierLayer(
            layer_id,
            torch.full((num_rows, 2 * width, hidden), torch.nan, dtype=dtype),
            torch.full((num_rows, hidden, width), torch.nan, dtype=dtype),
        )
        for layer_id in spec.moe_layer_ids
    ]
    num_slots = spec.num_experts + 8
    decisions = Decisions(
        len(layers),
        num_slots,
        num_rows,
        POLICIES[policy],
        num_base=spec.num_experts,
        loads_per_layer=loads_per_layer,
    )
    looks = predictor is not None or POLICIES[policy].streams
    ahead = Ahead(decisions, predictor, slots_of) if looks else None

    def load(job: LoadJob, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reader.read(job.place, w13, w2)

    tier = ExpertTier(layers, decisions, lambda run: Loader(2, run), load, ahead)
    for index, layer_id in enumerate(spec.moe_layer_ids):
        tier.add(index, {e: source.place(None, layer_id, e) for e in range(spec.num_experts)})
    w13, w2 = _whole(base)
    try:
        yield Rank(spec, tier, source, reader, w13, w2)
    finally:
        tier.close()


def _whole(base: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By another way than the reader's: safetensors' own."""
    checkpoint = open_checkpoint(base)
    tensors: dict[str, torch.Tensor] = {}
    for shard in checkpoint.shards:
        tensors |= load_file(shard)
    spec = checkpoint.spec

    def of(layer_id: int, proj: str) -> torch.Tensor:
        names = [spec.expert_tensor_name(layer_id, e, proj) for e in range(spec.num_experts)]  # type: ignore[arg-type]
        return torch.stack([tensors[name] for name in names])

    w13 = [torch.cat([of(i, "gate"), of(i, "up")], dim=1) for i in spec.moe_layer_ids]
    return w13, [of(i, "down") for i in spec.moe_layer_ids]


def totals(rank: Rank) -> Mapping[str, int]:
    """Counts of all layers together."""
    return vars(rank.tier.totals())
