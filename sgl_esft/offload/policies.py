"""Who leaves a layer's rows for others, and what is fetched before it is asked for: one table.

    --expert-policy NAME -> POLICIES -> ExpertPolicy -> eviction (here), predictor (predictors/)
    decisions.py --used, predicted--> [Eviction] --values: the lowest leaves first-->

Nothing here reads a clock: time is counted in a layer's steps, so that a trace decides the same
wherever it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_esft.errors import ConfigError
from sgl_esft.offload.routing import Floats, Ints

Values = NDArray[np.float64]

LFU_DECAY = 0.98  # of what an expert's uses count for, a step of its layer
_RESCALE_ABOVE = 1e100  # growing weights are brought back before they overflow
NEVER_PREDICTED = 1e-3  # probability of an expert that no prediction has named yet


class Eviction(Protocol):
    """How much each slot of one layer is worth keeping."""

    def used(self, slots: Ints) -> None:
        """A step has asked for these slots, each once."""

    def entered(self, slot: int) -> None:
        """The slot came into a row."""

    def predicted(self, slots: Ints, probs: Floats) -> None:
        """These slots are expected, with these probabilities."""

    def values(self, slots: Ints) -> Values:
        """What they are worth; the lowest leaves first, of equals the lower slot."""


class LeastRecentlyUsed:
    """The step in which a slot was last asked for."""

    def __init__(self, num_slots: int, popularity: Values | None) -> None:
        self._last = np.zeros(num_slots, dtype=np.float64)
        self._step = 0.0

    def used(self, slots: Ints) -> None:
        self._step += 1.0
        self._last[slots] = self._step

    def entered(self, slot: int) -> None:
        """Coming in is no use."""

    def predicted(self, slots: Ints, probs: Floats) -> None:
        """Recency knows the past only."""

    def values(self, slots: Ints) -> Values:
        return self._last[slots]


class FirstIn(LeastRecentlyUsed):
    """The order in which slots came in, whatever was asked for since."""

    def used(self, slots: Ints) -> None:
        """Being used changes nothing."""

    def entered(self, slot: int) -> None:
        super().used(np.array([slot]))


class LeastFrequentlyUsed:
    """How often a slot was asked for, old uses counting for less and less."""

    def __init__(self, num_slots: int, popularity: Values | None) -> None:
        self._count = np.zeros(num_slots, dtype=np.float64)
        self._weight = 1.0  # of a use now: growing instead of making all counts smaller

    def used(self, slots: Ints) -> None:
        self._weight /= LFU_DECAY
        self._count[slots] += self._weight
        if self._weight > _RESCALE_ABOVE:
            self._count /= self._weight
            self._weight = 1.0

    def entered(self, slot: int) -> None:
        """Coming in is no use."""

    def predicted(self, slots: Ints, probs: Floats) -> None:
        """Frequency knows the past only."""

    def values(self, slots: Ints) -> Values:
        return self._count[slots]


class MostPopular:
    """A fixed order: by uses in a trace, else by all uses so far."""

    def __init__(self, num_slots: int, popularity: Values | None) -> None:
        """popularity: [num_slots], or None to count from now on."""
        self._count = np.zeros(num_slots) if popularity is None else popularity.copy()
        self._counts = popularity is None

    def used(self, slots: Ints) -> None:
        if self._counts:
            self._count[slots] += 1.0

    def entered(self, slot: int) -> None:
        """Coming in is no use."""

    def predicted(self, slots: Ints, probs: Floats) -> None:
        """The order is fixed."""

    def values(self, slots: Ints) -> Values:
        return self._count[slots]


class LeastExpected:
    """Probability of the last prediction times uses while in the cache (FineMoE section 4.4).

    Highest 1 / (p * freq) leaves first there; recency is left out on purpose.
    """

    def __init__(self, num_slots: int, popularity: Values | None) -> None:
        self._probability = np.full(num_slots, NEVER_PREDICTED)
        self._visits = np.ones(num_slots)

    def used(self, slots: Ints) -> None:
        self._visits[slots] += 1.0

    def entered(self, slot: int) -> None:
        self._visits[slot] = 1.0

    def predicted(self, slots: Ints, probs: Floats) -> None:
        self._probability[slots] = np.maximum(probs, NEVER_PREDICTED)

    def values(self, slots: Ints) -> Values:
        return self._probability[slots] * self._visits[slots]


MakeEviction = Callable[[int, Values | None], Eviction]


@dataclass(frozen=True)
class ExpertPolicy:
    """One way to keep and to fetch experts."""

    name: str
    what: str
    evict: MakeEviction
    predictor: str | None = None  # its name in predictors/; None = nothing is fetched ahead
    streams: bool = False  # the next layer's experts are fetched in order, all of them


POLICIES: Mapping[str, ExpertPolicy] = {
    each.name: each
    for each in (
        ExpertPolicy("stream", "layer after layer, all experts in order", FirstIn, streams=True),
        ExpertPolicy("static", "the most popular experts stay", MostPopular),
        ExpertPolicy("lru", "the least recently used leaves", LeastRecentlyUsed),
        ExpertPolicy("lfu", "the least frequently used leaves", LeastFrequentlyUsed),
        ExpertPolicy(
            "request-counts",
            "experts of the most similar earlier request (MoE-Infinity)",
            LeastFrequentlyUsed,
            "request-counts",
        ),
        ExpertPolicy(
            "next-gate",
            "the next layer's gate on this layer's hidden states (Mixtral-Offloading, FATE)",
            LeastRecentlyUsed,
            "next-gate",
        ),
        ExpertPolicy(
            "learned", "a small trained probe a layer (ProMoE)", LeastFrequentlyUsed, "learned"
        ),
        ExpertPolicy(
            "regression",
            "linear regression on the layers so far, learned while it serves",
            LeastFrequentlyUsed,
            "regression",
        ),
        ExpertPolicy(
            "finemoe", "expert maps of similar tokens (FineMoE)", LeastExpected, "finemoe"
        ),
    )
}
AUTO = "auto"
POLICY_NAMES: tuple[str, ...] = (AUTO, *POLICIES)


MIN_LOADS_TO_PREDICT = 0.5  # a layer; below it nothing can be hidden (offload_notes, section 5)
# On a host the forward pass shares its cores with what predicts and reads, which takes about half a
# millisecond a layer of it (bench.finemoe.regimes). A third to a half of a layer's loads is hidden.
MIN_LOAD_S_TO_PREDICT = 1e-3


def auto_policy(
    loads_per_layer: float, *, can_predict: bool, load_s: float | None = None
) -> ExpertPolicy:
    """What `auto` is where the link carries so many experts while a layer is computed.

    load_s: seconds to load one; None where predicting takes nothing from the forward pass.
    """
    is_worth_it = load_s is None or load_s >= MIN_LOAD_S_TO_PREDICT
    if can_predict and is_worth_it and loads_per_layer >= MIN_LOADS_TO_PREDICT:
        return ExpertPolicy("auto: regression", "", LeastFrequentlyUsed, "regression")
    return ExpertPolicy("auto: lfu", "", LeastFrequentlyUsed)


def policy_of(name: str) -> ExpertPolicy:
    """Raises ConfigError for a name that is not in the table."""
    if name not in POLICIES:
        raise ConfigError(f"--expert-policy {name!r}: choose one of {', '.join(POLICY_NAMES)}")
    return POLICIES[name]
