"""How many experts can be read during a layer: from its experts' time, and by bytes the rest."""

from __future__ import annotations

from typing import Any

import torch

from sgl_esft.plugin import tiers


class Block(torch.nn.Module):
    """Attention of 6 x 6, and experts of 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(6, 6, bias=False)
        self.experts = torch.nn.Module()
        self.experts.w13_weight = torch.nn.Parameter(torch.zeros(4, 10, 6))
        self.experts.esft_layout = "slots of it"  # type: ignore[assignment]


class Model(torch.nn.Module):
    """Two MoE layers between an embedding, which is looked up, and a head, which is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(100, 6)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.lm_head = torch.nn.Linear(6, 100, bias=False)


def test_the_rest_of_a_layer_is_what_a_token_passes_besides_experts() -> None:
    assert tiers._rest_bytes(Model(), 2) == 4 * (2 * 6 * 6 + 100 * 6) // 2


def test_a_model_that_names_its_embedding_otherwise_is_counted_whole() -> None:
    """Policies that predict nothing serve it too."""
    model: Any = Model()
    model.wte = model._modules.pop("embed_tokens")
    assert tiers._rest_bytes(model, 2) == 4 * (2 * 6 * 6 + 2 * 100 * 6) // 2


def test_tied_weights_are_one_table() -> None:
    """The embedding's is the head's then, and is left out: too little is better than too much."""
    model: Any = Model()
    model.lm_head.weight = model.embed_tokens.weight
    assert tiers._rest_bytes(model, 2) == 4 * (2 * 6 * 6) // 2
