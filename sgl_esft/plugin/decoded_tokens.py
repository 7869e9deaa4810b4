"""The decoded tokens of a forward pass, as predictors and traces want them.

    a batch is tagged --[DecodedTokens.begin]--> whose tokens, of which adapters
    the embedding layer, a layer's router --[embeddings, probabilities]--> numbers, rounded

Prompts are left out: their layers touch most experts, and nothing is predicted for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sgl_esft import sglang_api
from sgl_esft.errors import UnsupportedModelError
from sgl_esft.offload.routing import Floats, StepTokens
from sgl_esft.offload.tier import probabilities
from sgl_esft.offload.trace import rounded

# Tokens are compared by their embeddings cut to so many numbers (a fixed random projection keeps
# their angles): searching is faster, and a recorded trace holds what was searched for.
EMBEDDING_SIZE = 64
_PROJECTION_SEED = 20251


class DecodedTokens:
    """Of one rank and its model."""

    def __init__(self, model: torch.nn.Module, hidden_size: int) -> None:
        self.tokens: StepTokens | None = None  # None = nothing is decoded, or not by one rank
        self._projection = projection(hidden_size)
        self._scoring: Mapping[int, str] = {
            module.layer_id: str(topk.scoring_func) for topk, module in sglang_api.routers(model)
        }

    @property
    def num_tokens(self) -> int:
        return 0 if self.tokens is None else len(self.tokens.request_ids)

    def begin(self, forward_batch: Any, adapter_slots: Sequence[int]) -> None:
        """A batch was tagged. Under DP attention tokens of other ranks' requests are among them."""
        self.tokens = None
        if forward_batch.forward_mode.is_decode() and not sglang_api.is_dp_attention():
            ids = tuple(_number_of(rid) for rid in forward_batch.rids or ())
            if ids and len(ids) == len(adapter_slots):
                self.tokens = StepTokens(ids, tuple(adapter_slots))

    def embeddings(self, output: torch.Tensor) -> Floats:
        """[n, EMBEDDING_SIZE] of the embedding layer's output."""
        rows = output[: self.num_tokens].float() @ self._projection
        return rounded(rows.cpu().numpy())

    def probabilities(self, layer_id: int, topk_output: Any) -> Floats | None:
        """[n, J] of a layer's router; None where nothing is predicted for."""
        if self.tokens is None:
            return None
        logits = topk_output.router_logits[: self.num_tokens]
        return rounded(probabilities(logits, self._scoring.get(layer_id, "softmax")))

    def hidden(self, hidden_states: torch.Tensor) -> Floats:
        """[n, H] float32 of what a MoE layer is given."""
        found: Floats = hidden_states[: self.num_tokens].float().cpu().numpy()
        return found


def _number_of(rid: str) -> int:
    """A request's number: the same in all of its steps, and on every rank."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=7).digest(), "little")


def find_embedding_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """By its name; None for a model that has another."""
    named = (module for name, module in model.named_modules() if name.endswith("embed_tokens"))
    return next(named, None)


def embedding_layer(model: torch.nn.Module) -> torch.nn.Module:
    """Raises UnsupportedModelError for a model that does not name its embedding layer."""
    found = find_embedding_layer(model)
    if found is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no embed_tokens: use --expert-policy lfu, and no "
            "--record-routing"
        )
    return found


def projection(hidden_size: int) -> torch.Tensor:
    """[hidden_size, EMBEDDING_SIZE] float32, the same everywhere."""
    random = torch.Generator().manual_seed(_PROJECTION_SEED)
    found: torch.Tensor = torch.randn((hidden_size, EMBEDDING_SIZE), generator=random)
    return found.div_(EMBEDDING_SIZE**0.5)
