"""SGLang's TopK and FusedMoE of one rank, plain or woven, over poisoned memory.

    Case: sizes, routing, rank, dtype --plain--> Block of the merged weights --> expected
                                     --Woven--> Block over slots, with adapters --> seen

A layer reads its place among ranks off SGLang's runtime context and sums up nothing itself, so any
rank can be built here. Whatever is not a mapped slot is NaN: padded slots, and one expert's place
before and behind the tensor. Virtual slots without a page fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.plugin import build
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_memory import VirtualMemory
from sgl_esft.weave.moe_layer import ExpertWeights
from tests.fast.layer.real_fused_moe import compare, enter, fill_with_nan
from tests.support.random_layers import RandomExperts, Rank, share_of

LAYER_ID = 3
NUM_EXPERTS, HIDDEN, WIDTH = 8, 32, 16
MAX_ADAPTERS, MAX_EXPERTS = 3, 3
# Overlapping; disjoint; as many as fit, so that the last slot of all is one; the next in a slot.
TUNED = ((0, 3, 6), (2, 5), (1, 4, 7), (3, 7))
MAX_TOKENS = 64
Adapter = dict[int, ExpertWeights]


@dataclass(frozen=True)
class Routing:
    """How a model routes: SGLang's TopK, by the arguments that the model's code gives it."""

    top_k: int = 3  # fused shared experts included
    num_shared: int = 0
    scale: float | None = None  # the model's routed_scaling_factor
    has_bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of TopK

    def make_topk(self, experts: Any) -> Any:
        """The TopK that belongs to a FusedMoE."""
        from sglang.srt.layers.moe.topk import TopK

        takes_shared = "num_fused_shared_experts" in inspect.signature(TopK).parameters
        shared = {"num_fused_shared_experts": self.num_shared} if takes_shared else {}
        with nullcontext() if takes_shared else self._model_with_shared():
            topk = TopK(
                top_k=self.top_k if takes_shared else self.top_k - self.num_shared,
                layer_id=LAYER_ID,
                correction_bias=self._make_bias(),
                routed_scaling_factor=self.scale,
                apply_routed_scaling_factor_on_output=experts.should_fuse_routed_scaling_factor_in_topk,
                **self.options,
                **shared,
            )
        if hasattr(topk, "bind_runner_backend"):
            topk.bind_runner_backend(experts.runner_backend)
        return topk

    def _model_with_shared(self) -> Any:
        """SGLang 0.5.23 knows the number of shared experts from the model that it is building."""
        from sglang.srt.runtime_context import get_model

        config = import_module("sglang.srt.configs.shared_experts").SharedExpertsConfig
        return get_model().override(shared_experts=config(num_fused_shared_experts=self.num_shared))

    def _make_bias(self) -> torch.Tensor | None:
        generator = torch.Generator().manual_seed(7)
        return torch.randn(NUM_EXPERTS, generator=generator) / 8 if self.has_bias else None


class Block(torch.nn.Module):
    """A model's MoE block without its gate: the router's logits come with the batch."""

    def __init__(self, routing: Routing, experts: Any) -> None:
        super().__init__()
        self.experts = experts
        self.topk = routing.make_topk(experts)

    @torch.no_grad()
    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, num_live: int | None = None
    ) -> torch.Tensor:
        """[num_tokens, H], [num_tokens, M] -> this rank's part of [num_tokens, H]."""
        live = None if num_live is None else torch.tensor([num_live], dtype=torch.int32)
        chosen = self.topk(hidden, logits, num_token_non_padded=live)
        result: torch.Tensor = self.experts(hidden.clone(), chosen)
        return result


@dataclass(frozen=True)
class Case:
    """One rank, dtype and routing: weights, adapters, and what plain SGLang gives for them."""

    rank: Rank = Rank()  # noqa: RUF009 (frozen)
    dtype: torch.dtype = torch.float32
    routing: Routing = Routing()
    runner_backend: str = "auto"  # --moe-runner-backend

    @property
    def base(self) -> RandomExperts:
        return self._draw(0)

    def adapter(self, number: int) -> Adapter:
        return self._draw(1 + number).chosen(*TUNED[number])

    def _draw(self, seed: int) -> RandomExperts:
        num_experts = NUM_EXPERTS + self.routing.num_shared
        return RandomExperts.draw(num_experts, HIDDEN, WIDTH, seed, self.dtype)

    @property
    def spec(self) -> MoeSpec:
        dtype = str(self.dtype).removeprefix("torch.")
        return MoeSpec("DeepseekV2ForCausalLM", 4, (LAYER_ID,), NUM_EXPERTS, HIDDEN, WIDTH, dtype)

    def batch(self, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(self.dtype)
        logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).to(self.dtype)
        return hidden, logits

    def plain(self, adapter: Adapter) -> Block:
        """SGLang's own layer of that rank, with the adapter's experts merged in."""
        block = self._block(self.base.merged(adapter))
        surround(block.experts)
        return block

    def _block(self, experts: RandomExperts, resident: Iterable[int] | None = None) -> Block:
        """`resident`: the routed experts that SGLang's loader is given; None = all."""
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        enter(self.rank, self.runner_backend)
        layer = FusedMoE(
            num_experts=len(experts.w13),
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            layer_id=LAYER_ID,
            top_k=self.routing.top_k,
            num_fused_shared_experts=self.routing.num_shared,
            params_dtype=self.dtype,
            routed_scaling_factor=self.routing.scale,
        )
        fill_with_nan(layer)
        everything = range(len(experts.w13))
        load(layer, experts, everything if resident is None else sorted(resident))
        layer.quant_method.process_weights_after_loading(layer)
        return Block(self.routing, layer)


def load(layer: Any, experts: RandomExperts, expert_ids: Iterable[int]) -> None:
    """Through SGLang's own loader, as a checkpoint's tensors come."""
    for expert in expert_ids:
        gate, up = experts.w13[expert].chunk(2)
        for weight, name, shard in (
            (gate, "gate_proj", "w1"),
            (up, "up_proj", "w3"),
            (experts.w2[expert], "down_proj", "w2"),
        ):
            parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
            layer.weight_loader(parameter, weight, f"experts.{expert}.{name}.weight", shard, expert)


def surround(layer: Any) -> None:
    """NaN where an expert before the first and one behind the last would be."""
    if isinstance(getattr(layer, "esft_memory", None), VirtualMemory):
        return
    for parameter in (layer.w13_weight, layer.w2_weight):
        shape = (len(parameter) + 2, *parameter.shape[1:])
        around = torch.full(shape, float("nan"), dtype=parameter.dtype)
        around[1:-1] = parameter.data
        parameter.data = around[1:-1]


class Woven:
    """A case's layer, woven as in a server."""

    def __init__(
        self, case: Case, reroute: str = "fused", resident: Iterable[int] | None = None
    ) -> None:
        self.case = case
        self.block = case._block(case.base, resident)
        surround(self.block.experts)
        model = torch.nn.ModuleList([self.block])
        layers = build.bind_layers(model, case.spec)
        self.tags = BatchTags(MAX_TOKENS, "cpu")
        build.attach_rerouting(model, layers, self.tags, reroute)
        self.layer = layers[LAYER_ID]

    def place(self, slot: int, number: int) -> None:
        """Adapter `number` of the case into an adapter slot."""
        here = share_of(self.case.adapter(number), self.layer.readable_shard)
        self.layer.place(slot, here, TUNED[number])

    def displace(self, slot: int) -> None:
        self.layer.displace(slot)
        if isinstance(self.layer.memory, VirtualMemory):
            return
        own = self.layer.layout.adapter_range(slot)
        for weight in (self.layer.w13, self.layer.w2):
            weight[own.start : own.stop] = float("nan")

    def run(
        self, batch: tuple[torch.Tensor, torch.Tensor], slots: int | list[int], **options: Any
    ) -> torch.Tensor:
        """`slots`: each token's adapter slot, or one for all."""
        num_tokens = len(batch[0])
        tags = [slots] * num_tokens if isinstance(slots, int) else slots
        self.tags.set(torch.tensor(tags, dtype=torch.int32))
        result: torch.Tensor = self.block(*batch, **options)
        return result

    def check(self) -> None:
        self.layer.check_integrity()


__all__ = ["Block", "Case", "Routing", "Woven", "compare"]
