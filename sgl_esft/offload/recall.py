"""How good predictions were: of what a layer was asked for, the share that had been named. Pure.

    ahead.py: what a pass's predictions name --[named]--> slots by layer, and from how far ahead
    decisions.py: what a layer's step needs --[asked]--> RecallRow by layer and distance

*Distance* is in MoE layers: 1 is named while the layer before is computed; before the first layer
is distance 1 from layer 0, 2 from layer 1. Only passes that are predicted for count. A slot that
several tokens need is one, as it is for loads; one that is named from two distances counts in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sgl_esft.offload.routing import Ints


@dataclass
class RecallRow:
    """Distinct slots of a layer's steps that were named from one distance."""

    num_named: int = 0
    num_found: int = 0  # of them, asked for by the step

    def recall(self, num_asked: int) -> float:
        """Of `num_asked` slots, the share that was named; 0 of none."""
        return self.num_found / num_asked if num_asked else 0.0


class Recall:
    """Of all MoE layers of a rank, numbered from 0, since the start.

    There is a row for a layer and distance once something was named from there, so there are at
    most as many as layers times the distances that a predictor looks ahead.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_asked = [0] * num_layers  # by layer: distinct slots of predicted passes' steps
        self._rows: dict[tuple[int, int], RecallRow] = {}
        self._named: list[dict[int, set[int]]] = [{} for _ in range(num_layers)]  # by distance
        self._is_on = False

    @property
    def rows(self) -> Mapping[tuple[int, int], RecallRow]:
        """By (layer, distance); changes with each pass."""
        return self._rows

    def begin(self) -> None:
        """A forward pass begins, and is not predicted for until `watch`."""
        if self._is_on:
            self._is_on = False
            for by_distance in self._named:
                by_distance.clear()

    def watch(self) -> None:
        """The pass at hand is predicted for, whether or not anything will be named."""
        self._is_on = True

    def named(self, layer: int, distance: int, slots: Ints) -> None:
        """Some token is expected to need these slots."""
        self._named[layer].setdefault(distance, set()).update(slots.tolist())

    def asked(self, layer: int, needed: Ints) -> None:
        """The layer's step needs these distinct slots."""
        if not self._is_on:
            return
        self.num_asked[layer] += len(needed)
        wanted = set(needed.tolist())
        for distance, slots in self._named[layer].items():
            row = self._rows.setdefault((layer, distance), RecallRow())
            row.num_named += len(slots)
            row.num_found += len(slots & wanted)
