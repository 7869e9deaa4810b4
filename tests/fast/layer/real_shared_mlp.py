"""SGLang's shared experts with adapters' weights, against SGLang's with merged weights.

    python -m tests.fast.layer.real_shared_mlp  ->  JSON, which test_shared_experts.py judges

In one process: a module reads its place among ranks off SGLang's runtime context and sums up
nothing itself, so any rank of any degree can be built here, one after the other. Each module is
filled by its own loader from whole tensors; adapters are read from folders by the rank's own code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from sgl_esft import hook_ledger
from sgl_esft.errors import EsftError
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import PROJS, MoeSpec, read_moe_spec
from sgl_esft.plugin import hook_table, shared_experts
from sgl_esft.weave import page_source
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.host_cache import read_adapter
from sgl_esft.weave.moe_layer import ExpertShard
from sgl_esft.weave.shared_mlp import SharedMlp, SharedMlps
from tests.fast.layer import real_fused_moe
from tests.support.adapter_factory import write_random_adapter, write_random_base
from tests.support.random_layers import Rank

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "moe_intermediate_size": 32, "vocab_size": 300}
RANKS = {"one rank": [Rank()], "TP2": [Rank(tp_rank=r, tp_size=2) for r in range(2)]}
ARCHITECTURES = ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM")
TUNED = {"both": (1, 2), "one": (2,), "none": ()}  # adapter -> layers whose shared experts it has
# Of a mixed batch's 24 tokens: base, base, then the slots of "both", "one" and "none".
MIXED = [-1, -1, 0, 1, 2, 0] * 4

Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def become(rank: Rank) -> None:
    from sglang.srt.runtime_context import get_parallel

    real_fused_moe.enter(rank)
    group = SimpleNamespace(rank_in_group=rank.tp_rank, world_size=rank.tp_size)
    get_parallel().override_permanently(tp_group=group)


class Case:
    """One base, its adapters and one rank."""

    def __init__(self, folder: Path, architecture: str, dtype: str, rank: Rank) -> None:
        self.base = folder / f"{architecture}-{dtype}"
        self.rank = rank
        if not self.base.exists():
            write_random_base(self.base, architecture, seed=1, dtype=dtype, **SMALL)
            for seed, (name, layers) in enumerate(TUNED.items()):
                experts = {1: (0,), 2: (1,)}
                write_random_adapter(
                    self.base / name, self.base, seed + 2, experts, shared_layers=layers
                )
        self.spec = read_moe_spec(self.base)
        self.tags = BatchTags(64, "cpu")
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(len(MIXED), self.spec.hidden_size, generator=generator)
        self.hidden = hidden.to(getattr(torch, dtype))

    @torch.no_grad()
    def module(self, layer_id: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        """SGLang's module of this rank, of these tensors by their names in a checkpoint."""
        become(self.rank)
        made = _module_class(self.spec)(
            hidden_size=self.spec.hidden_size,
            intermediate_size=self.spec.shared_intermediate_size,
            hidden_act="silu",
            reduce_results=False,
        ).to(self.hidden.dtype)
        gate, up, down = (tensors[self.spec.shared_tensor_name(layer_id, p)] for p in PROJS)
        w13, w2 = made.gate_up_proj.weight, made.down_proj.weight
        w13.weight_loader(w13, gate, 0)
        w13.weight_loader(w13, up, 1)
        w2.weight_loader(w2, down)
        return made

    def merged(self, name: str | None) -> dict[int, torch.Tensor]:
        """Each layer's output for the whole batch where an adapter is written into the base."""
        tensors = load(self.base) | ({} if name is None else load(self.base / name))
        return {each: self.run(self.module(each, tensors)) for each in self.spec.moe_layer_ids}

    @torch.no_grad()
    def run(self, module: Any) -> torch.Tensor:
        result: torch.Tensor = module(self.hidden.clone())
        return result

    def woven(self) -> Woven:
        tensors = load(self.base)
        layers = self.spec.moe_layer_ids
        return Woven(self, {layer: self.module(layer, tensors) for layer in layers})


class Woven:
    """The base's modules, bound as in a server."""

    def __init__(self, case: Case, modules: Mapping[int, Any]) -> None:
        self.case, self.modules = case, modules
        model = model_of(modules)
        found = shared_experts.bind_shared(model, case.spec, case.tags, torch.device("cpu"))
        assert found.refusal is None, found.refusal
        self.mlps: SharedMlps = found

    def place(self, name: str, slot: int) -> None:
        manifest = read_manifest(self.case.base / name, self.case.spec)
        shards = dict.fromkeys(self.modules, ExpertShard((), range(1)))
        adapter = read_adapter(name, manifest, shards, shared=self.mlps.rows)
        for layer, weights in adapter.shared.items():
            self.mlps.layers[layer].place(slot, weights)

    def displace(self, slot: int) -> None:
        for layer in self.mlps.layers.values():
            layer.displace(slot)

    def run(self, slots: list[int]) -> dict[int, torch.Tensor]:
        self.case.tags.set(torch.tensor(slots, dtype=torch.int32))
        return {layer: self.case.run(module) for layer, module in self.modules.items()}


def _module_class(spec: MoeSpec) -> Any:
    if spec.architecture == "Qwen2MoeForCausalLM":
        from sglang.srt.models.qwen2_moe import Qwen2MoeMLP

        return Qwen2MoeMLP
    from sglang.srt.models.deepseek_v2 import DeepseekV2MLP

    return DeepseekV2MLP


def model_of(modules: Mapping[int, Any], num_fused: int = 0) -> torch.nn.Module:
    """Blocks as a model has them, with routed experts that nothing here asks for."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    model = torch.nn.Module()
    for layer_id, module in modules.items():
        experts = FusedMoE.__new__(FusedMoE)
        torch.nn.Module.__init__(experts)
        experts.layer_id, experts.num_fused_shared_experts = layer_id, num_fused
        block = torch.nn.Module()
        block.experts, block.shared_experts = experts, module
        model.add_module(f"block-{layer_id}", block)
    return model


def compare(seen: Mapping[int, torch.Tensor], expected: Mapping[int, torch.Tensor]) -> str:
    wrong = [layer for layer in seen if not torch.equal(seen[layer], expected[layer])]
    return "equal" if not wrong else f"layers {wrong} differ"


def comparisons(case: Case) -> Iterator[tuple[str, str]]:
    expected = {name: case.merged(name) for name in (*TUNED, None)}
    woven = case.woven()

    def all_of(slot: int) -> dict[int, torch.Tensor]:
        return woven.run([slot] * len(MIXED))

    yield "before any", compare(all_of(0), expected[None])
    for slot, name in enumerate(TUNED):
        woven.place(name, slot)
    for slot, name in enumerate(TUNED):
        yield f"all of {name}", compare(all_of(slot), expected[name])
    yield "all of the base", compare(all_of(-1), expected[None])
    mixed = woven.run(MIXED)
    names = [*TUNED, None]  # a slot's adapter; -1 is the last: the base
    by_row = {
        layer: torch.stack([expected[names[slot]][layer][row] for row, slot in enumerate(MIXED)])
        for layer in mixed
    }
    yield "mixed", compare(mixed, by_row)
    woven.displace(0)
    yield "an empty slot", compare(all_of(0), expected[None])
    yield "its neighbour", compare(all_of(1), expected["one"])
    woven.place("one", 0)
    yield "another in the slot", compare(all_of(0), expected["one"])
    woven.displace(0)
    woven.displace(1)
    yield "after all have left", compare(all_of(1), expected[None])
    forwards = {"forward" in module.__dict__ for module in woven.modules.values()}
    yield "nothing hooked then", "equal" if forwards == {False} else "still hooked"
    differing = [
        compare(expected["both"], expected[None]),
        compare(expected["one"], expected[None]),
    ]
    told = differing == ["layers [1, 2] differ", "layers [2] differ"]
    yield "adapters change the output", "equal" if told else str(differing)


def refusals(case: Case) -> dict[str, str]:
    """What loading an adapter that tunes shared experts says, of models that cannot."""
    modules = case.woven().modules
    manifest = read_manifest(case.base / "both", case.spec)
    cpu = torch.device("cpu")

    def said(model: torch.nn.Module, device: torch.device = cpu) -> str:
        found = shared_experts.bind_shared(model, case.spec, case.tags, device)
        try:
            found.check("math", manifest)
        except EsftError as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"

    packed = {1: modules[1], 2: torch.nn.Linear(2, 2)}
    wide = {1: modules[1], 2: _other_width(case)}
    found = {
        "fine": said(model_of(modules)),
        "fused": said(model_of(modules, num_fused=1)),
        "other device": said(model_of(modules), torch.device("meta")),
        "another layer": said(model_of({1: modules[1]})),
        "packed": said(model_of(packed)),
        "other width": said(model_of(wide)),
    }
    page_source.install(SimpleNamespace(num_sources=1))  # type: ignore[arg-type]
    found["elastic"] = said(model_of(modules))
    return found


def _other_width(case: Case) -> Any:
    return _module_class(case.spec)(
        hidden_size=case.spec.hidden_size,
        intermediate_size=2 * case.spec.shared_intermediate_size,
        hidden_act="silu",
        reduce_results=False,
    )


def shapes_are_checked(case: Case) -> bool:
    """A rank's part of another size must not be broadcast or cut."""
    mlps = case.woven().mlps
    mlp: SharedMlp = mlps.layers[1]
    manifest = read_manifest(case.base / "both", case.spec)
    shards = dict.fromkeys(mlps.layers, ExpertShard((), range(1)))
    half = dict.fromkeys(mlps.layers, range(len(mlp.rows) // 2))
    weights = read_adapter("both", manifest, shards, shared=half).shared[1]
    try:
        mlp.place(0, weights)
    except EsftError:
        return not mlp.held_slots
    return False


def main() -> None:
    hook_ledger.install(hook_table.CPU_HOOKS)
    with tempfile.TemporaryDirectory() as name:
        results: dict[str, Any] = {"comparisons": {}}
        for architecture in ARCHITECTURES:
            for dtype in ("float32", "bfloat16"):
                for rank in (each for group in RANKS.values() for each in group):
                    case = Case(Path(name), architecture, dtype, rank)
                    results["comparisons"][f"{architecture} {dtype} {rank}"] = dict(
                        comparisons(case)
                    )
        case = Case(Path(name), ARCHITECTURES[0], "float32", Rank())
        results["shapes_are_checked"] = shapes_are_checked(case)
        results["refusals"] = refusals(case)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
