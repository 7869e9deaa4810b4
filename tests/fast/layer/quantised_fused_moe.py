"""SGLang's quantised FusedMoE, woven, against that of the merged and then quantised checkpoint.

    python -m tests.fast.layer.quantised_fused_moe virtual|padded SCHEME...  ->  JSON, by scheme,
    which test_quantised_layer.py judges

As real_fused_moe.py, with the parts that `sgl-esft quantise` writes for parameters: SGLang's own
quantisation config, method and loader. The plain layers run before the weaving hooks are installed.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig
from sgl_esft.formats.expert_scheme import ExpertScheme
from sgl_esft.formats.model_spec import PROJS, MoeSpec
from sgl_esft.plugin import build, hook_table
from sgl_esft.quant.rounding import Parts, quantise_expert
from sgl_esft.quant.scheme_settings import settings_of
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_memory import VirtualMemory
from sgl_esft.weave.moe_layer import ExpertWeights, WovenLayer
from sgl_esft.weave.quantised_experts import lay_out
from tests.fast.layer.real_fused_moe import compare, enter, forward, refusal
from tests.fast.layer.test_quantised_layer import (
    HIDDEN,
    LAYER_ID,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    NUM_TOKENS,
    RANKS,
    SCHEMES,
    TOP_K,
    TUNED,
    WIDTHS,
    slots_of,
)
from tests.support.random_layers import RandomExperts, Rank

DTYPE = torch.bfloat16
QUANTIZATIONS = {"int4": "moe_wna16", "int8": "w8a8_int8"}
WhichParts = dict[int, Mapping[Any, Parts]]  # expert id -> gate, up and down


def quantised(experts: RandomExperts, scheme: ExpertScheme) -> WhichParts:
    """Whole experts as the checkpoint has them."""
    found: WhichParts = {}
    for expert in range(NUM_EXPERTS):
        gate, up = experts.w13[expert].chunk(2)
        weights = dict(zip(PROJS, (gate, up, experts.w2[expert]), strict=True))
        found[expert] = quantise_expert(weights, scheme)
    return found


def become(rank: Rank) -> None:
    """As `enter`; MoeWNA16Method asks where the ranks' tensors are, too."""
    from sglang.srt.runtime_context import get_parallel

    enter(rank)
    world = rank.ep_size * rank.tp_size
    get_parallel().override_permanently(tp_group=SimpleNamespace(world_size=world, device="cpu"))


def make_layer(parts: WhichParts, scheme: ExpertScheme, rank: Rank, *, leave_out: str = "") -> Any:
    """SGLang's layer of that rank, filled by its own loader; a tensor of `leave_out` is missing."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization import get_quantization_config

    become(rank)
    kind = get_quantization_config(QUANTIZATIONS.get(scheme.name, "fp8"))
    prefix = f"model.layers.{LAYER_ID}.mlp.experts"
    layer = FusedMoE(
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTHS[scheme.name],
        layer_id=LAYER_ID,
        top_k=TOP_K,
        params_dtype=DTYPE,
        quant_config=kind.from_config({**settings_of(scheme), "packed_modules_mapping": {}}),
        prefix=prefix,
    )
    spoil(layer)
    parameters = {f"{prefix}.{name}": p for name, p in layer.named_parameters()}
    names = ("gate_proj", "down_proj", "up_proj")
    mapping = FusedMoE.make_expert_params_mapping(*names, NUM_EXPERTS)
    for expert, of_expert in parts.items():
        for proj, of_proj in of_expert.items():
            for suffix, tensor in of_proj.items():
                name = f"{prefix}.{expert}.{proj}_proj.{suffix}"
                if name.endswith(leave_out) and leave_out:
                    continue
                found = next(entry for entry in mapping if entry[1] in name)
                target = name.replace(found[1], found[0])
                parameter = parameters[target]
                parameter.weight_loader(parameter, tensor, target, found[3], found[2])
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def spoil(layer: Any) -> None:
    """Numbers that nobody wrote, in every row that has memory."""
    memory = getattr(layer, "esft_memory", None)
    for name, parameter in layer.named_parameters():
        if "scale" in name or not parameter.numel():
            continue
        rows: Iterable[int] = range(len(parameter))
        if isinstance(memory, VirtualMemory):
            rows = memory.mapped_slots()
        for row in rows:
            bits(parameter.data[row]).fill_(0x5A)


def row_of(layer: Any, scheme: ExpertScheme, expert: int) -> ExpertWeights:
    """What SGLang's loader and processing left of a routed expert of this rank."""
    from sgl_esft.weave.expert_parameters import PARAMETERS

    row = expert - layer.moe_ep_rank * layer.num_local_experts
    return ExpertWeights(*(getattr(layer, n).data[row] for n in PARAMETERS[scheme.name].names))


def same(first: ExpertWeights, second: ExpertWeights) -> bool:
    pairs = zip(first.tensors, second.tensors, strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Case:
    """One rank: what the merged layers hold and give."""

    def __init__(self, scheme: ExpertScheme, rank: Rank) -> None:
        self.scheme, self.rank = scheme, rank
        width = WIDTHS[scheme.name]
        draws = [RandomExperts.draw(NUM_EXPERTS, HIDDEN, width, i, DTYPE) for i in range(5)]
        every = [quantised(draw, scheme) for draw in draws]
        self.base = every[0]
        # Merged first, then quantised, as somebody who knows nothing of adapters would.
        merged = [draws[0].merged(d.chosen(*i)) for d, i in zip(draws[1:], TUNED, strict=True)]
        self.adapters = [
            {e: parts[e] for e in ids} for parts, ids in zip(every[1:], TUNED, strict=True)
        ]
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(DTYPE)
        logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
        weights, ids = logits.softmax(dim=-1).topk(TOP_K)
        self.batch = (hidden, weights, ids.to(torch.int32))
        self.plain = [make_layer(self.base, scheme, rank)]
        self.plain += [make_layer(quantised(experts, scheme), scheme, rank) for experts in merged]
        self.expected = [forward(layer, self.batch) for layer in self.plain]
        self.alone = [
            torch.cat([forward(layer, self.token(t)) for t in range(NUM_TOKENS)])
            for layer in self.plain
        ]

    def token(self, number: int) -> Any:
        return tuple(each[number : number + 1] for each in self.batch)


class Woven:
    """The same rank, woven: the base, and adapters 0 to 2 side by side."""

    def __init__(self, case: Case) -> None:
        self.case = case
        width, scheme = WIDTHS[case.scheme.name], case.scheme
        self.spec = MoeSpec(
            "DeepseekV2ForCausalLM", 4, (LAYER_ID,), NUM_EXPERTS, HIDDEN, width, "bfloat16", scheme
        )
        self.module = make_layer(case.base, scheme, case.rank)
        model = torch.nn.ModuleList([self.module])
        layers = build.bind_layers(model, self.spec)
        self.layer: WovenLayer = layers[LAYER_ID]
        self.tags = BatchTags(NUM_TOKENS, "cpu")
        build.attach_rerouting(model, layers, self.tags, "fused")
        for slot in range(MAX_ADAPTERS):
            self.place(slot, slot)

    def place(self, slot: int, adapter: int) -> None:
        shard = self.layer.shard
        own = {
            expert: lay_out(parts, self.case.scheme, shard.intermediate)
            for expert, parts in self.case.adapters[adapter].items()
            if expert in shard.expert_ids
        }
        self.layer.place(slot, own)

    def run(self, slots: list[int], batch: Any = None) -> torch.Tensor:
        """Tokens of these adapter slots, -1 = base."""
        self.tags.set(torch.tensor(slots, dtype=torch.int32))
        return forward(self.module, batch or self.case.batch)

    def compare(self) -> dict[str, str]:
        case, whole = self.case, NUM_TOKENS
        found = {
            f"adapter in slot {slot}": compare(self.run([slot] * whole), case.expected[slot + 1])
            for slot in range(MAX_ADAPTERS)
        }
        found["base"] = compare(self.run([-1] * whole), case.expected[0])
        slots = slots_of(whole)
        wanted = torch.stack([case.alone[slot + 1][t] for t, slot in enumerate(slots)])
        alone = [self.run([slot], case.token(t)) for t, slot in enumerate(slots)]
        found["each token alone"] = compare(torch.cat(alone), wanted)
        mixed = self.run(slots)
        if case.scheme.name in ("int8", "int4"):  # whose kernels treat each token by itself
            found["mixed batch"] = compare(mixed, wanted)
        else:
            is_close = torch.allclose(mixed.float(), wanted.float(), rtol=2e-2, atol=2e-2)
            found["mixed batch"] = "equal" if is_close else compare(mixed, wanted)
        self.layer.displace(1)
        self.place(1, 3)
        found["another adapter in slot 1"] = compare(self.run([1] * whole), case.expected[4])
        for slot in range(MAX_ADAPTERS):
            self.layer.displace(slot)
        found["base after unloading"] = compare(self.run([0] * whole), case.expected[0])
        self.layer.check_integrity()
        return found

    def slots_as_loaded(self) -> bool:
        """Every adapter's slot holds what SGLang's loader puts into the merged layer's row."""
        scheme = self.case.scheme
        placed = [
            same(self.layer.at(slot), row_of(self.case.plain[adapter + 1], scheme, expert))
            for adapter in range(MAX_ADAPTERS)
            for expert, slot in self.experts_in(adapter).items()
        ]
        return all(placed) and bool(placed)

    def experts_in(self, adapter_slot: int) -> dict[int, int]:
        """Expert id -> slot."""
        own = sorted(set(self.case.adapters[adapter_slot]) & set(self.layer.shard.expert_ids))
        return dict(zip(own, self.layer.adapter_runs[adapter_slot], strict=True))


def scales_of(layer: WovenLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.scales is not None
    return layer.scales


def with_wrong_scales(woven: Woven) -> dict[str, str]:
    """What comparing says where a slot's scales are another's: of a neighbour, of the base."""
    everything = [slot for slot in range(MAX_ADAPTERS) for _ in woven.experts_in(slot)]
    assert everything
    kept = [scale.clone() for scale in scales_of(woven.layer)]
    found = {}

    def judge(name: str) -> None:
        seen = [woven.run([slot] * NUM_TOKENS) for slot in range(MAX_ADAPTERS)]
        wanted = woven.case.expected[1:]
        found[name] = ", ".join(compare(a, b) for a, b in zip(seen, wanted, strict=False))
        for scale, right in zip(scales_of(woven.layer), kept, strict=True):
            scale.copy_(right)

    for number, name in enumerate(("w13", "w2")):
        scale = scales_of(woven.layer)[number]
        scale.copy_(scale.nan_to_num(1.0).roll(1, dims=0))
        judge(f"{name} scales off by one slot")
        for slot in range(MAX_ADAPTERS):
            for expert, row in woven.experts_in(slot).items():
                first = woven.layer.shard.expert_ids[0]  # type: ignore[index]
                scale[row] = scale[expert - first]
        judge(f"{name} scales of the base's experts")
    judge("right again")
    return found


def what_is_left(woven: Woven) -> dict[str, bool]:
    """Scales of slots that hold nothing are NaN: before, beside and after an adapter."""
    layer = woven.layer

    def is_nan(slots: set[int]) -> bool:
        rows = sorted(slots)
        return all(bool(scale[rows].isnan().all()) for scale in scales_of(layer))

    everything = set(range(layer.layout.num_slots))
    found = {"beside": is_nan(everything - layer.mapped_slots)}
    run = set(layer.adapter_runs[0])
    found["written"] = not any(is_nan({slot}) for slot in layer.mapped_slots)
    layer.displace(0)
    found["after"] = bool(run) and is_nan(run)
    failing = lay_out(woven.case.adapters[0][0], woven.case.scheme, layer.shard.intermediate)
    expert = next(iter(layer.shard.expert_ids))
    bad = {expert: failing, expert + 1: replace(failing, w2=failing.w2[:-1])}
    found["failed"] = "InvariantError" in refusal(lambda: layer.place(0, bad))
    found["after a failure"] = is_nan(everything - layer.mapped_slots)
    return found


def refusals(woven: Woven) -> dict[str, str]:
    """Experts and layers that must not be taken."""
    case, layer = woven.case, woven.layer
    scheme, shard = case.scheme, layer.shard
    expert = lay_out(case.adapters[0][0], scheme, shard.intermediate)
    slot = layer.adapter_runs[0][0]
    write: Callable[[ExpertWeights], Any] = functools.partial(layer.write, slot)
    numbers = torch.zeros(expert.w13.shape, dtype=torch.bfloat16)
    part = next(iter(scheme.parts((HIDDEN, HIDDEN))[1:])).suffix
    other = None if scheme.name != "int8" else SCHEMES["fp8-tensor"]
    return {
        "no scales": refusal(lambda: write(ExpertWeights(expert.w13, expert.w2))),
        "one scale": refusal(lambda: write(replace(expert, w2_scale=None))),
        "not quantised": refusal(lambda: write(replace(expert, w13=numbers))),
        "one scale for all rows": refusal(
            lambda: write(replace(expert, w2_scale=torch.ones(1, 1, 1, 1)))
        ),
        "base without a scale": refusal(
            lambda: build.bind_layers(
                torch.nn.ModuleList(
                    [make_layer(case.base, scheme, case.rank, leave_out=f".1.down_proj.{part}")]
                ),
                woven.spec,
            )
        ),
        "another scheme": refusal(
            lambda: build.bind_layers(
                torch.nn.ModuleList([make_layer(case.base, scheme, case.rank)]),
                replace(woven.spec, scheme=other),
            )
        ),
    }


def counted(woven: Woven) -> dict[str, Any]:
    """Bytes, as the layer says and as its tensors are."""
    layer, usage = woven.layer, woven.layer.memory.usage()
    slots = layer.layout.num_slots
    scales = sum(scale.nbytes for scale in scales_of(layer))
    return {
        "slot_bytes": layer.slot_bytes,
        "of tensors": (layer.w13.nbytes + layer.w2.nbytes + scales) // slots,
        "used": usage.used_bytes,
        "mapped slots": len(layer.mapped_slots),
        "mapped": usage.mapped_bytes,
        "scales": scales,
    }


def results_of(cases: Sequence[Case]) -> dict[str, Any]:
    """All that is found of a scheme; `cases`: of every rank, made before weaving."""
    return {
        "loaded": {str(case.rank): Woven(case).slots_as_loaded() for case in cases},
        "comparisons": {str(case.rank): Woven(case).compare() for case in cases},
        "differ": len({str(e.float().sum().item()) for e in cases[0].expected}),
        "wrong scales": with_wrong_scales(Woven(cases[0])),
        "left": what_is_left(Woven(cases[0])),
        "refusals": refusals(Woven(cases[0])),
        "counted": counted(Woven(cases[0])),
    }


def main() -> None:
    memory, *schemes = sys.argv[1:]
    hook_ledger.install(hook_table.CPU_HOOKS)
    cases = {
        name: [Case(SCHEMES[name], rank) for group in RANKS.values() for rank in group]
        for name in schemes
    }
    config = EsftConfig(MAX_ADAPTERS, MAX_EXPERTS, expert_memory=memory)  # type: ignore[arg-type]
    config.export()
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    results = {name: results_of(cases[name]) for name in schemes}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    with torch.no_grad():
        main()
