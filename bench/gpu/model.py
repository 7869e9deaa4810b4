"""A decode step of DeepSeek-V2-Lite's shape without SGLang, for bench/gpu/run.py: woven over
merged.

    config.json, expert configs -> [make_models] -> merged (plain memory), woven (virtual memory)
    each in a CUDA graph by batch size and kind of rerouting -> adapters' tags and router logits
    written into its buffers -> replays in turns -> woven over merged, minus the floor

Weights are random. The merged model is adapter 0's, and the woven one must answer tokens of
adapter 0 as it does. Attention is left out but for its matmuls, and norms
stand for what SGLang fuses around them. The floor is counted: the bytes of the trunk and of the
slots that the very batch touches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench.common.layers import DTYPE, ExpertShape, Subject, make_layer
from bench.common.pairing import Taken, interleave, ratios
from bench.common.record import spread
from bench.gpu import checkpoint, plan
from bench.gpu.graph import Captured, capture, timer
from bench.gpu.moe import Experts, experts_here
from bench.gpu.reroute import PLAIN, BaseRows, Route, routes, v2_lite_router
from sgl_esft.formats.adapter_config import read_expert_config
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
PUBLISHED = ("gate-intent", "gate-law", "token-intent", "token-law")
GOAL_ONE = 0.005  # one adapter over merged
GOAL_POINTS = 0.03  # twenty adapters over merged, minus the floor
# Tuned experts are hotter: with this bonus about a fifth of all selections go to an adapter's own.
TUNED_BONUS = 1.0
PAGE_BYTES = 2 << 20  # of the driver
ROUNDING = 0.05  # of logits after 26 layers in bfloat16; another expert would give about 1

Figures = dict[str, Any]
Tuned = Mapping[int, Sequence[int]]  # layer id -> expert ids


@dataclass(frozen=True)
class Size:
    """The model, the batches, and how often each is measured."""

    config: Mapping[str, Any]  # of config.json
    adapters: tuple[Tuned, ...]
    num_adapters: int  # they repeat up to so many
    adapter_counts: tuple[int, ...]  # that a batch uses; 0 = the base only
    token_counts: tuple[int, ...]
    rounds: int

    @property
    def moe_layers(self) -> range:
        return range(self.config["first_k_dense_replace"], self.config["num_hidden_layers"])

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.config["hidden_size"], self.config["moe_intermediate_size"])

    @property
    def layout(self) -> SlotLayout:
        most = max(len(ids) for tuned in self.adapters for ids in tuned.values())
        num_experts = self.config["n_routed_experts"]
        return SlotLayout(num_experts, num_experts, self.num_adapters, most)

    def tuned(self, adapter: int, layer_id: int) -> tuple[int, ...]:
        """Expert ids, ascending."""
        return tuple(sorted(self.adapters[adapter % len(self.adapters)].get(layer_id, ())))


def full_size(free: int | None = None) -> Size:
    """DeepSeek-V2-Lite and the published adapters, repeated up to 20 as the paper does.

    Of as many layers as both models have room for in `free` bytes; None = all. Raises
    DoesNotFitError.
    """
    size = _whole_size()
    if free is None:
        return size
    wanted = size.config["num_hidden_layers"]
    fitting = plan.layers_of_two_models(free, wanted, planned(size))
    return replace(size, config={**size.config, "num_hidden_layers": fitting})


def planned(size: Size) -> plan.Model:
    """What each model takes; the trunk that both share is counted twice, to be safe."""
    trunk, layer = checkpoint.bytes_by_layer({**checkpoint.SERVED, **size.config})
    tuned = [
        sum(len(size.tuned(n, at)) for n in range(size.num_adapters)) for at in size.moe_layers
    ]
    # A run of slots may begin and end inside a page of 2 MiB, in both tensors.
    edges = 4 * size.num_adapters * PAGE_BYTES
    return plan.Model(trunk, layer, [n * size.shape.num_bytes + edges for n in tuned], kv=0)


def _whole_size() -> Size:
    return Size(
        config=json.loads((DATA / "deepseek-v2-lite.json").read_text()),
        adapters=tuple(read_expert_config(DATA / "esft" / f"{n}.json") for n in PUBLISHED),
        num_adapters=20,
        adapter_counts=(0, 1, 5, 10, 20),
        token_counts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 1024),
        rounds=12,
    )


def tiny_size(_free: int | None = None) -> Size:
    """The same model with less of everything."""
    config = json.loads((DATA / "deepseek-v2-lite.json").read_text())
    small = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "qk_rope_head_dim": 8,
    }
    adapters: tuple[Tuned, ...] = ({1: (0, 3), 2: (1,)}, {1: (2,), 2: (0, 5, 7)})
    return Size({**config, **small}, adapters, 3, (1, 3), (5,), 2)


@dataclass(frozen=True)
class Trunk:
    """Weights that every token reads, by layer and name; all [out, in] in bfloat16."""

    layers: tuple[Mapping[str, torch.Tensor], ...]
    head: torch.Tensor

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for layer in self.layers for tensor in layer.values()]
        return sum(tensor.nbytes for tensor in (*tensors, self.head))


def make_trunk(config: Mapping[str, Any], device: str) -> Trunk:
    """Random weights of the model's sizes, without the embedding: a step reads few rows of it."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    rank = config["kv_lora_rank"]
    attention = {
        "q": (heads * (nope + rope), hidden),
        "kv_a": (rank + rope, hidden),
        "kv_b": (heads * (nope + value), rank),
        "o": (hidden, heads * value),
    }
    layers = []
    for layer_id in range(config["num_hidden_layers"]):
        is_dense = layer_id < config["first_k_dense_replace"]
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        width = config["intermediate_size"] if is_dense else shared
        shapes = {**attention, "gate_up": (2 * width, hidden), "down": (hidden, width)}
        if not is_dense:
            shapes["router"] = (config["n_routed_experts"], hidden)
        layers.append({name: _random(shape, device) for name, shape in shapes.items()})
    return Trunk(tuple(layers), _random((config["vocab_size"], hidden), device))


def _random(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device).mul_(shape[-1] ** -0.5)


@dataclass(frozen=True)
class Model:
    """A trunk with its MoE layers: merged on plain memory, or woven on virtual memory."""

    trunk: Trunk
    layers: Mapping[int, WovenLayer]  # layer id -> layer
    experts: Experts


@dataclass(frozen=True)
class Buffers:
    """What a captured step reads and the bench writes in place."""

    hidden: torch.Tensor  # [num_tokens, H]
    tags: torch.Tensor  # [num_tokens] int32
    logits: Mapping[int, torch.Tensor]  # layer id -> [num_tokens, M] float32


def make_models(subject: Subject, size: Size) -> tuple[Model, Model]:
    """(merged with adapter 0, woven with all adapters), of the same weights."""
    trunk, experts = make_trunk(size.config, subject.device), experts_here()
    arena, layout = subject.open_arena(), size.layout
    alone = SlotLayout(layout.num_base, layout.num_routed, 0, layout.slots_per_adapter)
    merged: dict[int, WovenLayer] = {}
    woven: dict[int, WovenLayer] = {}
    for layer_id in size.moe_layers:
        merged[layer_id] = make_layer(subject, alone, size.shape, None, layer_id)
        woven[layer_id] = make_layer(subject, layout, size.shape, arena, layer_id)
        _fill(woven[layer_id], size)
        _merge(merged[layer_id], woven[layer_id])
    return Model(trunk, merged, experts), Model(trunk, woven, experts)


def _fill(layer: WovenLayer, size: Size) -> None:
    """Map and fill the base's slots and each adapter's, made on the device itself."""
    base = range(layer.layout.num_base)
    layer.memory.map(base)
    _randomise(layer, base)
    for adapter in range(size.num_adapters):
        ids = size.tuned(adapter, layer.layer_id)
        run = layer.memory.choose(layer.layout.adapter_range(adapter), len(ids))
        layer.memory.map(run)
        _randomise(layer, run)
        layer.expert_map.write(adapter, dict(zip(ids, run, strict=True)))


def _randomise(layer: WovenLayer, slots: range) -> None:
    for weights in (layer.w13, layer.w2):
        weights[slots.start : slots.stop].normal_(std=weights.shape[-1] ** -0.5)


def _merge(merged: WovenLayer, woven: WovenLayer) -> None:
    for expert, slot in enumerate(woven.expert_map.table[0].tolist()):
        merged.w13[expert].copy_(woven.w13[slot])
        merged.w2[expert].copy_(woven.w2[slot])


def decode_step(model: Model, buffers: Buffers, route: Route) -> torch.Tensor:
    """[num_tokens, vocabulary]."""
    hidden = buffers.hidden
    for layer_id, weights in enumerate(model.trunk.layers):
        hidden = hidden + _attention(_norm(hidden), weights)
        normed = _norm(hidden)
        hidden = hidden + _mlp(normed, weights)
        if layer_id in model.layers:
            F.linear(normed, weights["router"])  # for its time: the choice must be the bench's
            hidden = hidden + _experts(model, layer_id, normed, buffers, route)
    return F.linear(_norm(hidden), model.trunk.head)


def _experts(
    model: Model,
    layer_id: int,
    hidden: torch.Tensor,
    buffers: Buffers,
    route: Route,
) -> torch.Tensor:
    layer = model.layers[layer_id]
    weights, slot_ids = route(buffers.logits[layer_id], buffers.tags, layer.expert_map.table)
    return model.experts.compute(hidden, weights, slot_ids, layer.w13, layer.w2)


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, hidden.shape[-1:])


def _mlp(hidden: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    gate, up = F.linear(hidden, weights["gate_up"]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights["down"])


def _attention(hidden: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Its matmuls; the KV cache is neither written nor read."""
    rank, width = weights["kv_b"].shape[1], weights["o"].shape[1]
    query = F.linear(hidden, weights["q"])
    latent = F.linear(hidden, weights["kv_a"])[:, :rank]
    value = F.linear(latent, weights["kv_b"])
    return F.linear(query[:, :width] + value[:, :width], weights["o"])


def make_buffers(size: Size, num_tokens: int, device: str) -> Buffers:
    """Zeros to be written by `write_batch`, but for the hidden states."""
    shape = (num_tokens, size.config["n_routed_experts"])
    return Buffers(
        torch.randn(num_tokens, size.config["hidden_size"], dtype=DTYPE, device=device),
        torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
        {layer_id: torch.zeros(shape, device=device) for layer_id in size.moe_layers},
    )


def write_batch(buffers: Buffers, size: Size, num_adapters: int, seed: int) -> None:
    """Another batch into the buffers: tokens take turns among the adapters, 0 = base only."""
    num_tokens = buffers.tags.shape[0]
    generator = torch.Generator().manual_seed(seed)
    tags = torch.arange(num_tokens, dtype=torch.int32) % max(num_adapters, 1)
    buffers.tags.copy_(tags if num_adapters else tags.fill_(-1))
    for layer_id, logits in buffers.logits.items():
        # Gumbel noise: the best k are then k draws without replacement from softmax(bonus).
        noise = torch.rand(logits.shape, generator=generator).clamp_(1e-6, 1 - 1e-6)
        found = -(-noise.log()).log()
        for token, adapter in enumerate(tags.tolist() if num_adapters else ()):
            found[token, list(size.tuned(adapter, layer_id))] += TUNED_BONUS
        logits.copy_(found)


@dataclass(frozen=True)
class Touched:
    """What a batch reads of a model's experts."""

    merged: int  # distinct (layer, expert)
    woven: int  # distinct (layer, slot)
    redirected: float  # share of the selections that go to an adapter's own expert

    def floor_ratio(self, trunk_bytes: int, expert_bytes: int) -> float:
        """Bytes that the woven step must read, over the merged one's."""
        woven = trunk_bytes + self.woven * expert_bytes
        return woven / (trunk_bytes + self.merged * expert_bytes)


def count_touched(buffers: Buffers, woven: Model, top_k: int) -> Touched:
    """Counted by the definition, on the host."""
    merged = total = redirected = distinct = 0
    tags = buffers.tags.cpu().long()
    for layer_id, logits in buffers.logits.items():
        ids = logits.cpu().topk(top_k, dim=-1).indices
        slots = woven.layers[layer_id].expert_map.table.cpu()[tags.unsqueeze(1), ids]
        merged += len(ids.unique())
        distinct += len(slots.unique())
        redirected += int((slots >= logits.shape[1]).sum())
        total += slots.numel()
    return Touched(merged, distinct, redirected / total)


def measure(subject: Subject, size: Size) -> Figures:
    """A row for each number of tokens and of adapters."""
    merged, woven = make_models(subject, size)
    rows = []
    for num_tokens in size.token_counts:
        rows += _rows(subject, size, merged, woven, num_tokens)
    return {
        "experts": merged.experts.name,
        "goal_one_adapter": GOAL_ONE,
        "goal_points_over_floor": GOAL_POINTS,
        "num_layers": len(size.moe_layers),
        "trunk_bytes": merged.trunk.num_bytes,
        "rows": rows,
    }


def _rows(
    subject: Subject, size: Size, merged: Model, woven: Model, num_tokens: int
) -> list[Figures]:
    """All numbers of adapters by the same graphs, only their buffers change."""
    buffers = make_buffers(size, num_tokens, subject.device)
    write_batch(buffers, size, size.num_adapters, seed=0)
    base = BaseRows.make(num_tokens, size.config["n_routed_experts"], subject.device)
    spec = v2_lite_router(size.config["num_experts_per_tok"])
    graphs = {}
    for name, route in routes(subject.device, spec, base).items():
        model = merged if name == PLAIN else woven
        graphs[name] = capture(partial(decode_step, model, buffers, route), subject.device)
    rows = []
    for num_adapters in size.adapter_counts:
        write_batch(buffers, size, num_adapters, seed=num_tokens)
        difference = _difference(graphs) if num_adapters == 1 else {}
        taken = interleave({name: timer(g, 1) for name, g in graphs.items()}, size.rounds)
        touched = count_touched(buffers, woven, size.config["num_experts_per_tok"])
        floor = touched.floor_ratio(merged.trunk.num_bytes, size.shape.num_bytes)
        rows.append(
            {
                "num_tokens": num_tokens,
                "num_adapters": num_adapters,
                "touched_merged": touched.merged,
                "touched_woven": touched.woven,
                "redirected": touched.redirected,
                "floor": floor,
                "logits_off": difference,
                **_over_merged(taken, floor, subject.device),
            }
        )
    return rows


def _difference(graphs: Mapping[str, Captured]) -> dict[str, float]:
    """Each woven model's logits for adapter 0 beside the merged model's, 0 = equal to the bit.

    |difference| / |merged|. Kernels that choose their tiles by the number of slots, as SGLang's do,
    round otherwise. Raises RuntimeError where it is no rounding.
    """
    for each in graphs.values():
        each.replay()
    expected = graphs[PLAIN].result.float()
    found = {}
    for name, each in graphs.items():
        found[name] = float((each.result.float() - expected).norm() / expected.norm())
        if not found[name] < ROUNDING:
            raise RuntimeError(
                f"{name}: one adapter's logits are not the merged model's, off by {found[name]:.3g}"
            )
    return found


def _over_merged(
    taken: Mapping[str, Sequence[Taken]], floor: float, device: str
) -> dict[str, Figures]:
    """By kind of rerouting; microseconds only on a GPU."""
    found: dict[str, Figures] = {"over_merged": {}, "points_over_floor": {}}
    for name, runs in taken.items():
        if name != PLAIN:
            over = ratios(runs, taken[PLAIN])["wall"]
            found["over_merged"][name] = over
            found["points_over_floor"][name] = over["median"] - floor
    if device == "cuda":
        found["microseconds"] = {
            name: spread([run.wall * 1e6 for run in runs]) for name, runs in taken.items()
        }
    return found
