"""SGLang's FusedMoE on an NPU that is simulated: plain, then woven; in one process.

    python -m tests.fast.ascend.npu_layers virtual|padded  ->  JSON, which the tests here judge

The process believes it has an NPU from its first line, so SGLang takes its NPU branches: its own
top-k, AscendTPDispatcher, AscendRunnerCore, NPUUnquantMoEMethod. The plain layers run before
weaving is there. Rerouting is Triton-Ascend's kernel, interpreted.
"""

from __future__ import annotations

import functools
import json
import sys
from types import SimpleNamespace
from typing import Any

from tests.support import npu_simulator

npu_simulator.install()

import torch  # noqa: E402

from sgl_esft import hook_ledger  # noqa: E402
from sgl_esft.config import EsftConfig  # noqa: E402
from sgl_esft.errors import EsftError  # noqa: E402
from sgl_esft.platform.moe import moe_forward  # noqa: E402
from sgl_esft.plugin import build, hook_table  # noqa: E402
from sgl_esft.weave.batch_tags import BatchTags  # noqa: E402
from sgl_esft_kernels.reroute_triton_ascend import launch_reroute  # noqa: E402
from tests.fast.kernels.interpreted import interpreter  # noqa: E402
from tests.fast.layer.real_fused_moe import (  # noqa: E402
    LAYER_ID,
    NUM_TOKENS,
    SPEC,
    compare,
    forward,
    make_layer,
)
from tests.fast.layer.test_woven_layer import (  # noqa: E402
    HIDDEN,
    MAX_ADAPTERS,
    MAX_EXPERTS,
    NUM_EXPERTS,
    RANKS,
    TOP_K,
    TUNED,
    WIDTH,
    draw_batch,
)
from tests.support.npu_simulator import ContractError, format_of  # noqa: E402
from tests.support.npu_simulator.stand_in import treat_cpu_as_npu  # noqa: E402
from tests.support.random_layers import RandomExperts, Rank, share_of  # noqa: E402

ONE = Rank()
DTYPES = (torch.bfloat16, torch.float16)
NUM_CORES = 3


def enter(rank: Rank) -> None:
    """Make this process that rank of a server on NPUs."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    reset_context()
    world = rank.ep_size * rank.tp_size
    args = ServerArgs(model_path="dummy", device="npu", tp_size=world, ep_size=rank.ep_size)
    place = SpawnRanks(world_rank=rank.ep_rank * rank.tp_size + rank.tp_rank)
    publish(args, role="test", ranks=place)
    initialize_moe_config()
    get_parallel().override_permanently(tp_group=SimpleNamespace(world_size=world))


def make(experts: RandomExperts, rank: Rank) -> Any:
    """SGLang's layer as its loader leaves it: filled, then prepared for an NPU."""
    layer = make_layer(experts, rank, enter)
    before = layer.w13_weight.data_ptr()
    layer.quant_method.process_weights_after_loading(layer)
    layer.moved = layer.w13_weight.data_ptr() != before
    return layer


def reroute(*tensors: torch.Tensor) -> torch.Tensor:
    from sgl_esft_kernels.reroute_triton_ascend_kernel import reroute_kernel

    with interpreter():
        return launch_reroute(reroute_kernel, NUM_CORES, *tensors)


class Case:
    """One dtype: the base, its adapters and a batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        draws = [RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, i, dtype) for i in range(5)]
        self.base = draws[0]
        self.adapters = [d.chosen(*ids) for d, ids in zip(draws[1:], TUNED, strict=True)]
        hidden, weights, ids = draw_batch(NUM_TOKENS, dtype)
        self.batch = hidden, weights, ids
        self.merged = [self.base, *(self.base.merged(adapter) for adapter in self.adapters)]

    @functools.cached_property
    def plain(self) -> dict[Rank, list[torch.Tensor]]:
        """Rank -> outputs of SGLang's plain layer: the base, then each adapter merged into it."""
        ranks = [ONE, *RANKS["TP2"]]
        return {r: [forward(make(m, r), self.batch) for m in self.merged] for r in ranks}


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value; NaN when anything is."""
    return ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()


def plain_layer(case: Case) -> dict[str, Any]:
    """What SGLang's NPU code gives beside plain SwiGLU experts; and whether the weights moved."""
    layer = make(case.base, ONE)
    hidden, weights, ids = case.batch
    wanted = moe_forward(hidden, case.base.w13, case.base.w2, weights.to(hidden.dtype), ids)
    parts = [case.plain[rank][0].float() for rank in RANKS["TP2"]]
    return {
        "classes": [
            type(part).__name__
            for part in (layer.dispatcher, layer.runner.runner_core, layer.w13_kernel)
        ],
        "format": format_of(layer.w13_weight.data),
        "moved": layer.moved,
        "one rank": error(case.plain[ONE][0], wanted),
        "TP2": error(torch.stack(parts).sum(0), wanted),
    }


def plain_expert_parallel(case: Case) -> str:
    """SGLang alone counts rows of all experts, where a rank has weights of its own only."""
    try:
        forward(make(case.base, RANKS["EP2"][0]), case.batch)
    except ContractError as refusal:
        return str(refusal)
    return "not refused"


def routing() -> dict[str, bool]:
    """SGLang's own top-k on NPUs gives what its torch version gives."""
    from sglang.srt.layers.moe.topk import TopK

    enter(ONE)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    bias = torch.randn(NUM_EXPERTS, generator=generator)
    kinds: dict[str, dict[str, Any]] = {
        "softmax": {"renormalize": False},
        "softmax, renormalised": {"renormalize": True},
        "sigmoid in groups": {
            **grouped,
            "renormalize": False,
            "scoring_func": "sigmoid",
            "correction_bias": bias,
        },
    }
    found = {}
    for name, options in kinds.items():
        topk = TopK(top_k=TOP_K, layer_id=LAYER_ID, **options)
        found[name] = topk(hidden, logits)
    softmax = logits.softmax(-1).topk(TOP_K)
    weights, ids = softmax.values, softmax.indices
    renormalised = weights / weights.sum(-1, keepdim=True)
    best = found["sigmoid in groups"]
    groups = (best.topk_ids // (NUM_EXPERTS // 4)).sort(-1).values
    return {
        "softmax": torch.equal(found["softmax"].topk_ids.long(), ids)
        and torch.allclose(found["softmax"].topk_weights, weights),
        "softmax, renormalised": torch.allclose(
            found["softmax, renormalised"].topk_weights, renormalised
        ),
        "sigmoid in groups": bool((groups.diff(dim=-1) != 0).sum(-1).le(1).all()),
    }


class Woven:
    """One woven rank and its tags."""

    def __init__(self, base: RandomExperts, rank: Rank, *, attached: bool = True) -> None:
        self.module = make(base, rank)
        self.model = torch.nn.ModuleList([self.module])
        self.layers = build.bind_layers(self.model, SPEC)
        self.tags = BatchTags(NUM_TOKENS, "cpu")
        self.layer = self.layers[LAYER_ID]
        if attached:
            self.attach()

    def attach(self) -> None:
        build.attach_rerouting(self.model, self.layers, self.tags, "fused")

    def place(self, slot: int, adapter: Any) -> None:
        self.layer.place(slot, share_of(adapter, self.layer.shard))

    def run(self, batch: Any, *slots: int) -> torch.Tensor:
        """Tokens take turns among these adapter slots."""
        own = [slots[i % len(slots)] for i in range(NUM_TOKENS)]
        self.tags.set(torch.tensor(own, dtype=torch.int32))
        return forward(self.module, batch)


def expected(case: Case, rank: Rank) -> list[torch.Tensor]:
    """Base and merged adapters on that rank: SGLang's plain layer, where it has one.

    With EP it has none, so there it is a woven layer of merged weights without adapters; the sum
    of those is compared with the plain layer by `expert_parallel_sums`.
    """
    if rank in case.plain:
        return case.plain[rank]
    return [Woven(merged, rank).run(case.batch, -1) for merged in case.merged]


def woven_layer(case: Case, rank: Rank, wanted: list[torch.Tensor]) -> dict[str, str]:
    """Three adapters side by side and in one batch, then another one in slot 1, then none."""
    woven, batch = Woven(case.base, rank), case.batch
    found = {"weights": "moved" if woven.module.moved else "equal"}
    for slot in range(MAX_ADAPTERS):
        woven.place(slot, case.adapters[slot])
    for slot in range(MAX_ADAPTERS):
        found[f"adapter in slot {slot}"] = compare(woven.run(batch, slot), wanted[slot + 1])
    found["base"] = compare(woven.run(batch, -1), wanted[0])
    turns = (-1, 0, 1, 2)
    mixed = torch.stack([wanted[turns[i % 4] + 1][i] for i in range(NUM_TOKENS)])
    found["all in one batch"] = compare(woven.run(batch, *turns), mixed)
    hidden, weights, ids = batch
    holes = ids.clone()
    holes[::2] = -1  # rows that pad a batch have no experts
    padded = mixed.clone()
    padded[::2] = 0
    found["rows without experts"] = compare(woven.run((hidden, weights, holes), *turns), padded)
    woven.layer.displace(1)
    woven.place(1, case.adapters[3])
    found["another adapter in slot 1"] = compare(woven.run(batch, 1), wanted[4])
    for slot in range(MAX_ADAPTERS):
        woven.layer.displace(slot)
    found["base after unloading"] = compare(woven.run(batch, 0), wanted[0])
    # A second look at loaded weights, as after an update, must not bring SGLang's routing back.
    woven.module.quant_method.process_weights_after_loading(woven.module)
    found["prepared again"] = compare(woven.run(batch, -1), wanted[0])
    return found


def woven_layers(case: Case) -> tuple[dict[str, dict[str, str]], dict[str, float]]:
    """By rank, what is not equal; by degree, the ranks' sum beside the plain layer."""
    found, sums = {}, {}
    for degree, ranks in RANKS.items():
        wanted = {rank: expected(case, rank) for rank in ranks}
        for rank in ranks:
            found[f"{rank} {case.base.w13.dtype}"] = woven_layer(case, rank, wanted[rank])
        by_kind = zip(*wanted.values(), strict=True)
        totals = [torch.stack([p.float() for p in parts]).sum(0) for parts in by_kind]
        sums[degree] = max(map(error, totals, case.plain[ONE]))
    return found, sums


def refusal(action: Any) -> str:
    try:
        action()
    except EsftError as refused:
        return f"{type(refused).__name__}: {refused}"
    return "not refused"


def refusals(case: Case) -> dict[str, str]:
    """What cannot be woven on an NPU, or was not shown there."""
    from unittest.mock import patch

    from sglang.srt.runtime_context import get_parallel

    from sgl_esft import config
    from sgl_esft.platform import ascend

    woven = Woven(case.base, ONE, attached=False)

    def with_config(*sizes: int) -> Any:
        changed = EsftConfig(*sizes, expert_memory="virtual")
        with patch("sgl_esft.plugin.weave_hooks.required_config", lambda: changed):
            return refusal(lambda: make(case.base, ONE))

    assert config.current_config() is not None
    found = {
        "slots": with_config(100, 16),
        "float32": refusal(lambda: make(RandomExperts.draw(4, 32, 32, 0, torch.float32), ONE)),
    }
    with get_parallel().override(attn_dp_enabled=True):
        found["dp"] = refusal(woven.attach)
    with patch.object(ascend.page_source, "current", object):
        found["elastic"] = refusal(woven.attach)
    woven.module.w13_kernel = woven.module.w13_kernel.kernel
    found["another core"] = refusal(woven.attach)
    return found


def main() -> None:
    import sglang.srt.layers.moe.fused_moe_triton.layer  # noqa: F401 - first, or imports go round

    treat_cpu_as_npu()
    torch.set_num_threads(1)
    cases = [Case(dtype) for dtype in DTYPES]
    results: dict[str, Any] = {
        "plain": {str(case.base.w13.dtype): plain_layer(case) for case in cases},
        "plain EP2": plain_expert_parallel(cases[0]),
        "routing": routing(),
    }
    EsftConfig(MAX_ADAPTERS, MAX_EXPERTS, expert_memory=sys.argv[1]).export()
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    build.load_reroute = lambda kind, device: reroute
    build.MOE_BACKENDS = {"cpu": {"ascend"}}  # the simulated NPU's tensors are on a CPU
    results["woven"], results["sums"] = {}, {}
    for case in cases:
        found, sums = woven_layers(case)
        results["woven"].update(found)
        results["sums"][str(case.base.w13.dtype)] = sums
    results["refused"] = refusals(cases[0])
    results["adapters change the output"] = all(
        not torch.equal(case.plain[ONE][0], merged)
        for case in cases
        for merged in case.plain[ONE][1:]
    )
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
