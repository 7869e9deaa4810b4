"""The next layers' routers by linear regression on those so far, learned while it serves.

    probs of layer l -> [observe] -> the last layers' logits times weights -> layers l+1, l+2
    [end_step] -> the step's logits enter moments.py, and now and then weights are fitted anew

Ours. The nearest of the papers is ProMoE's trained probe (learned.py), which needs a trace and a
command, looks at one layer, and one fixed stride ahead. Weights are in closed form, so the same
steps give the same predictions. Layers before the first router are not predicted: what comes of
their embeddings alone is wrong too often for loads that nothing could hide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from sgl_esft.offload.predictors.moments import Regression, RouterMoments, logits_of
from sgl_esft.offload.predictors.predictor import check_order, check_top_k
from sgl_esft.offload.predictors.selection import most_likely, softmax
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

FEWEST_TOKENS: Final = 64  # before weights are fitted first, and between two fits
_NEW_SHARE: Final = 1 / 8  # of the tokens known, after which weights are fitted anew


class RegressionPredictor:
    """A `Predictor` over router moments.

    `top_k`: experts a token is routed to. Half as many more are predicted, since a guess errs at
    the tail. A step of more than `max_batch` tokens is neither predicted for nor learned from.
    Raises ConfigError for a top_k that the model cannot have.
    """

    wants_hidden = False
    wants_embeddings = False
    is_quick = True

    def __init__(self, moments: RouterMoments, top_k: int, *, max_batch: int = 8) -> None:
        check_top_k(top_k, moments.num_experts)
        self.moments = moments
        self._count = min(top_k + (top_k + 1) // 2, moments.num_experts)
        self._max_batch = max_batch
        self._regression: Regression | None = moments.fit() if moments.num_tokens else None
        self._fit_at = FEWEST_TOKENS  # tokens since the start
        self._step: _Step | None = None

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """Nothing yet."""
        num_tokens = len(tokens.request_ids)
        is_few = 0 < num_tokens <= self._max_batch
        self._step = _Step(self.moments, num_tokens) if is_few else None
        return []

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Predictions of the next layers; `probs` [n, J]."""
        step = self._step
        if step is None:
            return []
        check_order(layer, step.num_seen, probs, (step.num_tokens, self.moments.num_experts))
        if not np.isfinite(probs).all():  # the router's own output: nothing follows from it
            self._step = None
            return []
        step.see(probs)
        return self._predicted(layer, step)

    def _predicted(self, layer: int, step: _Step) -> list[Prediction]:
        found, moments = self._regression, self.moments
        targets = range(layer + 1, min(layer + 1 + moments.reach, moments.num_layers))
        if found is None or not targets:
            return []
        logits = step.last_layers() @ found.weights[layer] + found.bias[layer]
        shares = softmax(logits.reshape(step.num_tokens, moments.reach, -1))
        everyone = np.arange(step.num_tokens)
        return [
            prediction
            for ahead, target in enumerate(targets)
            for prediction in most_likely(target, everyone, shares[:, ahead], self._count)
        ]

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Nothing: hidden states are not asked for."""
        return []

    def end_step(self) -> None:
        """Learn from the step, if all layers were observed."""
        step, self._step = self._step, None
        moments = self.moments
        if step is None or step.num_seen < moments.num_layers:
            return
        moments.add(step.logits)
        if moments.num_added >= self._fit_at:
            self._regression = moments.fit()
            new = max(FEWEST_TOKENS, round(_NEW_SHARE * moments.num_tokens))
            self._fit_at = moments.num_added + new

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nothing is kept by request."""


class _Step:
    """What routers said in the step at hand."""

    def __init__(self, moments: RouterMoments, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_seen = 0  # layers
        self._window = moments.window
        # Zeros before the first layer, so that there are always as many to look back to.
        shape = (num_tokens, self._window + moments.num_layers, moments.num_experts)
        self._padded = np.zeros(shape, np.float32)

    @property
    def logits(self) -> Floats:
        """[n, L, J], of the layers seen so far."""
        return self._padded[:, self._window :]

    def see(self, probs: Floats) -> None:
        self._padded[:, self._window + self.num_seen] = logits_of(probs)
        self.num_seen += 1

    def last_layers(self) -> Floats:
        """[n, window * J], the oldest first."""
        seen = self._padded[:, self.num_seen : self.num_seen + self._window]
        return seen.reshape(self.num_tokens, -1)
