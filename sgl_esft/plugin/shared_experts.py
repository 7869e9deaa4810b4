"""Which layers' shared experts adapters may tune on this rank, or why they may not.

    runner's model, MoeSpec -> [bind_shared] -> SharedMlps -> weave/plane.py

A server whose model has no such layers serves all other adapters: what is wrong is said to the
adapter that needs them, when it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_esft import sglang_api
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.formats.model_spec import MoeSpec
from sgl_esft.support import SHARED_EXPERT_DEVICES
from sgl_esft.weave import page_source
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.shared_mlp import SharedMlp, SharedMlps, SharedWeights


def bind_shared(
    model: torch.nn.Module, spec: MoeSpec, tags: BatchTags, device: torch.device
) -> SharedMlps:
    """The model's shared MLPs, read by the batch's tags; changes nothing about them."""
    refusal = _refusal(model, device)
    if refusal is None:
        try:
            layers = {
                layer_id: _bound(layer_id, module, spec, tags)
                for layer_id, module in sglang_api.shared_experts(model)
            }
            return SharedMlps(layers, _missing(layers, spec))
        except UnsupportedModelError as error:
            refusal = f"here ({error}): serve it merged"
    return SharedMlps({}, refusal)


def _refusal(model: torch.nn.Module, device: torch.device) -> str | None:
    """Why no layer of this engine is bound, in the words of `refused_shared`."""
    if device.type not in SHARED_EXPERT_DEVICES:
        return f"on {device.type}: serve it merged"
    if page_source.current() is not None:
        return "with experts that move: leave --elastic out"
    if any(module.num_fused_shared_experts for module in sglang_api.fused_moe_modules(model)):
        return (
            "with shared experts that SGLang fuses into the routed ones: use "
            "--disable-shared-experts-fusion"
        )
    return None


def _missing(layers: dict[int, SharedMlp], spec: MoeSpec) -> str | None:
    """Reading an adapter's folder has shown that the base has shared experts, in every layer."""
    missing = sorted(set(spec.moe_layer_ids) - layers.keys())
    if not missing:
        return None
    return f"where SGLang keeps no shared experts of their own (layers {missing}): serve it merged"


def _bound(layer_id: int, module: Any, spec: MoeSpec, tags: BatchTags) -> SharedMlp:
    """Raises UnsupportedModelError for another module than an MLP of two unquantised weights."""
    weights = _weights_of(layer_id, module)
    w13, w2 = weights
    hidden, width = w2.shape
    if tuple(w13.shape) != (2 * width, hidden) or hidden != spec.hidden_size:
        raise UnsupportedModelError(
            f"layer {layer_id}: shared experts of {list(w13.shape)} and {list(w2.shape)}"
        )
    rank, size = sglang_api.group_place(module.gate_up_proj)
    if size * width != spec.shared_intermediate_size:
        raise UnsupportedModelError(
            f"layer {layer_id}: SGLang made shared experts {spec.shared_intermediate_size} wide "
            f"{size * width} wide"
        )
    return SharedMlp(module, weights, range(rank * width, (rank + 1) * width), tags)


def _weights_of(layer_id: int, module: Any) -> SharedWeights:
    """Gate and up together, and down: all that the module has."""
    found = dict(module.named_parameters())
    names = ("gate_up_proj.weight", "down_proj.weight")
    if set(found) != set(names):
        raise UnsupportedModelError(
            f"layer {layer_id}: shared experts have {', '.join(sorted(found))}, not "
            f"{' and '.join(names)}"
        )
    return found[names[0]], found[names[1]]
