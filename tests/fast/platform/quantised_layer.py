"""SGLang's FusedMoE with a quantised checkpoint's experts, loaded and computed on the CPU platform.

    python -m tests.fast.platform.quantised_layer FOLDER...  ->  JSON, which
    test_quantised_layer.py judges

Config, layer, method, loader, dispatcher and what is done after loading are SGLang's own, with the
platform's hooks. What should come out is computed in float64 from the checkpoint's own tensors.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sgl_esft import hook_ledger
from sgl_esft.errors import EsftError
from sgl_esft.plugin import hook_table
from sgl_esft.weave.slot_layout import SlotLayout
from tests.fast.layer.real_fused_moe import enter
from tests.fast.quant.sglang_reads import Read
from tests.support.random_layers import Rank

NUM_TOKENS, TOP_K = 33, 2
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, weights, ids; [num_tokens, ...]
FILLED = 0xA5  # the bytes of rows that nothing was loaded into


def routed(read: Read) -> Batch:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, read.spec.hidden_size, generator=generator)
    weights = torch.rand(NUM_TOKENS, TOP_K, generator=generator)
    shape = (NUM_TOKENS, TOP_K)
    ids = torch.randint(0, read.spec.num_experts, shape, generator=generator, dtype=torch.int32)
    return hidden.to(getattr(torch, read.spec.dtype)), weights, ids


@torch.no_grad()
def forward(layer: Any, batch: Batch) -> torch.Tensor:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    hidden, weights, ids = batch
    logits = torch.zeros(len(hidden), layer.num_experts)
    found: torch.Tensor = layer(hidden.clone(), StandardTopKOutput(weights, ids.clone(), logits))
    return found


def exact(read: Read, batch: Batch) -> torch.Tensor:
    """In float64."""
    experts = [
        [read.expected(e, *projs).double() for projs in (("gate",), ("up",), ("down",))]
        for e in range(read.spec.num_experts)
    ]
    hidden, weights, ids = batch
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for t, x in enumerate(hidden.double()):
        for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            gate, up, down = experts[e]
            out[t] += weight * (down @ (gate @ x / (1 + (-(gate @ x)).exp()) * (up @ x)))
    return out


def places(layer: Any) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in layer.named_parameters() if p.numel()}


def with_room(layer: Any) -> Any:
    """Rows behind the base's, as a woven layer has, which must be left alone."""
    num_base = layer.num_local_experts
    layer.esft_layout = SlotLayout(num_base, num_base, 1, 2)
    for parameter in layer.parameters():
        if parameter.numel():
            longer = torch.zeros(num_base + 2, *parameter.shape[1:], dtype=parameter.dtype)
            longer.view(torch.uint8).fill_(FILLED)
            longer[:num_base] = parameter.data
            parameter.data = longer
    return layer


def is_left_alone(layer: Any) -> bool:
    """Of the large tensors; small ones may be made anew."""
    names = ("w13_weight", "w2_weight", "w13_qweight", "w2_qweight")
    found = [getattr(layer, name) for name in names if hasattr(layer, name)]
    rest = [tensor.data[layer.esft_layout.num_base :].view(torch.uint8) for tensor in found]
    return len(rest) == 2 and all(bool((each == FILLED).all()) for each in rest)


def token_of(batch: Batch, token: int) -> Batch:
    hidden, weights, ids = (part[token : token + 1] for part in batch)
    return hidden, weights, ids


def error_of_two_scales(read: Read) -> float:
    """Of w13's values, relative, where up's scale is 1.5 times gate's and SGLang keeps one."""
    layer = read.load()
    layer.w13_weight_scale.data[:, 1] *= 1.5
    before = values_of(layer, layer.w13_weight_scale.data)
    layer.quant_method.process_weights_after_loading(layer)
    after = values_of(layer, layer.w13_weight_scale.data[:, None].expand(-1, 2))
    is_normal = before.abs() > layer.w13_weight_scale.data.max() * 2**-6
    return float(((after - before).abs() / before.abs())[is_normal].max())


def values_of(layer: Any, scales: torch.Tensor) -> torch.Tensor:
    halves: torch.Tensor = layer.w13_weight.data.float().unflatten(1, (2, -1))
    return halves * scales[:, :, None, None]


def report(folder: Path) -> dict[str, Any]:
    from sgl_esft.platform import operators, quantised_layers

    read = Read(folder)
    layer = read.load()
    before = places(layer)
    layer.quant_method.process_weights_after_loading(layer)
    operators.check_registered(layer.quant_method)
    quantised_layers.check_method("experts", layer.quant_method)
    batch = routed(read)
    seen, wanted = forward(layer, batch), exact(read, batch)
    longer = with_room(read.load())
    longer.quant_method.process_weights_after_loading(longer)
    alone = torch.cat([forward(layer, token_of(batch, t)) for t in range(9)])
    found = {
        "method": type(layer.quant_method).__name__,
        "moved": sorted(n for n, place in places(layer).items() if place != before[n]),
        "shapes": {n: list(p.shape) for n, p in layer.named_parameters() if p.numel()},
        "error": float(((seen.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()),
        "output": str(seen.dtype),
        "rest is left alone": is_left_alone(longer),
        "same with room": torch.equal(forward(longer, batch), seen),
        "same alone": torch.equal(alone, seen[:9]),
    }
    if read.scheme.name == "fp8-tensor":
        found["rounded anew"] = error_of_two_scales(read)
    return found


def refusal(action: Any) -> str:
    try:
        action()
    except EsftError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def refusals() -> dict[str, str]:
    """Of what SGLang's configurations make of a model that is quantised in other ways."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

    from sgl_esft.platform import cpu_hooks, operators, quantised_layers

    linear, experts = LinearBase(1, 1), FusedMoE.__new__(FusedMoE)
    fp8 = Fp8Config(is_checkpoint_fp8_serialized=True)
    static = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static")
    gptq = {"bits": 8, "sym": True, "group_size": 32, "desc_act": False, "quant_method": "gptq"}
    asked = {
        "fp8 linear": (fp8, linear),
        "int8 linear": (W8A8Int8Config({}), linear),
        "fp8 as it loads": (Fp8Config(), experts),
        "fp8 static": (static, experts),
        "8 bits": (MoeWNA16Config.from_config(gptq), experts),
        "with zero points": (MoeWNA16Config.from_config({**gptq, "sym": False}), experts),
        "fp8 experts": (fp8, experts),
    }
    found = {
        name: refusal(partial(config.get_quant_method, layer, prefix="model.layers.1.q"))
        for name, (config, layer) in asked.items()
    }
    for quantisation in (None, "fp8", "gptq", "awq", "compressed-tensors"):
        config = SimpleNamespace(quantization=quantisation)
        refused = refusal(partial(cpu_hooks.refuse_other_quantisation, config, None))
        found[f"--quantization {quantisation}"] = refused
    kind = type("Fp8MoEMethod", (Fp8MoEMethod,), {"apply": lambda *_: None})
    with mock.patch.dict(quantised_layers.EXPERTS, {kind: lambda _: True}):
        found["another forward"] = refusal(partial(operators.check_registered, kind(fp8)))
    return found


def main() -> None:
    from sglang.srt.runtime_context import get_parallel

    hook_ledger.install(hook_table.CPU_HOOKS)
    enter(Rank())
    here = SimpleNamespace(world_size=1, device="cpu")
    get_parallel().override_permanently(tp_group=here)
    layers = {name: report(Path(name)) for name in sys.argv[1:]}
    sys.stdout.write(json.dumps({"layers": layers, "refusals": refusals()}))


if __name__ == "__main__":
    main()
