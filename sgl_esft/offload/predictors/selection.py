"""How many of a guiding row's experts are worth a prefetch: the last step of every predictor.

    a row of expert probabilities for each token -> [rank] -> falling -> [reaching] -> how many
    -> [predictions]

FineMoE, section 4.3. Ties go to the lower expert id, so that ranks that see the same agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_esft.offload.routing import Floats, Ints, Prediction


@dataclass(frozen=True)
class Ranked:
    """Rows by falling probability: `expert_ids` and `probs`, both [n, J]."""

    expert_ids: Ints
    probs: Floats


def softmax(logits: Floats) -> Floats:
    """Over the last axis; the largest is taken off first, so that none overflows."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def rank(rows: Floats) -> Ranked:
    """`rows` [n, J] float32, by falling probability, equal ones by rising id."""
    order = np.argsort(-rows, axis=1, kind="stable")
    return Ranked(order.astype(np.int64), np.take_along_axis(rows, order, axis=1))


def thresholds(scores: Floats) -> Floats:
    """delta = clip(1 - score, 0, 1), [n]: a sure match prefetches little, an unsure one more."""
    return np.clip(1 - scores, 0, 1).astype(np.float32)


def reaching(ranked: Ranked, deltas: Floats, least: int) -> Ints:
    """[n]: the fewest first experts whose probabilities sum to delta, `least` or more.

    Equations 6 to 8. A row whose sum stays below delta is taken whole, but for experts of
    probability 0: they would be read for nothing.
    """
    # In float64: the sum of a whole float32 row would otherwise often miss a delta of 1.
    sums = np.cumsum(ranked.probs, axis=1, dtype=np.float64)
    counts = (sums < deltas[:, None]).sum(axis=1) + 1
    possible = np.count_nonzero(ranked.probs, axis=1)
    bounded: Ints = np.clip(np.minimum(counts, possible), least, ranked.probs.shape[1])
    return bounded


def predictions(layer: int, tokens: Ints, ranked: Ranked, counts: Ints) -> list[Prediction]:
    """One for each of `tokens` [n], its row's first `counts` [n] experts; none where that is 0."""
    return [
        Prediction(layer, token, ranked.expert_ids[row, :count], ranked.probs[row, :count])
        for row, (token, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True))
        if count
    ]


def most_likely(layer: int, tokens: Ints, rows: Floats, count: int) -> list[Prediction]:
    """The `count` most probable experts of each row [n, J], fewer where the rest have 0."""
    ranked = rank(rows)
    counts = np.minimum((ranked.probs > 0).sum(axis=1), count)
    return predictions(layer, tokens, ranked, counts.astype(np.int64))
