"""What a router said of a step, and what is expected of it: the words of all of this room. Pure.

    router logits -> [StepTokens, probabilities] -> predictors/ -> [Prediction] -> decisions.py

Layers are numbered here as MoE layers, from 0, whatever their ids in the model are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

NO_OWNER: Final = -1


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one forward pass that are predicted for: one of each decoding request.

    `request_ids`: one a token, the same in every step of a request, never used again.
    `adapter_slots`: one a token; -1 = the base. `owners`: one a token, a number that is the
    adapter's wherever it sits and after a restart, NO_OWNER = the base; None = nobody has said.
    `embeddings`: [num_tokens, E] float32, the outputs of the embedding layer as the predictor is
    given them; None where the rank does not have them.
    """

    request_ids: tuple[int, ...]
    adapter_slots: tuple[int, ...]
    embeddings: Floats | None = None
    owners: tuple[int, ...] | None = None


def owners_of(slots: Sequence[int], owners: Sequence[int]) -> tuple[int, ...] | None:
    """`StepTokens.owners` by adapter slot, -1 = the base; None where a slot's is not known."""
    if max(slots, default=-1) >= len(owners):
        return None
    return tuple(NO_OWNER if slot < 0 else owners[slot] for slot in slots)


@dataclass(frozen=True)
class Prediction:
    """Experts that one token is expected to need in a layer that is still to come.

    `expert_ids` by falling `probs`, both [n]; the model's own ids, before rerouting.
    """

    layer: int
    token: int  # index into StepTokens
    expert_ids: Ints
    probs: Floats
