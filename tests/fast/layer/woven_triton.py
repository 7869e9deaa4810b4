"""What a woven layer asks of SGLang's CUDA path, on CPU tensors; in one process.

    python -m tests.fast.layer.woven_triton  ->  JSON, which test_woven_triton.py judges

SGLang's own layer, dispatcher, runner, configuration lookup and preparation run; of the path only
the compiled alignment and the kernels are missing here, and note how they are called instead. That
the kernels then compute the right thing is for the interpreted tier to show.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sgl_esft import hook_ledger
from sgl_esft.config import EsftConfig
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.plugin import build, hook_table
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.moe_layer import WovenLayer
from tests.fast.layer.real_fused_moe import refusal
from tests.support.random_layers import RandomExperts, share_of

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 32, 16, 2
MAX_ADAPTERS, MAX_EXPERTS = 2, 3
LAYER_ID = 1
DEVICE = "NVIDIA H100"
TUNED_BLOCK = 32  # what SGLang chooses itself: 16, or 64 for more tokens than experts
SPEC = MoeSpec("DeepseekV2ForCausalLM", 2, (LAYER_ID,), NUM_EXPERTS, HIDDEN, WIDTH, "float32")


def enter(backend: str, ep_size: int) -> None:
    """Make this process the first rank of an expert-parallel group."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    reset_context()
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        tp_size=ep_size,
        ep_size=ep_size,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        moe_runner_backend=backend,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    initialize_moe_config()
    get_parallel().override_permanently(tp_group=SimpleNamespace(world_size=ep_size))


def make_layer(experts: RandomExperts, backend: str = "triton", ep_size: int = 1) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    enter(backend, ep_size)
    layer = FusedMoE(
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        layer_id=LAYER_ID,
        top_k=TOP_K,
        params_dtype=torch.float32,
    )
    for expert in range(NUM_EXPERTS):
        gate, up = experts.w13[expert].chunk(2)
        load = layer.weight_loader
        load(layer.w13_weight, gate, f"experts.{expert}.gate_proj.weight", "w1", expert)
        load(layer.w13_weight, up, f"experts.{expert}.up_proj.weight", "w3", expert)
        down = experts.w2[expert]
        load(layer.w2_weight, down, f"experts.{expert}.down_proj.weight", "w2", expert)
    return layer


def calls_of(run: Callable[[], object]) -> dict[str, Any]:
    """How the path calls the lookup, the alignment and the kernels."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
    from sglang.srt.layers.moe.token_dispatcher import standard

    seen: dict[str, Any] = {}

    def align(topk_ids: torch.Tensor, block_size: int, num_groups: int) -> Any:
        seen.update(block=block_size, groups=num_groups, ids=topk_ids.tolist())
        return topk_ids, topk_ids, topk_ids

    def kernels(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *_: Any, **named: Any):
        seen.update(rows=[len(w13), len(w2)], filters=named["filter_expert"])
        return hidden

    replaced = {
        standard: {"get_device": lambda: "cpu"},
        fused_moe_triton_config: {"get_device_name": lambda: DEVICE},
        fused_moe: {"moe_align_block_size": align, "_fused_moe_kernel_sequence": kernels},
    }
    before = {m: {name: getattr(m, name) for name in names} for m, names in replaced.items()}
    for module, names in replaced.items():
        vars(module).update(names)
    run()
    for module, names in before.items():
        vars(module).update(names)
    fused_moe_triton_config.get_moe_configs.cache_clear()
    return seen


def forward(module: Any, num_tokens: int) -> Callable[[], object]:
    """SGLang's CUDA path of the layer, from the dispatcher on."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.arange(num_tokens * TOP_K, dtype=torch.int32).view(num_tokens, TOP_K) % NUM_EXPERTS
    topk = StandardTopKOutput(torch.ones(num_tokens, TOP_K), ids, torch.zeros(num_tokens, 1))

    def run() -> object:
        dispatched = module.dispatcher.dispatch(torch.zeros(num_tokens, HIDDEN), topk)
        return module.quant_method.forward_cuda(module, dispatched)

    return run


def as_sglang_does(module: Any) -> Any:
    """The layer with SGLang's own runner, less an operator that is registered for CUDA only."""
    module.quant_method.runner.fused_func = None
    return module


def weave(module: Any, kind: str = "fused") -> tuple[WovenLayer, BatchTags]:
    layers = build.bind_layers(torch.nn.ModuleList([module]), SPEC)
    tags = BatchTags(64, "cpu")
    build.attach_rerouting(torch.nn.ModuleList([module]), layers, tags, kind)
    return layers[LAYER_ID], tags


def woven_calls(base: RandomExperts, ep_size: int, num_tokens: int) -> dict[str, Any]:
    """One adapter, with expert 1, for all tokens."""
    module = make_layer(base, ep_size=ep_size)
    sglang = calls_of(forward(as_sglang_does(module), num_tokens))
    layer, tags = weave(module)
    layer.place(0, share_of(base.chosen(1), layer.shard))
    tags.set(torch.zeros(num_tokens, dtype=torch.int32))
    return {"sglang": sglang, "woven": calls_of(forward(module, num_tokens))}


def order_of_rows(base: RandomExperts, backend: str) -> dict[str, Any]:
    """An adapter's copy of an expert against what SGLang has loaded of the same expert."""
    module = make_layer(base, backend)
    layer = WovenLayer.bind(module, module.esft_layout)  # without the check of the backend
    layer.place(0, base.chosen(5))
    slot = layer.adapter_runs[0].start
    return {
        "w13": torch.equal(layer.w13[slot], layer.w13[5]),
        "w2": torch.equal(layer.w2[slot], layer.w2[5]),
        "refusal": refusal(lambda: weave(module)),
    }


def whole_experts(base: RandomExperts) -> dict[str, Any]:
    """Elastic's layout: every expert has a row here, though only some are here."""
    module = make_layer(base)
    sglang = calls_of(forward(as_sglang_does(module), 4))
    layer, _ = weave(module)
    row = layer.expert_map.base_row.clone()
    row[2:] = -1
    layer.expert_map.rebase(row)
    return {"sglang": sglang, "woven": calls_of(forward(module, 4))}


def write_tuned(folder: Path) -> None:
    """A tuned configuration as SGLang keeps them, for the experts of one rank and of one of two."""
    import triton

    place = folder / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    place.mkdir(parents=True)
    blocks = dict.fromkeys(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"), TUNED_BLOCK)
    config = {"1": {**blocks, "GROUP_SIZE_M": 1}}
    for num_experts in (NUM_EXPERTS, NUM_EXPERTS // 2):
        name = (
            f"E={num_experts},N={WIDTH},device_name={DEVICE.replace(' ', '_')},dtype=float32.json"
        )
        (place / name).write_text(json.dumps(config))


def main() -> None:
    base = RandomExperts.draw(NUM_EXPERTS, HIDDEN, WIDTH, 0, torch.float32)
    EsftConfig(MAX_ADAPTERS, MAX_EXPERTS, expert_memory="padded").export()
    hook_ledger.install(hook_table.WEAVE_HOOKS)
    folder, *backends = sys.argv[1:]
    os.environ["SGLANG_MOE_CONFIG_DIR"] = folder
    (Path(folder) / "configs").mkdir()
    results: dict[str, Any] = {
        f"untuned, {num_tokens} tokens": woven_calls(base, 1, num_tokens)
        for num_tokens in (NUM_EXPERTS, NUM_EXPERTS + 1)
    }
    write_tuned(Path(folder))
    results |= {
        "one rank": woven_calls(base, 1, NUM_EXPERTS + 1),
        "EP2": woven_calls(base, 2, NUM_EXPERTS // 2 + 1),
        "whole experts": whole_experts(base),
        "rows": {backend: order_of_rows(base, backend) for backend in backends},
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
