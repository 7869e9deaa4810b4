"""Second moments of what routers said in earlier steps: all that a linear regression needs. Pure.

    a step's router distributions -> [logits_of] -> [RouterMoments.add] -> sums of products by layer
    sums -> [RouterMoments.fit] -> Regression: from the layers up to l, the logits of l+1, l+2, ...

A router's logits are a linear map of a hidden state that each layer changes a little, so those of a
few layers together say much about the next one's. From a distribution they are known but for a
constant, which is taken off. Old steps count for less and less, so that a workload may change.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sgl_esft.errors import ConfigError
from sgl_esft.offload.predictors.predictor import Arrays, check_about, read_arrays, write_arrays
from sgl_esft.offload.routing import Floats

FORMAT: Final = "sgl-esft router moments 1"
# Layers looked back to, layers looked ahead: the first that fits into the memory. Four back are
# nearly as good as all; a third one ahead is guessed too badly to be worth a row.
SPANS: Final = ((4, 2), (3, 2), (2, 2), (1, 2), (1, 1))
RIDGE: Final = 0.01  # added to the variance of a logit, which is about 1
FLOOR: Final = 1e-5  # of a probability, so that it has a logarithm
HALVED_AT_TOKENS: Final = 1 << 15  # when so many are in the sums, they count half from then on
_AT_ONCE: Final = 16  # tokens that are summed up together: the sums are large
_REMEDY: Final = "give --expert-map-file the file that was saved for this base, or a new name"


@dataclass(frozen=True)
class Regression:
    """Logits of the next `reach` layers, by source layer: the last `window` layers' logits times
    `weights` [L, window * J, reach * J], and `bias` [L, reach * J]; float32.

    Weights of layers that do not exist are 0.
    """

    weights: Floats
    bias: Floats


def num_bytes_of(num_layers: int, num_experts: int, span: tuple[int, int] = SPANS[-1]) -> int:
    """That moments of a model take; by default the fewest."""
    return 4 * num_layers * _num_features(num_experts, span) ** 2


def _num_features(num_experts: int, span: tuple[int, int]) -> int:
    """Of one layer: logits of those before it, its own, and 1."""
    return sum(span) * num_experts + 1


class RouterMoments:
    """For each layer, sums over tokens of the products of its logits and of those before it.

    In at most `max_bytes`, by looking at fewer layers. `base`: which model's routers these are, in
    one line, for files. Raises ConfigError for less memory than the shortest span takes.
    """

    def __init__(
        self, num_layers: int, num_experts: int, max_bytes: int, *, base: str = ""
    ) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.base = base
        self.window, self.reach = self._span(max_bytes)
        self.num_tokens = 0.0  # that the sums are of; old ones count for less
        self.num_added = 0  # since the start
        size = _num_features(num_experts, (self.window, self.reach))
        self._sums = np.zeros((num_layers, size, size), np.float32)
        self._waiting: list[Floats] = []  # [L, n, size] each, not in the sums yet
        self._writing = threading.Lock()  # `save` may be another thread's

    def _span(self, max_bytes: int) -> tuple[int, int]:
        for span in SPANS:
            if num_bytes_of(self.num_layers, self.num_experts, span) <= max_bytes:
                return span
        fewest = num_bytes_of(self.num_layers, self.num_experts)
        raise ConfigError(
            f"--expert-map-memory: to predict routers of {self.num_layers} layers and "
            f"{self.num_experts} experts takes {fewest:,} bytes, and {max_bytes:,} are given: "
            "give more, or use --expert-policy finemoe or lfu"
        )

    # ---- learning ----

    def add(self, logits: Floats) -> None:
        """Of a step's tokens, [n, L, J]: `logits_of` their distributions."""
        self._waiting.append(self._features(logits))
        self.num_added += len(logits)
        if sum(each.shape[1] for each in self._waiting) >= _AT_ONCE:
            self._sum_up()

    def _features(self, logits: Floats) -> Floats:
        """[L, n, features]: the oldest layer first, with zeros where there is none."""
        count, num_layers, num_experts = logits.shape
        num_before = self.window + self.reach - 1
        padded = np.zeros((count, num_before + num_layers, num_experts), np.float32)
        padded[:, num_before:] = logits
        found = np.ones((num_layers, count, self._sums.shape[1]), np.float32)
        for layer in range(num_layers):
            found[layer, :, :-1] = padded[:, layer : layer + num_before + 1].reshape(count, -1)
        return found

    def _sum_up(self) -> None:
        if not self._waiting:
            return
        rows = np.concatenate(self._waiting, axis=1)
        self._waiting.clear()
        with self._writing:
            if self.num_tokens > HALVED_AT_TOKENS:
                self._sums *= np.float32(0.5)
                self.num_tokens *= 0.5
            for layer, of_layer in enumerate(rows):
                self._sums[layer] += of_layer.T @ of_layer
            self.num_tokens += rows.shape[1]

    # ---- using ----

    def fit(self) -> Regression:
        """Least squares with a penalty on all weights but the bias; of some tokens.

        Raises numpy's LinAlgError for sums that no tokens have, such as a damaged file's.
        """
        self._sum_up()
        num_inputs, num_outputs = (n * self.num_experts for n in (self.window, self.reach))
        found = Regression(
            np.zeros((self.num_layers, num_inputs, num_outputs), np.float32),
            np.zeros((self.num_layers, num_outputs), np.float32),
        )
        for layer in range(1, self.num_layers):
            mean, covariance = self._moments_of(layer)
            for distance in range(1, min(self.reach, layer) + 1):
                self._fit_one(found, layer, distance, mean, covariance)
        return found

    def _moments_of(self, layer: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """In float64: a variance is a small difference of large numbers."""
        means = self._sums[layer].astype(np.float64) / self.num_tokens
        mean = means[-1]
        return mean, means - np.outer(mean, mean)

    def _fit_one(
        self,
        found: Regression,
        layer: int,
        distance: int,
        mean: NDArray[np.float64],
        covariance: NDArray[np.float64],
    ) -> None:
        """`layer` from the `window` layers that end `distance` before it."""
        width = self.num_experts
        first = (self.reach - distance) * width
        used, own = slice(first, first + self.window * width), slice(-1 - width, -1)
        penalised = covariance[used, used] + RIDGE * np.eye(self.window * width)
        weights = np.linalg.solve(penalised, covariance[used, own])
        outputs = slice((distance - 1) * width, distance * width)
        found.weights[layer - distance, :, outputs] = weights
        found.bias[layer - distance, outputs] = mean[own] - mean[used] @ weights

    # ---- files ----

    def save(self, path: Path) -> None:
        """Write them as safetensors, whole or not at all. Another thread may add meanwhile."""
        with self._writing:
            sums, num_tokens = self._sums.copy(), np.array([self.num_tokens])
        arrays: Arrays = {"sums": sums, "num_tokens": num_tokens}
        write_arrays(path, arrays, self._about)

    @property
    def _about(self) -> dict[str, str]:
        """What a file says of the model that it is of, and of its span."""
        sizes = f"{self.num_layers} MoE layers of {self.num_experts} experts"
        span = f"{self.window} layers back, {self.reach} ahead"
        return {"format": FORMAT, "base": self.base, "sizes": sizes, "span": span}

    def load(self, path: Path) -> None:
        """Instead of what is there. Raises ConfigError for a file damaged or of another model."""
        check_about(path, self._about, "router moments", _REMEDY)
        layouts = {"sums": ("float32", self._sums.shape), "num_tokens": ("float64", (1,))}
        found = read_arrays(path, layouts, _REMEDY)
        num_tokens = float(found["num_tokens"][0])
        if num_tokens < 1:
            raise ConfigError(f"{path} is of {num_tokens} tokens, so it is damaged: {_REMEDY}")
        before = self._sums, self.num_tokens
        self._sums, self.num_tokens = found["sums"], num_tokens
        try:
            self.fit()
        except np.linalg.LinAlgError as error:
            self._sums, self.num_tokens = before
            raise ConfigError(f"{path} has sums that no tokens have: {_REMEDY}") from error


def logits_of(probs: Floats) -> Floats:
    """A router's logits, from its distributions [..., J], but for a constant: their mean is 0."""
    found = np.log(np.maximum(probs, np.float32(FLOOR)))
    centred: Floats = found - found.mean(axis=-1, keepdims=True)
    return centred
