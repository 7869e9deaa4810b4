"""The next layer's router, asked with the present hidden state: a guess one layer ahead.

    hidden states before layer l's router -> [observe_hidden] -> gate of layer l+1 -> its experts

Mixtral-Offloading (arXiv 2312.17238), which takes `top_k`, and FATE (arXiv 2502.12224), which
takes more (`widen`). Residual connections make it work; it knows nothing of layers further on, and
nothing before the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.predictor import check_top_k
from sgl_esft.offload.predictors.selection import most_likely, softmax
from sgl_esft.offload.routing import Floats, Prediction, StepTokens


class NextGatePredictor:
    """A `Predictor` that is shown hidden states besides.

    `gates`: one a MoE layer, [J, H] float32, all of one shape; as many as `top_k` * `widen` experts
    are predicted, at most J. Raises ConfigError for gates that are not of one model.
    """

    def __init__(self, gates: Sequence[Floats], top_k: int, widen: int = 1) -> None:
        shapes = {gate.shape for gate in gates}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ConfigError(
                f"router weights of shapes {sorted(shapes)}: give one of [experts, hidden size] "
                "for each MoE layer"
            )
        if widen < 1:
            raise ConfigError(f"router guesses widened {widen} times: give 1 or more")
        num_experts, self._hidden_size = next(iter(shapes))
        check_top_k(top_k, num_experts)
        self._count = min(top_k * widen, num_experts)
        # Transposed once: the products of a step are then of contiguous rows.
        self._gates = [np.ascontiguousarray(gate.T, dtype=np.float32) for gate in gates]

    wants_hidden = True
    wants_embeddings = False
    is_quick = False

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """Nothing: there is no hidden state yet."""
        return []

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Nothing: what the present router said is not asked."""
        return []

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Predictions of MoE layer `layer + 1`; `hidden` [n, H] is what layer's router is given.

        Raises InvariantError for hidden states of another width.
        """
        if hidden.ndim != 2 or hidden.shape[1] != self._hidden_size:
            raise InvariantError(
                f"hidden states {hidden.shape} for routers of {self._hidden_size} inputs: they "
                "are not what the MoE layers are given"
            )
        if layer + 1 >= len(self._gates):
            return []
        probs = softmax(hidden.astype(np.float32) @ self._gates[layer + 1])
        return most_likely(layer + 1, np.arange(len(probs)), probs, self._count)

    def end_step(self) -> None:
        """Nothing is learned."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nothing is kept by request."""
