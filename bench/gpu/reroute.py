"""Rerouting on a GPU, for bench/gpu/run.py: is it right, what does it cost, how often is it
launched.

tests/fast/kernels/cases.py -> [check] kernels against the definition, exactly
26 calls in a CUDA graph -> [time_calls] microseconds a call, by kind of rerouting
router, rerouting, experts in a CUDA graph -> [launches] kernels of a layer, by kind
the same, then another adapter in its place -> [graph_safety] replayed, not captured again
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.common.layers import ExpertShape, Subject, make_layer, random_experts
from bench.common.pairing import Taken, interleave, ratios
from bench.common.record import spread
from bench.gpu.graph import Captured, capture, timer
from bench.gpu.moe import experts_here
from sgl_esft.weave.moe_layer import WovenLayer
from sgl_esft.weave.slot_layout import SlotLayout
from sgl_esft_kernels import RerouteFunction, choose, reroute_unfused
from sgl_esft_kernels.checks import DEBUG_VARIABLE
from sgl_esft_kernels.route_ref import route_and_reroute as route_by_definition
from sgl_esft_kernels.route_spec import RouterSpec
from sgl_esft_kernels.route_triton import route_and_reroute

GOAL_MICROSECONDS = 1.5  # of the standalone kernel, a layer
LAUNCH, CHAIN, STANDALONE = "smallest launch", "unfused chain", "standalone"
NUM_TUNED = 4  # the first experts, which the adapters of graph_safety replace
PLAIN, FUSED = "plain", "fused router"
ROUTER, TORCH_ROUTER = "router alone", "router in torch"

Figures = dict[str, Any]
# (router logits [num_tokens, M], tags [num_tokens], map [N + 1, M]) -> weights, slot ids
Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    num_cases: int | None  # None = all
    num_layers: int  # calls in one graph
    token_counts: tuple[int, ...]
    num_experts: int
    num_adapters: int
    top_k: int
    rounds: int
    repeats: int
    layout: SlotLayout  # of the layer whose launches are counted
    shape: ExpertShape


FULL = Size(
    num_cases=None,
    num_layers=26,
    token_counts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    num_experts=64,
    num_adapters=20,
    top_k=6,
    rounds=20,
    repeats=20,
    layout=SlotLayout(64, 64, 4, 13),
    shape=ExpertShape(),
)
TINY = Size(
    num_cases=8,
    num_layers=2,
    token_counts=(1, 7),
    num_experts=8,
    num_adapters=3,
    top_k=2,
    rounds=2,
    repeats=1,
    layout=SlotLayout(8, 8, 2, 4),
    shape=ExpertShape(hidden=64, width=48),
)


def kernel_reroute(device: str) -> RerouteFunction:
    """What a server runs on a GPU; on a CPU the same Triton kernel, interpreted."""
    if device == "cuda":
        return choose("triton", "cuda")
    from sgl_esft_kernels.reroute_triton import launch_reroute

    return launch_reroute


def top_k_route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router in torch: softmax, then the best k. Ids are int32."""
    weights, ids = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    return weights, ids.to(torch.int32)


@dataclass(frozen=True)
class BaseRows:
    """What makes the fused router a router alone: the identity as map, no adapter as tag."""

    tags: torch.Tensor  # [most tokens] int32, all -1
    table: torch.Tensor  # [1, M] int32

    @classmethod
    def make(cls, num_tokens: int, num_experts: int, device: str) -> BaseRows:
        return cls(
            torch.full((num_tokens,), -1, dtype=torch.int32, device=device),
            torch.arange(num_experts, dtype=torch.int32, device=device).view(1, -1),
        )


def routes(device: str, spec: RouterSpec, base: BaseRows) -> dict[str, Route]:
    """Each way from router logits to slot ids, all by the same router; `plain` stops there."""

    def plain(
        logits: torch.Tensor, _tags: torch.Tensor, _table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route_and_reroute(logits, base.tags[: logits.shape[0]], base.table, spec)

    def behind(reroute: RerouteFunction) -> Route:
        def route(
            logits: torch.Tensor, tags: torch.Tensor, table: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = plain(logits, tags, table)
            return weights, reroute(ids, tags, table, out=ids)

        return route

    return {
        PLAIN: plain,
        CHAIN: behind(reroute_unfused),
        STANDALONE: behind(kernel_reroute(device)),
        FUSED: lambda logits, tags, table: route_and_reroute(logits, tags, table, spec),
    }


def check(subject: Subject, size: Size) -> Figures:
    """Triton against the definition on every case of the tests, and a debug build on bad ids."""
    reroute = kernel_reroute(subject.device)
    found = covering_cases()[: size.num_cases]
    for case in found:
        for in_place in (False, True):
            _compare(reroute, case, subject.device, in_place=in_place)
    routers = router_cases(size)
    for spec, num_tokens in routers:
        _compare_router(spec, num_tokens, subject.device)
    return {
        "cases": len(found),
        "router_cases": len(routers),
        "equal": True,
        "debug_build": check_debug_build(subject),
    }


def _compare(reroute: RerouteFunction, case: Any, device: str, *, in_place: bool) -> None:
    topk_ids, tags, table = case.make(device)
    expected = reroute_unfused(topk_ids, tags, table)
    slot_ids = reroute(topk_ids, tags, table, out=topk_ids if in_place else None)
    if not torch.equal(slot_ids, expected):
        raise RuntimeError(f"case {case}, in place {in_place}: other slot ids than the definition")


def router_cases(size: Size) -> list[tuple[RouterSpec, int]]:
    """Routers of the served models, at some numbers of tokens."""
    specs = (
        v2_lite_router(6),
        RouterSpec(top_k=8, renormalize=True),
        RouterSpec(6, num_expert_groups=8, topk_groups=3, renormalize=False),
        RouterSpec(8, "sigmoid", has_bias=True, num_expert_groups=8, topk_groups=4),
    )
    counts = (1, 3, 133, 4096) if size.num_cases is None else (1, 3)
    return [(spec, num_tokens) for spec in specs for num_tokens in counts]


def v2_lite_router(top_k: int) -> RouterSpec:
    """DeepSeek-V2-Lite's: softmax, no groups, no renormalising."""
    return RouterSpec(top_k, renormalize=False)


def _compare_router(spec: RouterSpec, num_tokens: int, device: str) -> None:
    """Ids exactly, weights closely. Scores lie apart, so that no rounding decides a choice."""
    num_experts, num_adapters = 64, 5
    generator = torch.Generator().manual_seed(num_tokens)
    ranks = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=-1)
    logits = (ranks / 16 - 2).to(device)
    bias = torch.arange(num_experts, device=device) / 4096 if spec.has_bias else None
    tags = torch.randint(-1, num_adapters, (num_tokens,), generator=generator)
    table = torch.arange((num_adapters + 1) * num_experts, dtype=torch.int32, device=device)
    inputs = (logits, tags.to(device, torch.int32), table.view(-1, num_experts), spec, bias)
    weights, slot_ids = route_and_reroute(*inputs)
    expected_weights, expected_ids = route_by_definition(*inputs)
    if not torch.equal(slot_ids, expected_ids):
        raise RuntimeError(f"{spec}, {num_tokens} tokens: other slot ids than the definition")
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def covering_cases() -> list[Any]:
    """tests/fast/kernels/cases.py, also where hypothesis is not installed: no strategy is used."""
    try:
        importlib.import_module("hypothesis")
    except ImportError:
        absent = types.ModuleType("hypothesis")
        absent.strategies = types.ModuleType("hypothesis.strategies")  # type: ignore[attr-defined]
        absent.strategies.composite = lambda strategy: strategy
        sys.modules["hypothesis"] = absent
    found: list[Any] = importlib.import_module("tests.fast.kernels.cases").cases()
    return found


_BAD_ID = """
import torch
from bench.gpu.reroute import kernel_reroute
ids, tags, table = (torch.zeros(each, dtype=torch.int32, device={device!r}) for each in (
    (4, 2), (4,), (3, 5)))
ids[1, 1] = 5
print("answered", kernel_reroute({device!r})(ids, tags, table).tolist())
"""


def check_debug_build(subject: Subject) -> str:
    """A process of its own: a device assertion ends it. Raises RuntimeError if it answers."""
    if subject.device != "cuda":
        return "not tried: Triton's interpreter has none"
    done = subprocess.run(
        [sys.executable, "-c", _BAD_ID.format(device=subject.device)],
        env={**os.environ, DEBUG_VARIABLE: "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 0 or "out of range" not in done.stderr + done.stdout:
        said = (done.stdout + done.stderr)[-400:]
        raise RuntimeError(f"a debug build did not refuse an id out of range: {said}")
    return "refused an id out of range"


@dataclass(frozen=True)
class Inputs:
    """What one layer's rerouting reads; each layer has its own."""

    logits: torch.Tensor  # [num_tokens, M] float32
    topk_ids: torch.Tensor  # [num_tokens, k] int32
    slot_ids: torch.Tensor  # [num_tokens, k] int32, written
    table: torch.Tensor  # [N + 1, M] int32


def make_inputs(size: Size, num_tokens: int, device: str) -> tuple[list[Inputs], torch.Tensor]:
    """The layers' inputs, and the step's tags [num_tokens] int32."""
    generator = torch.Generator().manual_seed(num_tokens)
    tags = torch.randint(-1, size.num_adapters, (num_tokens,), generator=generator)
    cells = torch.arange((size.num_adapters + 1) * size.num_experts, dtype=torch.int32)
    layers = []
    for _ in range(size.num_layers):
        logits = torch.randn(num_tokens, size.num_experts, generator=generator).to(device)
        ids = top_k_route(logits, size.top_k)[1]
        table = cells.view(-1, size.num_experts).to(device, copy=True)
        layers.append(Inputs(logits, ids, torch.empty_like(ids), table))
    return layers, tags.to(device, torch.int32)


def time_calls(subject: Subject, size: Size) -> Figures:
    """One call a layer in a graph; a GPU's figures are microseconds a call, warm and cold."""
    rows = [_time_row(subject, size, num_tokens) for num_tokens in size.token_counts]
    return {"goal_microseconds": GOAL_MICROSECONDS, "calls_a_graph": size.num_layers, "rows": rows}


def _time_row(subject: Subject, size: Size, num_tokens: int) -> Figures:
    layers, tags = make_inputs(size, num_tokens, subject.device)
    base = BaseRows.make(num_tokens, size.num_experts, subject.device)
    graphs = {
        name: capture(partial(_each, layers, partial(call, tags)), subject.device)
        for name, call in _calls(subject.device, size.top_k, base).items()
    }
    row: Figures = {"num_tokens": num_tokens}
    for cold in (False, True) if subject.device == "cuda" else (False,):
        runs = {name: timer(each, size.repeats, is_cold=cold) for name, each in graphs.items()}
        taken = interleave(runs, size.rounds)
        row["cold_l2" if cold else "warm_l2"] = _by_kind(taken, size, subject.device)
    return row


def _calls(
    device: str, top_k: int, base: BaseRows
) -> dict[str, Callable[[torch.Tensor, Inputs], torch.Tensor]]:
    """By name: (tags, a layer's inputs) -> something that the call has written."""
    kernel, spec = kernel_reroute(device), v2_lite_router(top_k)
    return {
        LAUNCH: lambda _tags, layer: layer.slot_ids.add_(1),
        CHAIN: lambda tags, layer: reroute_unfused(layer.topk_ids, tags, layer.table),
        STANDALONE: lambda tags, layer: kernel(
            layer.topk_ids, tags, layer.table, out=layer.slot_ids
        ),
        TORCH_ROUTER: lambda _tags, layer: top_k_route(layer.logits, top_k)[1],
        ROUTER: lambda _tags, layer: route_and_reroute(layer.logits, base.tags, base.table, spec)[
            1
        ],
        FUSED: lambda tags, layer: route_and_reroute(layer.logits, tags, layer.table, spec)[1],
    }


def _each(layers: Iterable[Inputs], call: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
    return [call(layer) for layer in layers][-1]


def _by_kind(taken: Mapping[str, list[Taken]], size: Size, device: str) -> Figures:
    """Over the unfused chain everywhere; absolute only on a GPU."""
    found: Figures = {"over_unfused_chain": {}}
    for name, runs in taken.items():
        found["over_unfused_chain"][name] = ratios(runs, taken[CHAIN])["wall"]
    if device == "cuda":
        calls = {
            name: [run.wall * 1e6 / size.num_layers for run in runs] for name, runs in taken.items()
        }
        pairs = zip(calls[FUSED], calls[ROUTER], strict=True)
        calls["fused router minus router"] = [fused - alone for fused, alone in pairs]
        found["microseconds_a_call"] = {name: spread(each) for name, each in calls.items()}
    return found


@dataclass(frozen=True)
class LayerStep:
    """A MoE layer's path over static buffers: router, rerouting, experts."""

    layer: WovenLayer
    hidden: torch.Tensor  # [num_tokens, H]
    logits: torch.Tensor  # [num_tokens, M] float32
    tags: torch.Tensor  # [num_tokens] int32
    compute: Callable[..., torch.Tensor]

    def run(self, route: Route) -> torch.Tensor:
        """[num_tokens, H]."""
        weights, slot_ids = route(self.logits, self.tags, self.layer.expert_map.table)
        return self.compute(self.hidden, weights, slot_ids, self.layer.w13, self.layer.w2)


def make_step(subject: Subject, size: Size, num_tokens: int = 8) -> LayerStep:
    """A layer of virtual memory with the base's experts, no adapter yet, and a batch for it."""
    layer = make_layer(subject, size.layout, size.shape, subject.open_arena())
    base = range(size.layout.num_base)
    layer.memory.map(base)
    for slot, weights in zip(base, random_experts(len(base), size.shape, 1).values(), strict=True):
        layer.w13[slot].copy_(weights.w13)
        layer.w2[slot].copy_(weights.w2)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(num_tokens, size.shape.hidden, generator=generator)
    logits = torch.randn(num_tokens, size.layout.num_routed, generator=generator)
    logits[:, :NUM_TUNED] += 4.0  # so that each token goes to some of them, and a change is seen
    tags = torch.full((num_tokens,), -1, dtype=torch.int32)
    device = subject.device
    return LayerStep(
        layer,
        hidden.to(device, torch.bfloat16),
        logits.to(device),
        tags.to(device),
        experts_here().compute,
    )


def _routes_of(step: LayerStep, size: Size) -> dict[str, Route]:
    num_tokens, num_experts = step.logits.shape
    device = step.logits.device.type
    base = BaseRows.make(num_tokens, num_experts, device)
    return routes(device, v2_lite_router(size.top_k), base)


def launches(subject: Subject, size: Size) -> Figures:
    """Kernels that one MoE layer launches by each route; null where there is no GPU to count on."""
    step = make_step(subject, size)
    nodes = {
        name: capture(partial(step.run, route), subject.device).nodes
        for name, route in _routes_of(step, size).items()
    }
    figures: Figures = {"experts": experts_here().name, "nodes_a_layer": nodes}
    if plain := nodes[PLAIN]:
        figures["kernels_more_than_plain"] = {
            name: found["kernel"] - plain["kernel"] for name, found in nodes.items() if found
        }
    return figures


def graph_safety(subject: Subject, size: Size) -> Figures:
    """Captured with an adapter; then other tags, that adapter evicted, another one loaded."""
    changes: Figures = {}
    for name in (CHAIN, STANDALONE, FUSED):
        step = make_step(subject, size)
        route = _routes_of(step, size)[name]
        step.layer.place(0, _adapter(size, range(3), seed=3))
        step.tags[::2] = 0
        captured = capture(partial(step.run, route), subject.device)
        changes[name] = _replay_after_changes(captured, step, route, size)
    return {"experts": experts_here().name, "replayed_as_eager": changes}


def _replay_after_changes(
    captured: Captured, step: LayerStep, route: Route, size: Size
) -> list[str]:
    """The changes that a replay followed. Raises RuntimeError at the first that it did not."""
    layer, followed = step.layer, []
    before = _replayed(captured)
    for name, change in {
        "as captured": lambda: None,
        "other tags": lambda: step.tags.copy_(step.tags.roll(1)),
        "adapter evicted": lambda: layer.displace(0),
        "another adapter loaded": lambda: layer.place(0, _adapter(size, range(1, 4), seed=4)),
        "a second adapter": lambda: layer.place(1, _adapter(size, range(2), seed=5)),
        "tags of both": lambda: step.tags.fill_(1),
    }.items():
        change()
        layer.check_integrity()
        after = _replayed(captured)
        if not torch.equal(after, step.run(route)):
            raise RuntimeError(f"{name}: the replayed graph answers otherwise than eager code")
        # A second adapter that no tag names changes nothing; all other changes must show.
        if name not in ("as captured", "a second adapter") and torch.equal(after, before):
            raise RuntimeError(f"{name}: the replayed graph did not see it")
        before = after
        followed.append(name)
    return followed


def _replayed(captured: Captured) -> torch.Tensor:
    captured.replay()
    return captured.result.clone()


def _adapter(size: Size, ids: range, seed: int) -> dict[int, Any]:
    """Experts `ids`, of fresh weights: of the first NUM_TUNED, which the router chooses."""
    weights = random_experts(len(ids), size.shape, seed)
    return dict(zip(ids, weights.values(), strict=True))
