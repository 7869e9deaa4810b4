"""A plugin of SGLang's by which routing is a trace's: answers of such a server mean nothing.

    large.py --[install]--> folder for PYTHONPATH --entry point--> SGLang's processes --[register]
    a router's logits --[Replay.logits]--> those by which SGLang's top-k takes the trace's experts

REPLAY names an .npz of ids and weights [L, N, k], as a trace has them (traces.py), and the id of
its first MoE layer. Each token of a forward pass, of prompts too, takes the trace's next one, in
every layer the same one. Predictors see the trace's weights; what is left of a distribution is
even, and below them.

MAPPED names a base folder whose experts are then computed straight from its mapped files: what a
machine does whose page cache is all there is. The base alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench.finemoe.traces import NUM_EXPERTS
from sgl_esft.formats.checkpoint import Checkpoint, TensorBytes, open_checkpoint
from sgl_esft.formats.model_spec import PROJS

REPLAY = "FINEMOE_REPLAY"
MAPPED = "FINEMOE_MAPPED"


def install(folder: Path) -> Path:
    """A folder that makes this module a plugin of every Python that has it in its path."""
    described = folder / "finemoe_replay-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: finemoe_replay\nVersion: 1.0\n"
    )
    (described / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nfinemoe_replay = {__name__}:register\n"
    )
    return folder


def register() -> None:
    """Without the variables nothing is hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if REPLAY in os.environ:
        target = "sglang.srt.layers.moe.topk.select_experts"
        HookRegistry.register(target, with_replayed_logits, HookType.BEFORE)
    if MAPPED in os.environ:
        HookRegistry.register("sgl_esft.plugin.tiers.Tiers.inner", mapped_inner, HookType.AROUND)


# ---- routing ----


class Replay:
    """Tokens of a trace, taken in order, over and over."""

    def __init__(self, ids: Any, weights: Any, first_layer: int) -> None:
        """ids, weights [L, N, k]."""
        self._ids = torch.from_numpy(ids.astype(np.int64))
        self._weights = torch.from_numpy(weights.astype(np.float32))
        self._first_layer = first_layer
        self._taken = [0] * len(ids)  # tokens, by layer: all layers of a pass see as many

    def logits(self, layer_id: int, like: torch.Tensor) -> torch.Tensor:
        """[T, J] of the next T tokens, whose softmax is the trace's weights where it has any."""
        row = layer_id - self._first_layer
        tokens = torch.arange(self._taken[row], self._taken[row] + len(like))
        tokens %= self._ids.shape[1]
        self._taken[row] += len(like)
        probs = distributions(self._ids[row, tokens], self._weights[row, tokens], like.shape[1])
        return probs.log().to(like.dtype)


def distributions(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, J] whose chosen experts [T, k] have these weights, and the others the rest, evenly."""
    even = (1 - weights.sum(dim=1)).clamp(min=0) / max(1, num_experts - ids.shape[1])
    rest = torch.minimum(even, weights.amin(dim=1) / 2).clamp(min=1e-6)
    return rest[:, None].repeat(1, num_experts).scatter(1, ids, weights.clamp(min=2e-6))


@cache
def the_replay() -> Replay:
    """Of this process."""
    with np.load(os.environ[REPLAY]) as file:
        return Replay(file["ids"], file["weights"], int(file["first_layer"]))


def with_replayed_logits(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """SGLang's TopK names all arguments. Raises KeyError where it does not any more."""
    logits = kwargs["router_logits"]
    return args, {**kwargs, "router_logits": the_replay().logits(kwargs["layer_id"], logits)}


def write_replay(path: Path, ids: Any, weights: Any, first_layer: int) -> None:
    """What REPLAY may name. Raises ValueError for ids that the model cannot have."""
    if ids.shape != weights.shape or ids.max(initial=0) >= NUM_EXPERTS:
        raise ValueError(f"ids {ids.shape} up to {ids.max(initial=0)}, weights {weights.shape}")
    np.savez(path, ids=ids, weights=weights, first_layer=first_layer)


# ---- experts from mapped files ----


class MappedExperts:
    """All experts of a checkpoint as tensors over its mapped files: nothing is read before use."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = {
            path: torch.from_file(
                str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
            )
            for path in checkpoint.shards
        }

    def expert(self, layer_id: int, expert_id: int) -> tuple[torch.Tensor, ...]:
        """gate [I, H], up [I, H], down [H, I]."""
        spec = self._checkpoint.spec
        names = (spec.expert_tensor_name(layer_id, expert_id, proj) for proj in PROJS)
        return tuple(self._tensor(self._checkpoint.tensors[name]) for name in names)

    def _tensor(self, tensor: TensorBytes) -> torch.Tensor:
        start = tensor.info.start
        raw = self._files[tensor.file][start : start + tensor.info.num_bytes]
        dtype = getattr(torch, self._checkpoint.spec.dtype)
        return raw.view(dtype).view(tensor.info.shape)


@cache
def the_mapped() -> MappedExperts:
    """Of this process."""
    return MappedExperts(open_checkpoint(Path(os.environ[MAPPED])))


def mapped_inner(_: Any, __: Any, module: Any) -> Callable[[Any, Any], Any]:
    """Instead of Tiers.inner, for a FusedMoE. Slots of the base are its expert ids."""
    layer_id = int(module.layer_id)
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    def run(dispatch_output: Any, weights: Any) -> Any:
        topk = dispatch_output.topk_output
        output = mapped_forward(
            the_mapped(), layer_id, dispatch_output.hidden_states, topk.topk_weights, topk.topk_ids
        )
        return StandardCombineInput(hidden_states=output)

    return run


def mapped_forward(
    experts: MappedExperts,
    layer_id: int,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """hidden [T, H]; topk_weights, topk_ids [T, k]. Each expert once, in order of its id."""
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert_id in topk_ids.unique().tolist():
        tokens, places = torch.nonzero(topk_ids == expert_id, as_tuple=True)
        gate, up, down = experts.expert(layer_id, expert_id)
        x = hidden[tokens]
        y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        total.index_add_(0, tokens, y.float() * topk_weights[tokens, places, None].float())
    return total.to(hidden.dtype)
