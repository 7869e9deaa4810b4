"""A linear probe for each layer, from its router's output to that of a layer further on.

    maps of earlier steps -> [train] -> LearnedPredictor -> [save], [load]
    probs of layer l -> [observe] -> probe l -> layer l + d

After ProMoE (arXiv 2410.22134), which has a small trained network a layer, on hidden states, the
same stride ahead. This one is linear and sees router distributions, so that it is trained in closed
form, in moments, from the same maps as FineMoE's store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_esft.errors import ConfigError
from sgl_esft.offload.predictors.predictor import (
    Arrays,
    check_distance,
    check_order,
    check_top_k,
    read_arrays,
    write_arrays,
)
from sgl_esft.offload.predictors.selection import most_likely, rank
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

_REMEDY = "give probes that were trained on traces of this model"


@dataclass(frozen=True)
class Probes:
    """What is learned. Probe l, of P = L - distance, maps layer l's J inputs to layer l+distance.

    `weights` [P, J, J] and `biases` [P, J], float32. `of_mask`: the inputs are 1 for the top_k
    experts and 0 for others, instead of the distribution.
    """

    weights: Floats
    biases: Floats
    distance: int
    top_k: int
    of_mask: bool = False


class LearnedPredictor:
    """A `Predictor` by trained probes; predicts `top_k` experts, and never of layers 0..d-1."""

    def __init__(self, probes: Probes) -> None:
        self.probes = probes
        self._num_tokens = 0
        self._num_seen = 0

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """Nothing: the probes see routers only."""
        self._num_tokens, self._num_seen = len(tokens.request_ids), 0
        return []

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Predictions of MoE layer `layer + distance`; `probs` [n, J]."""
        probes = self.probes
        check_order(layer, self._num_seen, probs, (self._num_tokens, probes.biases.shape[1]))
        self._num_seen += 1
        if layer >= len(probes.weights):
            return []
        inputs = _masks(probs, probes.top_k) if probes.of_mask else probs
        rows = np.maximum(inputs @ probes.weights[layer] + probes.biases[layer], 0)
        sums = rows.sum(axis=1, keepdims=True)
        shares = rows / np.where(sums > 0, sums, 1)
        target = layer + probes.distance
        return most_likely(target, np.arange(len(rows)), shares, probes.top_k)

    wants_hidden = False
    wants_embeddings = False
    is_quick = False

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Nothing: hidden states are not asked for."""
        return []

    def end_step(self) -> None:
        """Nothing is learned while serving."""

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nothing is kept by request."""

    def save(self, path: Path) -> None:
        """Write the probes as safetensors, whole or not at all."""
        probes = self.probes
        settings = np.array([probes.distance, probes.top_k, probes.of_mask], np.int64)
        arrays: Arrays = {
            "weights": probes.weights,
            "biases": probes.biases,
            "settings": settings,
        }
        write_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path, num_layers: int, num_experts: int, top_k: int) -> LearnedPredictor:
        """What `save` wrote. Raises ConfigError for a file that is damaged or of another model."""
        layouts = {
            "weights": ("float32", (None, num_experts, num_experts)),
            "biases": ("float32", (None, num_experts)),
            "settings": ("int64", (3,)),
        }
        found = read_arrays(path, layouts, _REMEDY)
        weights, biases = found["weights"], found["biases"]
        distance, trained_top_k, of_mask = found["settings"].tolist()
        is_whole = len(weights) == len(biases) == num_layers - distance and distance > 0
        if not is_whole or trained_top_k != top_k or of_mask not in (0, 1):
            raise ConfigError(
                f"{path} has {len(weights)} probes and {len(biases)} biases {distance} layers "
                f"ahead, for {trained_top_k} experts a token; the model has {num_layers} MoE "
                f"layers and {top_k} experts a token: {_REMEDY}"
            )
        return cls(Probes(weights, biases, distance, top_k, bool(of_mask)))


def train(
    maps: Floats, distance: int, ridge: float, *, top_k: int, of_mask: bool = False
) -> LearnedPredictor:
    """Least squares with a penalty, from `maps` [N, L, J] of a trace.

    `ridge`: added to the diagonal of the inputs' covariance, so that its meaning does not depend on
    N; more than 0. Raises ConfigError for no maps, or numbers that cannot be.
    """
    if not len(maps) or not ridge > 0:
        raise ConfigError(
            f"probes of {len(maps)} maps with a ridge of {ridge}: give a trace, and more than 0"
        )
    check_distance(distance, maps.shape[1])
    check_top_k(top_k, maps.shape[2])
    pairs = [
        _fit(_masks(maps[:, layer], top_k) if of_mask else maps[:, layer], target, ridge)
        for layer, target in enumerate(np.swapaxes(maps, 0, 1)[distance:])
    ]
    num_experts = maps.shape[2]
    weights = np.array([weight for weight, _ in pairs], np.float32)
    biases = np.array([bias for _, bias in pairs], np.float32)
    shaped = weights.reshape(-1, num_experts, num_experts), biases.reshape(-1, num_experts)
    return LearnedPredictor(Probes(*shaped, distance, top_k, of_mask))


def _fit(inputs: Floats, targets: Floats, ridge: float) -> tuple[Floats, Floats]:
    """Weights [J, J] and bias [J]; the bias is not penalised. In float64: a sum of thousands."""
    x, y = inputs.astype(np.float64), targets.astype(np.float64)
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    x, y = x - x_mean, y - y_mean
    covariance = x.T @ x / len(x) + ridge * np.eye(x.shape[1])
    weights = np.linalg.solve(covariance, x.T @ y / len(x))
    return weights.astype(np.float32), (y_mean - x_mean @ weights).astype(np.float32)


def _masks(rows: Floats, top_k: int) -> Floats:
    """[n, J]: 1 for each row's `top_k` most probable experts, else 0."""
    masks = np.zeros(rows.shape, np.float32)
    np.put_along_axis(masks, rank(rows).expert_ids[:, :top_k], np.float32(1), axis=1)
    return masks
