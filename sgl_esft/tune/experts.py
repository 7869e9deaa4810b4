"""The routed experts of a loaded base: watched by `score`, trained apart by `tune`.

transformers keeps a layer's experts stacked in one tensor, so the chosen ones cannot be parameters
of their own there. `TunedExperts` stands in for the stack: the others stay in it, frozen, and only
the chosen ones have gradients and an optimiser's state, in float32 whatever the base's dtype is,
since steps of bfloat16 would be rounded away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgl_esft.formats.model_spec import MoeSpec

Experts = Mapping[int, tuple[int, ...]]
Blocks = Mapping[int, nn.Module]


class TunedExperts(nn.Module):
    """A layer's experts, `ids` of which are trained."""

    def __init__(self, frozen: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        self.frozen = frozen
        self.ids = tuple(ids)
        self._row = {expert: row for row, expert in enumerate(self.ids)}
        self.gate_up = self._own("gate_up_proj")  # [len(ids), 2I, H]
        self.down = self._own("down_proj")  # [len(ids), H, I]

    def _own(self, name: str) -> nn.Parameter:
        stacked = self.frozen.get_parameter(name).detach()
        return nn.Parameter(stacked[list(self.ids)].to(torch.float32, copy=True))

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden [T, H]``, ids and weights ``[T, k]`` -> ``[T, H]``; as transformers' own."""
        activation = cast(Callable[[Tensor], Tensor], self.frozen.act_fn)
        out = torch.zeros_like(hidden)
        # The trained ones too: a batch that visits none of them has a gradient, of zero.
        for expert in sorted({*top_k_index.unique().tolist(), *self.ids}):
            token, place = torch.where(top_k_index == expert)
            gate_up, down = self._weights(expert)
            gate, up = F.linear(hidden[token], gate_up).chunk(2, dim=-1)
            answer = F.linear(activation(gate) * up, down)
            answer = answer * top_k_weights[token, place, None]
            out.index_add_(0, token, answer.to(out.dtype))
        return out

    def _weights(self, expert: int) -> tuple[Tensor, Tensor]:
        gate_up, down = (
            self.frozen.get_parameter("gate_up_proj"),
            self.frozen.get_parameter("down_proj"),
        )
        row = self._row.get(expert)
        if row is None:
            return gate_up[expert], down[expert]
        return self.gate_up[row].to(gate_up.dtype), self.down[row].to(down.dtype)


def tune_only(blocks: Blocks, experts: Experts) -> dict[int, TunedExperts]:
    """Put `TunedExperts` into the blocks of these layers; nothing else has gradients."""
    tuned = {}
    for layer, ids in experts.items():
        tuned[layer] = TunedExperts(blocks[layer].get_submodule("experts"), ids)
        blocks[layer].experts = tuned[layer]
    return tuned


@torch.no_grad()
def adapter_tensors(
    tuned: Mapping[int, TunedExperts], spec: MoeSpec
) -> Iterator[tuple[str, Tensor]]:
    """The trained experts by their checkpoint names, in the base's dtype."""
    dtype = getattr(torch, spec.dtype)
    for layer, module in tuned.items():
        for row, expert in enumerate(module.ids):
            gate, up = module.gate_up[row].chunk(2)
            for proj, weight in (("gate", gate), ("up", up), ("down", module.down[row])):
                name = spec.expert_tensor_name(layer, expert, proj)  # type: ignore[arg-type]
                yield name, weight.to("cpu", dtype, copy=True).contiguous()


@contextmanager
def watch_routers(blocks: Blocks, sink: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Give `sink` each layer's ``weights [T, k]`` and ``ids [T, k]`` of the passes inside."""

    def observer(layer: int) -> Callable[[nn.Module, object, tuple[Tensor, ...]], None]:
        return lambda _module, _inputs, output: sink(layer, output[1], output[2])

    handles = [
        block.get_submodule("gate").register_forward_hook(observer(layer))
        for layer, block in blocks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
