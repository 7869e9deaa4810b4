"""SGLang's quantised FusedMoE of one rank, plain or with adapters' slots, over poisoned memory.

    QuantisedCase --plain--> Block of the merged checkpoint, quantised --> expected
                  --Slots, Woven--> Block over slots: base and adapters, quantised apart --> seen

Config, method, parameters, loader and what is done after loading are SGLang's. Of `Slots`, which
knows only the runner core, for slots too: an adapter's rows are those of a layer into which SGLang
loaded nothing but the adapter. `Woven` is what a server makes. Numbers and scales that nobody wrote
are NaN, or all bits ones where their dtype has no NaN; around the tensors of `Slots`, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.model_spec import PROJS, MoeSpec, Proj
from sgl_esft.plugin import build, runner_core
from sgl_esft.quant.rounding import Parts, quantise_expert
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_map import ExpertMap, base_row
from sgl_esft.weave.expert_memory import VirtualMemory
from sgl_esft.weave.moe_layer import ExpertWeights
from sgl_esft.weave.quantised_experts import lay_out
from sgl_esft.weave.reroute import Rerouter, load_reroute
from sgl_esft.weave.slot_layout import SlotLayout
from tests.fast.layer.real_fused_moe import enter
from tests.fast.moe_interpreted.blocks import (
    LAYER_ID,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    MAX_TOKENS,
    NUM_EXPERTS,
    TUNED,
    Adapter,
    Block,
    Routing,
)
from tests.support.random_layers import RandomExperts, Rank

PREFIX = f"model.layers.{LAYER_ID}.mlp.experts"
Experts = dict[int, dict[Proj, Parts]]
"""Expert id -> projection -> its tensors in a checkpoint."""


@dataclass(frozen=True)
class Scheme:
    """How SGLang is told of a checkpoint's experts. H is several blocks of scales, I one or two."""

    rounding: ExpertScheme
    method: str  # --quantization
    settings: Mapping[str, Any]  # quantization_config
    hidden: int
    width: int

    @property
    def doubled(self) -> Scheme:
        """With an I of two such widths, which two ranks of tensor parallelism can share."""
        return replace(self, width=2 * self.width)

    @property
    def is_per_batch(self) -> bool:
        """All tokens of a batch share one scale of their activations."""
        return self.rounding.name == "fp8-tensor"


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False, "group_size": 32}
SCHEMES = {
    "int8": Scheme(ExpertScheme("int8", 1, 0), "w8a8_int8", {"quant_method": "w8a8_int8"}, 64, 16),
    "fp8": Scheme(
        ExpertScheme("fp8", 128, 128), "fp8", {**_FP8, "weight_block_size": [128, 128]}, 256, 128
    ),
    "fp8-tensor": Scheme(ExpertScheme("fp8-tensor", 0, 0), "fp8", _FP8, 64, 16),
    "int4": Scheme(ExpertScheme("int4", 1, 32), "moe_wna16", _GPTQ, 64, 64),
}


@dataclass(frozen=True)
class QuantisedCase:
    """A scheme on one rank: weights, adapters, and what plain SGLang gives for them."""

    scheme: Scheme
    rank: Rank = Rank()  # noqa: RUF009 (frozen)
    dtype: torch.dtype = torch.bfloat16

    @property
    def rounding(self) -> ExpertScheme:
        """Int4's scales are in the checkpoint's dtype."""
        own = self.scheme.rounding
        dtype = str(self.dtype).removeprefix("torch.")
        return replace(own, scale_dtype=dtype) if own.name == "int4" else own

    @property
    def base(self) -> RandomExperts:
        return self._draw(0)

    def adapter(self, number: int) -> Adapter:
        return self._draw(1 + number).chosen(*TUNED[number])

    def _draw(self, seed: int) -> RandomExperts:
        sizes = (NUM_EXPERTS, self.scheme.hidden, self.scheme.width)
        return RandomExperts.draw(*sizes, seed, self.dtype)

    def batch(self, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(num_tokens, self.scheme.hidden, generator=generator)
        logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
        return hidden.to(self.dtype), logits.to(self.dtype)

    @property
    def spec(self) -> MoeSpec:
        sizes = (NUM_EXPERTS, self.scheme.hidden, self.scheme.width)
        dtype = str(self.dtype).removeprefix("torch.")
        return MoeSpec("DeepseekV2ForCausalLM", 4, (LAYER_ID,), *sizes, dtype, self.rounding)

    def plain(self, adapter: Adapter) -> Block:
        """SGLang's own layer of the merged checkpoint, quantised."""
        merged = self.base.merged(adapter)
        layer = self.load(merged.chosen(*range(NUM_EXPERTS)))
        lengthen(layer, layer.num_local_experts)
        if self.scheme.is_per_batch:
            # Of ranks that share the experts, SGLang's filter leaves rows unwritten, and then takes
            # the largest number of all rows. Without the filter those rows are zeros.
            layer.quant_method.runner.config.num_experts = layer.num_local_experts
        return Block(Routing(), layer)

    def load(self, weights: Mapping[int, ExpertWeights]) -> Any:
        """SGLang's layer after loading these whole experts; the others' memory is poisoned."""
        layer = self._make_layer()
        poison_all(layer)
        for name, tensor in checkpoint(self.quantised(weights)):
            load_tensor(layer, name, tensor)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    def quantised(self, weights: Mapping[int, ExpertWeights]) -> Experts:
        return {
            expert: quantise_expert(projections(whole), self.rounding)
            for expert, whole in weights.items()
        }

    def _make_layer(self) -> Any:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.quantization import get_quantization_config
        from sglang.srt.runtime_context import get_parallel

        enter(self.rank, "triton")
        here = SimpleNamespace(world_size=self.rank.ep_size * self.rank.tp_size, device="cpu")
        get_parallel().override_permanently(tp_group=here)
        config = get_quantization_config(self.scheme.method).from_config({**self.scheme.settings})
        return FusedMoE(
            num_experts=NUM_EXPERTS,
            hidden_size=self.scheme.hidden,
            intermediate_size=self.scheme.width,
            layer_id=LAYER_ID,
            top_k=Routing().top_k,
            params_dtype=self.dtype,
            quant_config=config,
            prefix=PREFIX,
        )


def projections(whole: ExpertWeights) -> dict[Proj, torch.Tensor]:
    gate, up = whole.w13.chunk(2)
    return dict(zip(PROJS, (gate, up, whole.w2), strict=True))


def checkpoint(experts: Experts) -> Iterator[tuple[str, torch.Tensor]]:
    for expert, parts_of in experts.items():
        for proj, parts in parts_of.items():
            for suffix, tensor in parts.items():
                yield f"{PREFIX}.{expert}.{proj}_proj.{suffix}", tensor


def load_tensor(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """Through SGLang's names and its loader, as a model's load_weights does."""
    names = ("gate_proj", "down_proj", "up_proj")
    mapping = layer.make_expert_params_mapping(*names, NUM_EXPERTS)
    found = next(entry for entry in mapping if entry[1] in name)
    target = name.replace(found[1], found[0])
    parameter = layer.get_parameter(target.removeprefix(f"{PREFIX}.").removeprefix("experts."))
    parameter.weight_loader(parameter, tensor, target, found[3], found[2])


def per_expert(layer: Any) -> dict[str, torch.nn.Parameter]:
    """Numbers and scales: what has a row for each expert."""
    return {name: p for name, p in layer.named_parameters() if p.numel()}


def poison(tensor: torch.Tensor) -> None:
    """NaN, and for whole numbers -1 or the largest."""
    tensor.view(torch.uint8).fill_(255)


def poison_all(layer: Any) -> None:
    """Every row that has memory; of virtual memory, mapped slots' numbers."""
    memory = getattr(layer, "esft_memory", None)
    mapped = sorted(memory.mapped_slots()) if isinstance(memory, VirtualMemory) else None
    for name, parameter in per_expert(layer).items():
        if mapped is None or "scale" in name:
            poison(parameter.data)
            continue
        for slot in mapped:
            poison(parameter.data[slot])


def lengthen(layer: Any, num_slots: int) -> None:
    """To so many rows, the new ones poisoned, and one more before the first and behind the last."""
    for parameter in per_expert(layer).values():
        around = parameter.data.new_empty(num_slots + 2, *parameter.shape[1:])
        poison(around)
        around[1 : 1 + len(parameter)] = parameter.data
        parameter.data = around[1:-1]


class Woven:
    """A case's layer, woven as in a server. Base and adapters are what a server makes of parts."""

    def __init__(self, case: QuantisedCase) -> None:
        self.case = case
        module = case.load(case.base.chosen(*range(NUM_EXPERTS)))
        self.block = Block(Routing(), module)
        model = torch.nn.ModuleList([self.block])
        layers = build.bind_layers(model, case.spec)
        self.tags = BatchTags(MAX_TOKENS, "cpu")
        build.attach_rerouting(model, layers, self.tags, "fused")
        self.layer = layers[LAYER_ID]

    def place(self, slot: int, number: int) -> None:
        shard = self.layer.shard
        parts = self.case.quantised(self.case.adapter(number))
        here = {
            expert: lay_out(parts[expert], self.case.rounding, shard.intermediate)
            for expert in parts
            if expert in shard.expert_ids
        }
        self.layer.place(slot, here, TUNED[number])

    def displace(self, slot: int) -> None:
        self.layer.displace(slot)

    def run(
        self, batch: tuple[torch.Tensor, torch.Tensor], slots: int | list[int], **options: Any
    ) -> torch.Tensor:
        return run_tagged(self, batch, slots, options)


class Slots:
    """A case's layer over slots, in the woven runner core, and nothing else of a server's."""

    def __init__(self, case: QuantisedCase) -> None:
        self.case = case
        self.layer = case.load(case.base.chosen(*range(NUM_EXPERTS)))
        self.block = Block(Routing(), self.layer)
        here = self.layer.num_local_experts
        self.layout = SlotLayout.plan(
            num_base=here,
            num_routed=here,
            num_adapters=MAX_ADAPTERS,
            max_experts_per_adapter=MAX_EXPERTS,
        )
        lengthen(self.layer, self.layout.num_slots)
        self.first = case.rank.ep_rank * here
        row = base_row(
            num_experts=NUM_EXPERTS,
            num_routed_global=NUM_EXPERTS,
            num_routed_local=here,
            ep_rank=case.rank.ep_rank,
        )
        self.expert_map = ExpertMap(row, self.layout, "cpu")
        self.tags = BatchTags(MAX_TOKENS, "cpu")
        reroute = load_reroute("fused", torch.device("cpu"))
        rerouter = Rerouter(self.expert_map, self.tags, reroute, None)
        runner_core.install(self.layer, self.layout, rerouter)
        self.layer.dispatcher.skip_local_expert_mapping = True

    def slots_of(self, slot: int, number: int) -> dict[int, int]:
        """Where an adapter's experts of this rank go: expert id -> slot."""
        own = range(self.first, self.first + self.layout.num_base)
        here = [expert for expert in TUNED[number] if expert in own]
        return dict(zip(here, self.layout.adapter_range(slot), strict=False))

    def place(self, slot: int, number: int) -> None:
        """Adapter `number` of the case into an adapter slot, as SGLang loads it."""
        loaded = per_expert(self.case.load(self.case.adapter(number)))
        expert_to_slot = self.slots_of(slot, number)
        for name, parameter in per_expert(self.layer).items():
            for expert, row in expert_to_slot.items():
                parameter.data[row] = loaded[name].data[expert - self.first]
        self.expert_map.write(slot, expert_to_slot)

    def displace(self, slot: int) -> None:
        own = self.layout.adapter_range(slot)
        self.expert_map.clear(slot)
        for parameter in per_expert(self.layer).values():
            poison(parameter.data[own.start : own.stop])

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        return {n: p.data for n, p in per_expert(self.layer).items() if "scale" in n}

    @contextmanager
    def scales_of(self, name: str, rows: Mapping[int, int | None]) -> Iterator[None]:
        """Inside, a slot of `rows` has the scale of another slot there, or nobody's (None)."""
        scale = self.scales[name]
        kept = scale.clone()
        for slot, other in rows.items():
            if other is None:
                poison(scale[slot : slot + 1])
            else:
                scale[slot] = kept[other]
        try:
            yield
        finally:
            scale.copy_(kept)

    def run(
        self, batch: tuple[torch.Tensor, torch.Tensor], slots: int | list[int], **options: Any
    ) -> torch.Tensor:
        return run_tagged(self, batch, slots, options)


def run_tagged(
    layer: Slots | Woven,
    batch: tuple[torch.Tensor, torch.Tensor],
    slots: int | list[int],
    options: dict[str, Any],
) -> torch.Tensor:
    """`slots`: each token's adapter slot, or one for all."""
    num_tokens = len(batch[0])
    tags = [slots] * num_tokens if isinstance(slots, int) else slots
    layer.tags.set(torch.tensor(tags, dtype=torch.int32))
    result: torch.Tensor = layer.block(*batch, **options)
    return result
