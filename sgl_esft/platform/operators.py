"""What the CPU platform registers with SGLang: operators of its own, by SGLang's own doors.

    model runner imported -> CpuReferencePlatform.init_backend -> [register]
    FusedMoE -> dispatch -> [forward_experts] -> the layer's runner core -> moe.py -> combine
      quantised: cpu_hooks.py, forward_quantised, for the methods in quantised_layers.py

SGLang's path for a CPU never asks the MoE runner: it calls its native MoE, which fails on expert
id -1 and sizes itself by the layer. `forward_experts` asks the runner as the CUDA path does, so
weaving puts one core in one place on every device.
"""

from __future__ import annotations

from typing import Any

from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sgl_esft.errors import HookError
from sgl_esft.hook_ledger import leads_to
from sgl_esft.platform import cpu_hooks, moe
from sgl_esft.platform.quantised_layers import EXPERTS
from sgl_esft.platform.quantised_moe import experts_of

DISPATCH_KEY = "native"  # CpuReferencePlatform.get_dispatch_key_name
# SGLang chooses the Triton runner for unquantised experts on every device but an NPU.
_RUNNER = MoeRunnerBackend.TRITON.value


class CpuRunnerCore(DispatchMoeRunnerCore):
    """A MoE layer's experts on the CPU; see `sgl_esft.platform.moe`."""

    def __init__(self, config: Any) -> None:
        """Raises UnsupportedModelError for what it does not compute."""
        super().__init__(config)
        moe.check_runner_config(config)

    @property
    def runner_backend(self) -> Any:
        return MoeRunnerBackend.TRITON

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """`quant_info`: PlainExperts, or the TritonMoeQuantInfo of what is quantised."""
        topk_output = dispatch_output.topk_output
        output = moe.weighted_sum(
            dispatch_output.hidden_states,
            experts_of(quant_info),
            topk_output.topk_weights,
            topk_output.topk_ids,
        )
        return StandardCombineInput(hidden_states=output)


def forward_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """UnquantizedFusedMoEMethod on this platform. The core is called as it is: the runner would
    prefer a fused function, which SGLang has for Triton only.
    """
    runner = method.runner
    experts = moe.PlainExperts(layer.w13_weight, layer.w2_weight)
    return runner.runner_core.run_from_dispatch(dispatch_output, experts, runner.config)


class CpuAttentionBackend(TorchNativeAttnBackend):
    """SGLang's torch_native attention, which does not say what DP attention pads a batch with."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Padding rows attend to one token."""
        return 1


def absorbed_mla(attention: Any, forward_batch: Any) -> Any:
    """MLA in its absorbed form, prefill included: SGLang has no handler for torch_native, and its
    fallback takes the MHA path in prefill, whose shapes torch's attention refuses.
    """
    return AttnForwardMethod.MLA


def register() -> None:
    """Once in a process, before a model is made."""
    register_attention_backend("torch_native")(CpuAttentionBackend)
    AttentionBackendRegistry.register("torch_native", absorbed_mla)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, forward_experts, DISPATCH_KEY)
    register_moe_runner_core(_RUNNER, CpuRunnerCore)


def check_registered(method: Any) -> None:
    """A layer's experts go through its runner. Raises HookError: a core there would be ignored."""
    if type(method) in EXPERTS:
        is_right, found = leads_to(type(method).apply, cpu_hooks.forward_quantised), method.apply
    else:
        found = method._resolve_forward_method()
        is_right = getattr(found, "__func__", None) is forward_experts
    if not is_right:
        raise HookError(
            f"{type(method).__name__} runs {found.__qualname__} on the CPU platform, not the "
            "forward that is registered for it, so adapters would be ignored"
        )
