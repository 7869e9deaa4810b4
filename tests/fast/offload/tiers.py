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
from sgl_esft.formats.model_spec import MoeSpec, Proj
from sgl_esft.offload.ahead import Ahead, SlotsOf
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.link import make_loader
from sgl_esft.offload.loader import LoadJob
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.reader import ExpertReader, Preadv
from sgl_esft.offload.source import ExpertSource
from sgl_esft.offload.tier import ExpertTier, TierLayer
from sgl_esft.platform.moe import Experts, PlainExperts, weighted_sum
from sgl_esft.platform.quantised_moe import Int8Experts


@dataclass
class Rank:
    """One layer's experts both ways. `w13`, `w2`, `scales`: [num_base, ...] whole, by slot."""

    spec: MoeSpec
    tier: ExpertTier
    source: ExpertSource
    reader: ExpertReader
    w13: list[torch.Tensor]
    w2: list[torch.Tensor]
    scales: list[Scales]  # None where nothing is quantised

    def whole(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With every expert in memory."""
        experts = experts_of(self.w13[layer], self.w2[layer], self.scales[layer])
        return weighted_sum(hidden, experts, _weights(ids), ids)

    def tiered(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """With rows."""
        rows = self.tier.layers[layer]
        arrivals = partial(self.tier.arrivals, layer)
        experts = experts_of(rows.w13, rows.w2, rows.scales)
        return weighted_sum(hidden, experts, _weights(ids), ids, arrivals)


Scales = tuple[torch.Tensor, torch.Tensor] | None


def experts_of(w13: torch.Tensor, w2: torch.Tensor, scales: Scales) -> Experts:
    return PlainExperts(w13, w2) if scales is None else Int8Experts(w13, w2, *scales)


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
    max_bytes_per_s: int | None = None,
    slots_of: SlotsOf = lambda layer, adapter_slot, ids: ids,
) -> Iterator[Rank]:
    """All of a base's MoE layers on one rank, each with `num_rows` rows."""
    source = ExpertSource(base)
    spec = source.spec
    dtype = getattr(torch, spec.expert_parts("gate")[0].dtype)
    width = spec.expert_intermediate_size
    reader = ExpertReader(
        range(width), False, dtype, os_preadv=os_preadv, max_bytes_per_s=max_bytes_per_s
    )
    layers = [_empty_layer(spec, layer_id, num_rows, dtype) for layer_id in spec.moe_layer_ids]
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

    def load(job: LoadJob, *rows: torch.Tensor) -> None:
        reader.read(job.place, *rows)

    tier = ExpertTier(layers, decisions, partial(make_loader, reader, 2), load, ahead)
    for index, layer_id in enumerate(spec.moe_layer_ids):
        tier.add(index, {e: source.place(None, layer_id, e) for e in range(spec.num_experts)})
    try:
        yield Rank(spec, tier, source, reader, *_whole(base))
    finally:
        tier.close()


def _empty_layer(spec: MoeSpec, layer_id: int, num_rows: int, dtype: torch.dtype) -> TierLayer:
    """Its rows hold what is nobody's: NaN, or numbers whose scales are."""
    fill = torch.nan if dtype.is_floating_point else 0x5A
    width, hidden = spec.expert_intermediate_size, spec.hidden_size
    shapes = ((2 * width, hidden), (hidden, width))
    w13, w2 = (torch.full((num_rows, *shape), fill, dtype=dtype) for shape in shapes)
    if spec.scheme is None:
        return TierLayer(layer_id, w13, w2)
    first, second = (torch.full((num_rows, shape[0], 1), torch.nan) for shape in shapes)
    return TierLayer(layer_id, w13, w2, scales=(first, second))


def _whole(base: Path) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Scales]]:
    """By another way than the reader's: safetensors' own."""
    checkpoint = open_checkpoint(base, may_be_quantised=True)
    tensors: dict[str, torch.Tensor] = {}
    for shard in checkpoint.shards:
        tensors |= load_file(shard)
    spec = checkpoint.spec

    def of(layer_id: int, proj: Proj, suffix: str = "weight") -> torch.Tensor:
        names = [spec.expert_tensor_name(layer_id, e, proj) for e in range(spec.num_experts)]
        return torch.stack([tensors[name.removesuffix("weight") + suffix] for name in names])

    def both(*suffix: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ids = spec.moe_layer_ids
        first = [torch.cat([of(i, "gate", *suffix), of(i, "up", *suffix)], dim=1) for i in ids]
        return first, [of(i, "down", *suffix) for i in ids]

    if spec.scheme is None:
        return *both(), [None] * len(spec.moe_layer_ids)
    return *both(), list(zip(*both("weight_scale"), strict=True))


def totals(rank: Rank) -> Mapping[str, int]:
    """Counts of all layers together."""
    return vars(rank.tier.totals())
