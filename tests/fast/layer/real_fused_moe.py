"""SGLang's FusedMoE, woven, against SGLang's FusedMoE with merged weights; in one process.

    python -m tests.fast.layer.real_fused_moe virtual|padded  ->  JSON, which test_woven_layer.py
    judges

A layer reads its place among ranks off SGLang's runtime context and sums up nothing itself, so any
rank of any TP and EP degree can be built here, one after the other. The plain layers run before
the weaving hooks are installed, so they are SGLang's own on the CPU platform.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig
from sgl_esft.errors import EsftError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.plugin import build, hook_table
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.expert_memory import VirtualMemory
from tests.fast.layer.test_woven_layer import (
    HIDDEN,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    OTHER_BACKENDS,
    RANKS,
    TOP_K,
    TUNED,
    WIDTH,
    Adapter,
    Routed,
    draw_batch,
)
from tests.support.random_layers import RandomExperts, Rank, share_of

LAYER_ID = 3
NUM_TOKENS = 48
REROUTE = "fused"
SPEC = MoeSpec("DeepseekV2ForCausalLM", 4, (LAYER_ID,), NUM_EXPERTS, HIDDEN, WIDTH, "float32")


class Case:
    """One rank and one dtype: the weights, the batch, and what the merged layers gave."""

    def __init__(self, rank: Rank, dtype: torch.dtype) -> None:
        self.rank, self.dtype = rank, dtype
        draws = [RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, i, dtype) for i in range(5)]
        self.base = draws[0]
        self.adapters = [d.chosen(*ids) for d, ids in zip(draws[1:], TUNED, strict=True)]
        self.batch = draw_batch(NUM_TOKENS, dtype)
        self.expected_base = self._plain({})
        self.expected = [self._plain(adapter) for adapter in self.adapters]

    @property
    def name(self) -> str:
        return f"{self.rank} {str(self.dtype).removeprefix('torch.')}"

    def _plain(self, adapter: Adapter) -> torch.Tensor:
        return forward(make_layer(self.base.merged(adapter), self.rank), self.batch)


def enter(rank: Rank, backend: str = "auto") -> None:
    """Make this process that rank, as SGLang's own start does with --moe-runner-backend."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    reset_context()
    world = rank.ep_size * rank.tp_size
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        tp_size=world,
        ep_size=rank.ep_size,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        moe_runner_backend=backend,
    )
    place = SpawnRanks(world_rank=rank.ep_rank * rank.tp_size + rank.tp_rank)
    publish(args, role="test", ranks=place)
    initialize_moe_config()
    get_parallel().override_permanently(tp_group=SimpleNamespace(world_size=world))


def make_layer(experts: RandomExperts, rank: Rank, become: Callable[[Rank], None] = enter) -> Any:
    """SGLang's layer of that rank, filled by its own loader from whole experts."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    become(rank)
    layer = FusedMoE(
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        layer_id=LAYER_ID,
        top_k=TOP_K,
        params_dtype=experts.w13.dtype,
    )
    assert (layer.moe_ep_rank, layer.moe_ep_size) == (rank.ep_rank, rank.ep_size)
    assert (layer.moe_tp_rank, layer.moe_tp_size) == (rank.tp_rank, rank.tp_size)
    fill_with_nan(layer)
    for expert in range(NUM_EXPERTS):
        gate, up = experts.w13[expert].chunk(2)
        load = layer.weight_loader
        load(layer.w13_weight, gate, f"experts.{expert}.gate_proj.weight", "w1", expert)
        load(layer.w13_weight, up, f"experts.{expert}.up_proj.weight", "w3", expert)
        down = experts.w2[expert]
        load(layer.w2_weight, down, f"experts.{expert}.down_proj.weight", "w2", expert)
    return layer


def fill_with_nan(layer: Any) -> None:
    """Every row that has memory, so that one which nobody wrote is seen."""
    for parameter in (layer.w13_weight, layer.w2_weight):
        memory = getattr(layer, "esft_memory", None)
        rows = range(len(parameter))
        if isinstance(memory, VirtualMemory):
            rows = sorted(memory.mapped_slots())
        for row in rows:
            parameter.data[row].fill_(float("nan"))


@torch.no_grad()
def forward(layer: Any, batch: Routed) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    hidden, weights, ids = batch
    logits = torch.zeros(len(hidden), NUM_EXPERTS)
    result: torch.Tensor = layer(hidden.clone(), StandardTopKOutput(weights, ids.clone(), logits))
    return result


def compare(seen: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(seen, expected):
        return "equal"
    wrong = (seen != expected).any(dim=1).sum().item()
    return f"{wrong} of {len(seen)} rows differ, by up to {(seen - expected).abs().max().item()}"


def compare_woven(case: Case) -> dict[str, str]:
    """Adapters 0 to 2 side by side, the base among them, then another adapter in slot 1."""
    module = make_layer(case.base, case.rank)
    model = torch.nn.ModuleList([module])
    layers = build.bind_layers(model, SPEC)
    tags = BatchTags(NUM_TOKENS, "cpu")
    build.attach_rerouting(model, layers, tags, REROUTE)
    woven = layers[LAYER_ID]

    def run(slot: int) -> torch.Tensor:
        tags.set(torch.full((NUM_TOKENS,), slot, dtype=torch.int32))
        return forward(module, case.batch)

    for slot in range(MAX_ADAPTERS):
        woven.place(slot, share_of(case.adapters[slot], woven.shard))
    found = {
        f"adapter in slot {slot}": compare(run(slot), case.expected[slot])
        for slot in range(MAX_ADAPTERS)
    }
    found["base"] = compare(run(-1), case.expected_base)
    woven.displace(1)
    woven.place(1, share_of(case.adapters[3], woven.shard))
    found["another adapter in slot 1"] = compare(run(1), case.expected[3])
    for slot in range(MAX_ADAPTERS):
        woven.displace(slot)
    found["base after unloading"] = compare(run(0), case.expected_base)
    return found


def refusal(action: Any) -> str:
    """What an action that must be refused says."""
    try:
        action()
    except EsftError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals_of_a_woven_layer(case: Case) -> dict[str, str]:
    module = make_layer(case.base, case.rank)
    model = torch.nn.ModuleList([module])
    layers = build.bind_layers(model, SPEC)
    tags = BatchTags(NUM_TOKENS, "cpu")
    build.attach_rerouting(model, layers, tags, REROUTE)
    found = {
        "other_layers": refusal(lambda: build.bind_layers(torch.nn.ModuleList(), SPEC)),
        "no_ids": refusal(lambda: module(case.batch[0], SimpleNamespace())),
    }
    module = make_layer(case.base, case.rank)
    module.dispatcher = object()
    model = torch.nn.ModuleList([module])
    found["foreign_dispatcher"] = refusal(
        lambda: build.attach_rerouting(model, layers, tags, REROUTE)
    )
    return found


def refusals_of_backends(base: RandomExperts) -> dict[str, str]:
    """What binding says to a layer that SGLang made for that backend."""
    found = {}
    for backend in OTHER_BACKENDS:
        model = torch.nn.ModuleList(
            [make_layer(base, Rank(), functools.partial(enter, backend=backend))]
        )
        found[backend] = refusal(functools.partial(build.bind_layers, model, SPEC))
    return found


def main() -> None:
    hook_ledger.install(hook_table.CPU_HOOKS)
    ranks = [rank for group in RANKS.values() for rank in group]
    cases = [Case(rank, dtype) for rank in ranks for dtype in (torch.float32, torch.bfloat16)]
    plain = make_layer(cases[0].base, Rank())
    without_slots = refusal(lambda: build.bind_layers(torch.nn.ModuleList([plain]), SPEC))

    EsftConfig(MAX_ADAPTERS, MAX_EXPERTS, expert_memory=sys.argv[1]).export()
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    results = {
        "comparisons": {case.name: compare_woven(case) for case in cases},
        "adapters_change_the_output": all(
            not torch.equal(case.expected_base, expected)
            for case in cases
            for expected, ids in zip(case.expected, TUNED, strict=True)
            if case.rank.ep_size == 1 or len({i * 2 // NUM_EXPERTS for i in ids}) == 2
        ),
        "without_slots": without_slots,
        **refusals_of_a_woven_layer(cases[0]),
        **refusals_of_backends(cases[0].base),
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
