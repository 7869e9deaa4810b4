"""Expert-specialised fine-tuning: score the experts, choose the relevant ones, train only those.

`train` calls `expert_scores` on task samples with the frozen base, `sgl_esft.tools.select` with a
threshold, `freeze_all_but` before it fine-tunes, and `save_adapter` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DeepseekV2ForCausalLM

from sgl_esft.formats.adapter_config import EXPERT_CONFIG_NAME, write_expert_config
from sgl_esft.tools.select import ScoreKind, Scores
from sgl_esft.zoo.model import expert_tensors, moe_layers, save_tensors

Experts = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Routing:
    """What one MoE layer's router did: ``probabilities [T, M]``, ``chosen [T, k]`` ids."""

    probabilities: Tensor
    chosen: Tensor


@contextmanager
def watch_routers(
    model: DeepseekV2ForCausalLM, sink: Callable[[int, Routing], None]
) -> Iterator[None]:
    """Give every router decision of the forward passes inside to ``sink(layer, routing)``.

    Gradients flow through the probabilities, so a balancing loss may use them.
    """
    top_k = model.config.num_experts_per_tok

    def hook(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            logits = inputs[0].flatten(0, 1).float() @ block.get_parameter("gate.weight").T
            probabilities = logits.softmax(-1)
            sink(layer, Routing(probabilities, probabilities.topk(top_k).indices))

        return observe

    handles = [
        block.register_forward_pre_hook(hook(layer)) for layer, block in moe_layers(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def expert_scores(
    model: DeepseekV2ForCausalLM, batches: Iterable[Tensor], kind: ScoreKind
) -> Scores:
    """Each layer's expert scores on token batches ``[rows, length]`` of int64 ids.

    `kind` is ``"gate"``: the mean router weight of an expert where it is chosen and 0
    elsewhere; or ``"token"``: the share of choices that fell on it. Each layer sums to 1.
    """
    totals: dict[int, Tensor] = {}

    def add(layer: int, routing: Routing) -> None:
        chosen = torch.zeros_like(routing.probabilities).scatter_(1, routing.chosen, 1.0)
        weights = chosen * routing.probabilities if kind == "gate" else chosen
        totals[layer] = totals.get(layer, torch.zeros(weights.shape[1])) + weights.sum(0)

    with watch_routers(model, add):
        for batch in batches:
            model(batch)
    shares = {layer: (total / total.sum()).tolist() for layer, total in totals.items()}
    return {layer: dict(enumerate(share)) for layer, share in shares.items()}


def freeze_all_but(model: DeepseekV2ForCausalLM, experts: Experts) -> list[nn.Parameter]:
    """Let gradients reach only the chosen experts; returns the parameters to optimise.

    A layer's experts share one parameter, so the others' gradients are zeroed by a hook.
    The optimiser must leave a parameter alone where its gradient is zero (no decay).
    """
    model.requires_grad_(False)
    trainable: list[nn.Parameter] = []
    for layer, block in moe_layers(model).items():
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            parameter = block.get_parameter(name)
            mask = torch.zeros(parameter.shape[0], 1, 1)
            mask[list(experts.get(layer, ()))] = 1.0
            parameter.requires_grad_(True)
            parameter.register_hook(lambda grad, mask=mask: grad * mask)
            trainable.append(parameter)
    return trainable


def save_adapter(model: DeepseekV2ForCausalLM, experts: Experts, folder: Path) -> None:
    """Write the ESFT adapter folder: `expert_cfg.json` and the chosen experts' weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_expert_config(folder / EXPERT_CONFIG_NAME, experts)
    blocks = moe_layers(model)
    tensors: dict[str, Tensor] = {}
    for layer, ids in experts.items():
        for expert in ids:
            tensors.update(expert_tensors(blocks[layer], layer, expert))
    save_tensors(tensors, folder / "model.safetensors", model.config.dtype)
