"""A layer's shared experts, with weights of their own for tokens of adapters that tune them.

    placer.py --place/displace--> [SharedMlp] <--forward-- SGLang's MoE block
                                      |
                                  batch_tags.py (whose token each row is)

SGLang runs shared experts as one MLP, whose width is theirs together. It is SGLang's own code that
computes an adapter's as well, over all rows of the batch, with the adapter's tensors lent to the
module's parameters for that call; of the result, the adapter's rows are taken. So each row is, to
the bit, what the merged model has for the same batch, sums over ranks and LoRA included. An adapter
costs one more call for each batch that it has tokens in.

While no adapter here tunes shared experts the module is as SGLang made it: nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from sgl_esft.errors import InvariantError
from sgl_esft.formats.manifest import AdapterManifest, refused_shared
from sgl_esft.weave.batch_tags import BatchTags
from sgl_esft.weave.moe_layer import ExpertWeights

# Of a layer's shared MLP on one rank: gate and up rows [2 * I_local, H], down [H, I_local].
SharedWeights: TypeAlias = tuple[torch.nn.Parameter, torch.nn.Parameter]


class SharedMlp:
    """One layer's shared MLP on one rank."""

    def __init__(
        self, module: torch.nn.Module, weights: SharedWeights, rows: range, tags: BatchTags
    ) -> None:
        """weights: the module's parameters; rows: of the MLP's whole width, this rank's."""
        self.rows: Final = rows
        self._module = module
        self._forward_base = module.forward
        self._weights = weights
        self._tags = tags
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def held_slots(self) -> Collection[int]:
        """Adapter slots whose tokens have weights of their own here."""
        return self._held.keys()

    def place(self, adapter_slot: int, weights: ExpertWeights) -> None:
        """From now on tokens of this slot have these weights, cut to `rows`.

        On the device that they are on already, they are used where they lie. Raises InvariantError,
        with nothing changed, if the slot has some or they are of another shape than the module's.
        """
        if adapter_slot in self._held:
            raise InvariantError(f"adapter slot {adapter_slot} has shared experts already")
        own = [(each.shape, each.device, each.dtype) for each in self._weights]
        for tensor, (shape, _, _) in zip((weights.w13, weights.w2), own, strict=True):
            if tensor.shape != shape:
                raise InvariantError(f"shared experts of {list(tensor.shape)}, not {list(shape)}")
        w13, w2 = weights.w13.to(*own[0][1:]), weights.w2.to(*own[1][1:])
        self._held[adapter_slot] = (w13, w2)
        self._module.forward = self._forward

    def displace(self, adapter_slot: int) -> None:
        """The reverse of `place`, if the slot has any."""
        self._held.pop(adapter_slot, None)
        if not self._held:
            self._module.__dict__.pop("forward", None)

    def num_bytes_of(self, adapter_slot: int) -> int:
        """Bytes of the slot's weights, on this rank."""
        return sum(tensor.nbytes for tensor in self._held.get(adapter_slot, ()))

    def _forward(self, hidden_states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        """[num_tokens, H] to the same: SGLang's function where adapters tune shared experts."""
        tags = self._tags.token_adapter_slots(hidden_states.shape[0])
        owners = tags.unique().tolist()
        present = [slot for slot in owners if slot in self._held]
        if present == owners and len(owners) == 1:
            return self._forward_of(present[0], hidden_states, *args, **named)
        out: torch.Tensor = self._forward_base(hidden_states, *args, **named)
        for slot in present:
            is_own = tags == slot
            out[is_own] = self._forward_of(slot, hidden_states, *args, **named)[is_own]
        return out

    def _forward_of(self, slot: int, *args: Any, **named: Any) -> torch.Tensor:
        with _lent(self._weights, self._held[slot]):
            out: torch.Tensor = self._forward_base(*args, **named)
        return out


@contextmanager
def _lent(parameters: SharedWeights, tensors: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """The parameters are these tensors for a while: the same objects, whoever else holds them."""
    own = [parameter.data for parameter in parameters]
    try:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in zip(parameters, own, strict=True):
            parameter.data = tensor


@dataclass(frozen=True)
class SharedMlps:
    """The shared MLPs of one rank by layer id, or why adapters must not tune them here.

    refusal: as `refused_shared` takes it; None = they may.
    """

    layers: Mapping[int, SharedMlp]
    refusal: str | None = None

    @property
    def rows(self) -> Mapping[int, range]:
        """Layer id -> of the MLP's whole width, this rank's."""
        return {layer_id: layer.rows for layer_id, layer in self.layers.items()}

    def check(self, name: str, manifest: AdapterManifest) -> None:
        """Raises UnsupportedAdapterError for an adapter that tunes what must not be tuned here."""
        if manifest.shared and self.refusal is not None:
            raise refused_shared(name, self.refusal)

    def num_bytes_of(self, adapter_slot: int) -> int:
        """Bytes of all layers' weights in an adapter slot, on this rank."""
        return sum(layer.num_bytes_of(adapter_slot) for layer in self.layers.values())

    def check_integrity(self, tuned: Mapping[int, Collection[int]]) -> None:
        """tuned: adapter slot -> layers whose shared experts its adapter tunes.

        Raises InvariantError when other slots than those have weights of their own.
        """
        for layer_id, layer in self.layers.items():
            wrong = [slot for slot in layer.held_slots if layer_id not in tuned.get(slot, ())]
            if wrong:
                raise InvariantError(
                    f"layer {layer_id}: adapter slots {wrong} have shared experts of nobody"
                )


NO_SHARED_MLPS: Final = SharedMlps({}, refusal="here: serve it merged")
