"""SGLang's own code over checkpoints that quant/write.py wrote: what it makes of their experts.

    python -m tests.fast.quant.sglang_reads FOLDER...  ->  JSON, which test_write.py judges

Config, FusedMoE, its method's parameters and its loader are SGLang's. What was loaded is
dequantised by SGLang's functions, and for one architecture by its MoE kernel too, which is given
the identity matrix: in Triton's interpreter, which multiplies the bits of float8 and so knows int8
and int4 alone. What should come out is read with our code.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from sgl_esft.formats.expert_scheme import ExpertScheme, read_scheme
from sgl_esft.formats.model_spec import PROJS, MoeSpec, Proj
from sgl_esft.quant.rounding import dequantise
from tests.fast.layer.real_fused_moe import enter
from tests.fast.quant.test_write import LINEARS
from tests.support.random_layers import Rank

LAYER = 1
TOP_K = 2
BY_KERNEL = ("int8", "int4")
TENSORS: dict[str, tuple[Proj, ...]] = {"w13": ("gate", "up"), "w2": ("down",)}
# What the models' classes say, which SGLang writes over what the checkpoint says.
QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LATENTS = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}
JOINED = {"Qwen3MoeForCausalLM": QKV, "DeepseekV3ForCausalLM": LATENTS}


class Read:
    """One checkpoint as SGLang reads it."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.architecture = self.config["architectures"][0]
        plain = {k: v for k, v in self.config.items() if k != "quantization_config"}
        self.spec = MoeSpec.from_config(plain)
        scheme = read_scheme(self.config)
        assert scheme is not None
        self.scheme: ExpertScheme = scheme
        self.tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= load_file(file)
        self.quant_config = self._make_quant_config()

    @property
    def method(self) -> str:
        """--quantization, or what follows from the checkpoint."""
        method: str = self.config["quantization_config"]["quant_method"]
        return "moe_wna16" if self.scheme.name == "int4" else method

    def model_class(self) -> str:
        """The name of the class that SGLang chooses, without importing it and all others."""
        from sglang.srt.configs.model_config import ModelImpl
        from sglang.srt.model_loader.utils import get_model_architecture

        registry: Any = ModuleType("registry")
        registry.ModelRegistry = SimpleNamespace(
            is_arch_supported=lambda _: True,
            resolve_model_cls=lambda names: (object, names[0]),
        )
        sys.modules["sglang.srt.models.registry"] = registry
        model = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=self.config["architectures"]),
            quantization=self.method,
            model_impl=ModelImpl.AUTO,
        )
        name: str = get_model_architecture(model)[1]
        return name

    def _make_quant_config(self) -> Any:
        """As configs/model_config.py chooses it, and model_loader/weight_utils.py makes it."""
        from sglang.srt.layers.quantization import get_quantization_config

        settings = self.config["quantization_config"]
        kind = get_quantization_config(self.method)
        assert kind.override_quantization_method(settings, self.method) in (None, self.method)
        joined = JOINED.get(self.architecture, {})
        return kind.from_config({**settings, "packed_modules_mapping": joined})

    def linears(self) -> dict[str, str]:
        """Linear layer -> class of the method that SGLang gives it."""
        from sglang.srt.layers.linear import LinearBase

        method = self.quant_config.get_quant_method
        return {
            name: type(method(LinearBase(1, 1), f"model.layers.{LAYER}.{name}")).__name__
            for name in LINEARS[self.architecture]
        }

    def others(self) -> set[str]:
        """What the attention kernel, the embedding and the head are given."""
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        method = self.quant_config.get_quant_method
        attention = f"model.layers.{LAYER}.self_attn."
        found = [
            method(kind.__new__(kind), prefix)
            for kind, prefix in (
                (RadixAttention, f"{attention}attn"),
                (RadixAttention, f"{attention}attn_mqa"),
                (VocabParallelEmbedding, "model.embed_tokens"),
                (ParallelLMHead, "lm_head"),
            )
        ]
        return {type(each).__name__ for each in found}

    def load(self) -> Any:
        """FusedMoE with this layer's experts, every tensor through SGLang's names and loader."""
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        expert = self.spec.expert_tensor_name(LAYER, 0, "gate")
        prefix = expert.partition(".experts.")[0]
        layer = FusedMoE(
            num_experts=self.spec.num_experts,
            hidden_size=self.spec.hidden_size,
            intermediate_size=self.spec.expert_intermediate_size,
            layer_id=LAYER,
            top_k=TOP_K,
            params_dtype=getattr(torch, self.spec.dtype),
            quant_config=self.quant_config,
            prefix=f"{prefix}.experts",
        )
        for parameter in layer.parameters():
            parameter.data.view(torch.uint8).fill_(255)  # NaN, or a number that nobody wrote
        parameters = {f"{prefix}.experts.{name}": p for name, p in layer.named_parameters()}
        gate, up, down = (self.spec.expert_tensor_name(0, 0, proj).split(".")[-2] for proj in PROJS)
        mapping = FusedMoE.make_expert_params_mapping(gate, down, up, self.spec.num_experts)
        for name, tensor in self.tensors.items():
            if not name.startswith(f"{prefix}.experts."):
                continue
            found = next(entry for entry in mapping if entry[1] in name)
            target = name.replace(found[1], found[0])
            parameter = parameters[target]
            parameter.weight_loader(parameter, tensor, target, found[3], found[2])
        return layer

    def expected(self, expert: int, *projs: Proj) -> torch.Tensor:
        """Our values of these projections, one above the other."""
        return torch.cat([dequantise(self.parts(expert, proj), self.scheme) for proj in projs])

    def parts(self, expert: int, proj: Proj) -> dict[str, torch.Tensor]:
        stem = self.spec.expert_tensor_name(LAYER, expert, proj).removesuffix("weight")
        parts = self.scheme.parts(self.spec.expert_tensor_shape(proj))
        return {part.suffix: self.tensors[stem + part.suffix] for part in parts}


def by_functions(read: Read, layer: Any, tensor: str, expert: int) -> torch.Tensor:
    """What SGLang's dequantisers make of a loaded expert: float32 [out, in]."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
    from sglang.srt.layers.quantization.int8_utils import block_dequant

    of = partial(getattr, layer)
    if read.scheme.name == "int4":
        packed, scales = of(f"{tensor}_qweight")[expert], of(f"{tensor}_scales")[expert]
        steps = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).float() - 8
        return steps * scales.float().repeat_interleave(layer.group_size, 1)
    weight = of(f"{tensor}_weight")[expert]
    if read.scheme.name == "int8":
        return block_dequant(weight, of(f"{tensor}_weight_scale")[expert], [1, weight.shape[1]])
    if read.scheme.name == "fp8":
        scale = of(f"{tensor}_weight_scale_inv")[expert]
        return block_quant_dequant(weight, scale, [128, 128], torch.float32)
    scale = of(f"{tensor}_weight_scale")[expert]
    if tensor == "w13":
        assert bool(scale[0] == scale[1]), "gate and up have two scales"
        scale = scale[0]
    return weight.float() * scale


def by_kernel(read: Read, layer: Any, tensor: str, expert: int) -> torch.Tensor:
    """What SGLang's MoE kernel multiplies the identity with: float32 [out, in]."""
    import triton.language as tl

    module: Any = import_module("sglang.kernels.ops.moe.fused_moe_triton_kernels")
    is_int4 = read.scheme.name == "int4"
    weight = getattr(layer, f"{tensor}_{'qweight' if is_int4 else 'weight'}").data
    width = weight.shape[2] * (2 if is_int4 else 1)
    identity = torch.eye(width)
    # Whole tokens: their own quantisation is not what is asked here.
    module.per_token_quant_int8 = lambda a: (a.to(torch.int8), torch.ones(width, 1))
    out = torch.full((width, 1, weight.shape[1]), float("nan"))
    block = 16
    module.invoke_fused_moe_kernel(
        identity,
        weight,
        None,
        out,
        None,
        getattr(layer, f"{tensor}_{'scales' if is_int4 else 'weight_scale'}").data,
        None,
        torch.ones(width, 1),
        torch.full((width, 1), expert, dtype=torch.int32),
        torch.arange(width, dtype=torch.int32),
        torch.full((width // block,), expert, dtype=torch.int32),
        torch.tensor([width], dtype=torch.int32),
        False,
        1,
        {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1},
        tl.float32,
        False,
        not is_int4,
        False,
        is_int4,
        not is_int4,
        [0, layer.group_size] if is_int4 else None,
    )
    return out[:, 0].t()


def compare(seen: torch.Tensor, expected: torch.Tensor) -> str:
    if torch.equal(seen, expected):
        return "equal"
    return f"{seen.shape} {expected.shape} {(seen - expected).abs().max()}"


def rounded_again(read: Read, layer: Any) -> str:
    """What Fp8MoEMethod does to one tensor's numbers after loading, which must change none."""
    module: Any = import_module("sglang.srt.layers.quantization.fp8")
    before = layer.w13_weight.data.clone()

    def static_quant(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In the place of sgl_per_tensor_quant_fp8, which is compiled for CUDA."""
        assert x.dtype == torch.float16
        return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    module.scaled_fp8_quant = static_quant
    layer.quant_method.process_weights_after_loading(layer)
    return compare(layer.w13_weight.data.float(), before.float())


def report(folder: Path, with_kernel: bool) -> dict[str, Any]:
    read = Read(folder)
    layer = read.load()
    found: dict[str, Any] = {
        "class": read.model_class(),
        "config": type(read.quant_config).__name__,
        "experts": type(layer.quant_method).__name__,
        "linears": read.linears(),
        "others": sorted(read.others()),
        "functions": sorted(
            {
                compare(by_functions(read, layer, tensor, e), read.expected(e, *projs))
                for tensor, projs in TENSORS.items()
                for e in range(read.spec.num_experts)
            }
        ),
    }
    if with_kernel and read.scheme.name in BY_KERNEL:
        last = read.spec.num_experts - 1
        found["kernel"] = compare(by_kernel(read, layer, "w2", last), read.expected(last, "down"))
    if read.scheme.name == "fp8-tensor":
        found["rounded again"] = rounded_again(read, layer)
    return found


def main() -> None:
    from sglang.srt.runtime_context import get_parallel

    enter(Rank())
    here = SimpleNamespace(world_size=1, device="cpu")
    get_parallel().override_permanently(tp_group=here)
    folders = sys.argv[1:]
    # The interpreter is slow: once for each scheme.
    found = {name: report(Path(name), "DeepseekV2" in name) for name in folders}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
