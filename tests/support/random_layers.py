"""Random experts of one MoE layer, and the FusedMoE that a rank of any TP or EP degree would hold.

    RandomExperts (whole layer) --rank's part--> FakeFusedMoE -> WovenLayer.bind -> forward

`FakeFusedMoE` has what the woven layer reads off SGLang's class and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_esft.config import EsftConfig
from sgl_esft.weave.expert_tensor import create_experts
from sgl_esft.weave.moe_layer import ExpertShard, ExpertWeights, WovenLayer, plan_layout

PADDED = EsftConfig(1, 1, expert_memory="padded")
VIRTUAL = EsftConfig(1, 1, expert_memory="virtual")


@dataclass(frozen=True)
class Rank:
    """A place in the grid of expert and tensor parallelism."""

    ep_rank: int = 0
    ep_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1


ONE_RANK = Rank()


@dataclass(frozen=True)
class RandomExperts:
    """Whole experts by id: w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I]."""

    w13: torch.Tensor
    w2: torch.Tensor

    @classmethod
    def draw(
        cls, num_experts: int, hidden: int, width: int, seed: int, dtype: torch.dtype
    ) -> RandomExperts:
        generator = torch.Generator().manual_seed(seed)
        w13 = torch.randn(num_experts, 2 * width, hidden, generator=generator) / hidden**0.5
        w2 = torch.randn(num_experts, hidden, width, generator=generator) / width**0.5
        return cls(w13.to(dtype), w2.to(dtype))

    @property
    def width(self) -> int:
        return self.w2.shape[2]

    def merged(self, adapter: dict[int, ExpertWeights]) -> RandomExperts:
        """These experts with an adapter's whole experts written in."""
        w13, w2 = self.w13.clone(), self.w2.clone()
        for expert, weights in adapter.items():
            w13[expert] = weights.w13
            w2[expert] = weights.w2
        return RandomExperts(w13, w2)

    def chosen(self, *experts: int) -> dict[int, ExpertWeights]:
        """These ids' whole experts, as an adapter that replaces them."""
        return {e: ExpertWeights(self.w13[e].clone(), self.w2[e].clone()) for e in experts}


def cut(weights: ExpertWeights, rows: range) -> ExpertWeights:
    """An expert's part for a tensor parallel rank that holds `rows` of its width."""
    gate, up = weights.w13.chunk(2)
    part = slice(rows.start, rows.stop)
    return ExpertWeights(torch.cat([gate[part], up[part]]), weights.w2[:, part].clone())


def share_of(adapter: dict[int, ExpertWeights], shard: ExpertShard) -> dict[int, ExpertWeights]:
    """What a rank gets of an adapter's layer."""
    return {e: cut(w, shard.intermediate) for e, w in adapter.items() if e in shard.expert_ids}


class FakeFusedMoE(torch.nn.Module):
    """One rank's FusedMoE, its weights longer by the slots of `layout` (None = not woven).

    Slots that nothing was loaded into hold NaN, so reading one shows.
    """

    def __init__(
        self,
        experts: RandomExperts,
        rank: Rank = ONE_RANK,
        *,
        layer_id: int = 0,
        num_shared: int = 0,
        max_adapters: int = 0,
        max_experts: int = 0,
        config: EsftConfig | None = None,
    ) -> None:
        super().__init__()
        num_routed = experts.w13.shape[0] - num_shared
        per_rank = num_routed // rank.ep_size
        self.layer_id = layer_id
        self.num_experts = experts.w13.shape[0]
        self.num_global_routed_experts = num_routed
        self.num_fused_shared_experts = num_shared
        self.num_local_experts = per_rank + num_shared
        self.moe_ep_rank, self.moe_ep_size = rank.ep_rank, rank.ep_size
        self.moe_tp_rank, self.moe_tp_size = rank.tp_rank, rank.tp_size
        self.intermediate_size_per_partition = experts.width // rank.tp_size
        self.esft_layout = plan_layout(self, self.num_local_experts, max_adapters, max_experts)
        first = rank.ep_rank * per_rank
        ids = [*range(first, first + per_rank), *range(num_routed, num_routed + num_shared)]
        self._fill([cut(w, self.rows) for w in experts.chosen(*ids).values()], config or PADDED)

    @property
    def rows(self) -> range:
        width = self.intermediate_size_per_partition
        return range(self.moe_tp_rank * width, (self.moe_tp_rank + 1) * width)

    def _fill(self, base: list[ExpertWeights], config: EsftConfig) -> None:
        """Weights as SGLang creates and then loads them; NaN where padding is not used yet."""
        parts = {"w13_weight": [b.w13 for b in base], "w2_weight": [b.w2 for b in base]}

        def create() -> None:
            for name, (first, *_) in parts.items():
                shape = (self.esft_layout.num_slots, *first.shape)
                data = torch.full(shape, float("nan"), dtype=first.dtype)
                self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

        self.esft_memory = create_experts(self, self.esft_layout, config, create)
        for name, experts in parts.items():
            getattr(self, name).data[: len(experts)] = torch.stack(experts)

    def woven(self) -> WovenLayer:
        return WovenLayer.bind(self, self.esft_layout)
