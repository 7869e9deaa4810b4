"""The runner core of a woven MoE layer: expert ids become slots, then the device's own core runs.

    TopK -> SGLang's dispatch (ids unchanged) -> [EsftRunnerCore] -> combine
                                                   | reroute: ids -> slots of this rank, or -1
                                                   v
                                   inner core: the one that SGLang chose for the layer

It enters by SGLang's own door, `register_moe_runner_core`, under a name of its own: SGLang has a
fused function for ("none", "triton") and would call that before a core of the name "triton".

**Another device** needs an entry in `INNER_CORES`: name of SGLang's runner backend -> a function of
(FusedMoE, its runner's core, SlotLayout) that returns an `Inner`. What an inner core owes:
- an id is a slot, so groups are sized by `layout.num_slots`, not by `config.num_experts` (all of
  the model) nor `config.num_local_experts` (SGLang's share of them);
- id -1 is nobody's: its weights must not be read, and it adds nothing to the sum;
- what is tuned or chosen by the number of experts gets `layout.num_base`, as without weaving.
A device whose dispatcher groups tokens by expert before the runner is asked must be rerouted before
that: its function gives the layer a `StandardDispatcher`, which leaves tokens as they are, and lets
the inner core call the device's dispatcher, as `platform/ascend.py` does. A core that takes
`StandardDispatchOutput` itself (a `DispatchMoeRunnerCore`, as the CPU's is) needs no entry.
Nothing here may look at values of tensors: CUDA graphs record the calls once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, PermuteMethodPool
from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

from sgl_esft import platform
from sgl_esft.errors import InvariantError, UnsupportedModelError
from sgl_esft.formats.expert_scheme import GROUP_SIZES, SUPPORTED_SCHEMES
from sgl_esft.platform import ascend, operators
from sgl_esft.weave.expert_memory import VirtualMemory
from sgl_esft.weave.slot_layout import SlotLayout

BACKEND = "esft"

# [num_tokens, k] expert ids -> slot ids, -1 = none here
Reroute = Callable[[torch.Tensor], torch.Tensor]
# (StandardDispatchOutput in slot ids, quant info) -> CombineInput
Inner = Callable[[Any, Any], Any]
# (FusedMoE, the core of its runner, layout)
InnerFactory = Callable[[Any, Any, SlotLayout], Inner]


@dataclass
class WovenRunnerConfig(MoeRunnerConfig):
    """SGLang's configuration of the layer, and what its woven core is made of."""

    inner: Inner | None = None
    reroute: Reroute | None = None  # None: the router has rerouted, ids are slots already
    watch: Callable[[Any], None] | None = None  # sees the top-k output before it is rerouted


class EsftRunnerCore(DispatchMoeRunnerCore):
    """One layer's core."""

    def __init__(self, config: WovenRunnerConfig) -> None:
        super().__init__(config)
        assert config.inner is not None
        self._inner = config.inner
        self._reroute = config.reroute
        self._watch = config.watch

    @property
    def runner_backend(self) -> Any:
        return resolve_moe_runner_backend(BACKEND)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: Any, hooks: Any = None
    ) -> Any:
        """Raises UnsupportedModelError for a top-k output without plain ids."""
        topk_output = dispatch_output.topk_output
        if not isinstance(topk_output, StandardTopKOutput):
            raise UnsupportedModelError(
                f"top-k output {type(topk_output).__name__} cannot be rerouted: "
                "choose a --moe-runner-backend with plain top-k ids, such as triton"
            )
        if self._watch is not None:
            self._watch(topk_output)
        if self._reroute is not None:
            slots = topk_output._replace(topk_ids=self._reroute(topk_output.topk_ids))
            dispatch_output = dispatch_output._replace(topk_output=slots)
        return self._inner(dispatch_output, quant_info)


register_moe_runner_core(BACKEND, EsftRunnerCore)
register_moe_runner_core("ascend", ascend.make_runner_core)


def over_triton(module: Any, core: Any, layout: SlotLayout) -> Inner:
    """SGLang's Triton core, told of slots. Raises UnsupportedModelError.

    SGLang filters id -1 only where a layer has fewer experts than the model, which elastic's layers
    have not: a number it does not know makes it filter. Its configurations are tuned by the rows of
    w2, so those are looked up with as many rows as without weaving; w13's rows size the alignment.
    Its kernels take an expert's scales, as its numbers, by the id.
    """
    known = _triton_weights(module, core)
    if known.use_int4_w4a16 and isinstance(getattr(module, "esft_memory", None), VirtualMemory):
        _refuse_reading_on(module, known, layout)
    # What is filtered keeps what its memory held. Where all rows of a batch have one scale, that
    # would be in it. Unfiltered, the rows of id -1 are zeros, and the kernels skip them all the
    # same.
    is_filtering = not (known.use_fp8_w8a8 and known.block_shape is None)
    num_experts = None if is_filtering else core.config.num_local_experts
    told = type(core)(replace(core.config, num_experts=num_experts))
    permute = PermuteMethodPool.get_pre_permute("standard", "triton")
    unpermute = PermuteMethodPool.get_post_permute("triton", "standard")

    def run(dispatch_output: Any, weights: Any) -> Any:
        state: dict[str, Any] = {}
        sized = replace(weights, w2_weight=weights.w2_weight[: layout.num_base])
        aligned = permute(dispatch_output, sized, told.config, state)
        output = told.run(aligned, weights, state)
        return unpermute(output, weights, told.config, state)

    return run


def _triton_weights(module: Any, core: Any) -> TritonMoeQuantInfo:
    """What SGLang's Triton core is given of a layer, if that was shown to work over slots.

    Raises UnsupportedModelError for the rest.
    """
    method = type(module.quant_method).__name__
    try:
        weights: TritonMoeQuantInfo = module.quant_method.get_triton_quant_info(module)
    except NotImplementedError as error:
        raise _unshown(module, f"experts of {method}") from error
    if core.config.gemm1_alpha is not None or weights.fuse_swiglu_interleaved:
        raise UnsupportedModelError(
            f"MoE layer {module.layer_id}: experts with gate and up rows interleaved cannot be "
            "woven: unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED, or use --no-esft"
        )
    arithmetic = _arithmetic(weights)
    if arithmetic is None:
        return weights
    if arithmetic not in _SHOWN:
        raise _unshown(module, f"experts of {method} ({arithmetic})")
    for name in ("b13", "b2", "a13_scale", "a2_scale", "w13_zp", "w2_zp"):
        if getattr(weights, name) is not None:
            raise _unshown(module, f"experts of {method} with {_OTHER_PARTS[name]}")
    return weights


# What SGLang's kernels multiply, in the words of `_arithmetic`: tests/fast/moe_interpreted.
_SHOWN = frozenset(
    {
        "int8_w8a8, a scale for each channel",
        "fp8_w8a8, a scale for each tensor",
        "fp8_w8a8, a scale for each 128x128",
        *(f"int4_w4a16, a scale for each 0x{group_size}" for group_size in GROUP_SIZES),
    }
)
_OTHER_PARTS = {
    "b13": "biases",
    "b2": "biases",
    "a13_scale": "static scales of activations",
    "a2_scale": "static scales of activations",
    "w13_zp": "zero points",
    "w2_zp": "zero points",
}


def _arithmetic(weights: TritonMoeQuantInfo) -> str | None:
    """None: not quantised."""
    flags = ("mxfp8", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
    used = [flag for flag in flags if getattr(weights, f"use_{flag}")]
    if not used:
        return None
    of_one_scale = "tensor"
    if weights.block_shape is not None:
        of_one_scale = "x".join(map(str, weights.block_shape))
    if weights.per_channel_quant:
        of_one_scale = "channel" if of_one_scale == "tensor" else f"channel and {of_one_scale}"
    return f"{'+'.join(used)}, a scale for each {of_one_scale}"


def _refuse_reading_on(module: Any, weights: TritonMoeQuantInfo, layout: SlotLayout) -> None:
    """SGLang's int4 kernel reads whole blocks of a row, past its end too, and drops what is there.

    Past the end of a slot there may be no page. Raises UnsupportedModelError.
    """
    assert weights.block_shape is not None
    size = (layout.num_base, weights.w2_weight.shape[2], "int4_w4a16", *weights.block_shape)
    tuned = [get_moe_configs(*size, down_moe=down) or {} for down in (False, True)]
    chosen = {blocks["BLOCK_SIZE_K"] for by_batch in tuned for blocks in by_batch.values()}
    for block in sorted(chosen | _DEFAULT_INT4_BLOCKS):
        for tensor in (weights.w13_weight, weights.w2_weight):
            width = 2 * tensor.shape[2]
            if width % block:
                raise UnsupportedModelError(
                    f"MoE layer {module.layer_id}: SGLang's int4 kernel reads {block} numbers at a "
                    f"time of rows of {width}, and so past an expert's end, where virtual memory "
                    "may have no page: use --expert-memory padded"
                )


_DEFAULT_INT4_BLOCKS = frozenset({32, 64})  # of get_default_config


def _unshown(module: Any, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"MoE layer {module.layer_id}: {what} were not shown to work with adapters' slots in "
        f"SGLang's Triton kernels: serve a base in {SUPPORTED_SCHEMES}, or use --no-esft"
    )


INNER_CORES: dict[str, InnerFactory] = {"triton": over_triton, "ascend": ascend.over_ascend}


def inner_core(
    module: Any, layout: SlotLayout, factories: Mapping[str, InnerFactory] = INNER_CORES
) -> Inner:
    """What runs a FusedMoE's experts without weaving, for slots. Raises UnsupportedModelError."""
    runner = module.quant_method.runner
    core, name = runner.runner_core, runner.runner_backend.value
    if getattr(module.quant_method, "_aiter_runner", None) is not None:
        name = "aiter"
    elif isinstance(core, DispatchMoeRunnerCore):
        config = runner.config
        return lambda output, weights: core.run_from_dispatch(output, weights, config)
    elif name in factories:
        return factories[name](module, core, layout)
    raise UnsupportedModelError(
        f"MoE layer {module.layer_id}: --moe-runner-backend {name} was not shown to work with "
        f"adapters' slots: use one of {', '.join(factories)}"
    )


def install(
    module: Any,
    layout: SlotLayout,
    reroute: Reroute | None,
    inner: Inner | None = None,
    watch: Callable[[Any], None] | None = None,
) -> None:
    """From now on the layer's experts run in a woven core: in `inner`, if given.

    Raises UnsupportedModelError.
    """
    if platform.is_active():
        operators.check_registered(module.quant_method)
    inner = inner or inner_core(module, layout)
    plain = module.quant_method.runner
    known = plain.config
    of_sglang = {field.name: getattr(known, field.name) for field in fields(known)}
    config = WovenRunnerConfig(**of_sglang, inner=inner, reroute=reroute, watch=watch)
    runner = MoeRunner(resolve_moe_runner_backend(BACKEND), config)
    if runner.fused_func is not None or not isinstance(runner.runner_core, EsftRunnerCore):
        raise InvariantError("SGLang's MoeRunner does not run the core registered as esft")
    # A method asks its runner's backend which weights to pass, and knows the built-in names alone.
    runner.runner_backend = plain.runner_backend
    module.quant_method.runner = module.runner = runner
