"""Redundant experts of a live server: copies that come, change and go between two steps.

heat, placement --> [RedundantExperts.renew] --> copies chosen (plan/redundancy.py)
                                             --> memory: pages and peer copies; nobody reads them
                                             --> instances: all ranks compute by them from a step on
                                             --> memory: pages of former copies go

A scale begins without copies, so that it plans and undoes as it does without any, and ends with
those of the new placement. What fails here costs copies, never the operation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sgl_elastic.errors import ElasticError
from sgl_elastic.plan.redundancy import (
    Heat,
    choose_copies,
    expert_load,
    fitting_copies,
    most_per_device,
    not_copied,
)
from sgl_elastic.types import AdapterEntry, ExpertCopy, MemoryShape, Placement

logger = logging.getLogger(__name__)

Copies = tuple[ExpertCopy, ...]
_LEAST_TOKENS_PER_EXPERT = 16  # of a layer; fewer are no heat
_WORTH_A_RENEWAL = 0.05  # of imbalance: less is noise, and each renewal stops the ranks


class CopyMemory(Protocol):
    """What of the HMM is needed."""

    def shape(self) -> MemoryShape: ...
    def adapters(self) -> tuple[AdapterEntry, ...]: ...
    def free_pages(self, placement: Placement) -> dict[int, int]: ...
    def place(self, placement: Placement, copies: Copies) -> int: ...
    def drop(self, placement: Placement, kept: Copies = ()) -> None: ...


class CopyInstances(Protocol):
    """What of the IMM is needed."""

    def serving(self) -> tuple[str, Placement]: ...
    def heat(self) -> Heat: ...
    def place_copies(self, copies: Copies) -> None: ...


@dataclass(frozen=True)
class _Tried:
    """Copies that had no room, where that was."""

    placement: Placement | None = None
    adapters: tuple[AdapterEntry, ...] = ()
    refused: frozenset[ExpertCopy] = frozenset()

    def on(self, placement: Placement, adapters: tuple[AdapterEntry, ...]) -> frozenset[ExpertCopy]:
        """Nothing of another placement, or with other adapters: there may be room."""
        is_there = (placement, adapters) == (self.placement, self.adapters)
        return self.refused if is_there else frozenset()


class RedundantExperts:
    """`num_copies` expert slots more in each layer, over all devices.

    `is_due` and `report` are for any thread, the others for the one that carries operations out.
    """

    def __init__(
        self,
        num_copies: int,
        memory: CopyMemory,
        instances: CopyInstances,
        on_change: Callable[[Placement, Copies], None] = lambda placement, copies: None,
    ) -> None:
        self._num_copies = num_copies
        self._memory = memory
        self._instances = instances
        self._copies: Copies = ()
        self._without_room = _Tried()
        self.on_change = on_change

    def drop(self) -> None:
        """No copies: every expert is computed at its home. Raises StepFailedError."""
        if self._copies:
            self._instances.place_copies(())
            self.forget(self._instances.serving()[1])

    def forget(self, placement: Placement) -> None:
        """No rank computes by copies any more: their pages go. Raises MemoryWorkerError."""
        self._copies = ()
        self._memory.drop(placement)
        self.on_change(placement, ())

    def renew(self) -> None:
        """The best copies for the heat there is. A failure is logged: there are fewer then."""
        try:
            self._renew(self._instances.serving()[1])
        except ElasticError as error:
            logger.warning("elastic: copies of experts could not be renewed: %s", error)

    def _renew(self, placement: Placement) -> None:
        wanted = self._choose(placement)
        if wanted == self._copies:
            return
        kept = tuple(copy for copy in self._copies if copy in wanted)
        if kept != self._copies:  # first the room of those that go
            self._instances.place_copies(kept)
            self._copies = kept
            self._memory.drop(placement, kept)
        if wanted != kept:
            try:
                self._memory.place(placement, wanted)
            except ElasticError:
                self._memory.drop(placement, kept)
                raise
            self._instances.place_copies(wanted)
        self._copies = wanted
        self.on_change(placement, wanted)
        logger.info("elastic: %d copies of experts on %d devices", len(wanted), placement.dp_size)

    def _choose(self, placement: Placement) -> Copies:
        heat, memory = self._heat(), self._memory
        copies = self._best(heat, placement)
        free_pages, adapters = memory.free_pages(placement), memory.adapters()
        found = fitting_copies(memory.shape(), placement, copies, adapters, free_pages, heat)
        self._without_room = _Tried(placement, adapters, frozenset(copies).difference(found))
        return found

    def _best(self, heat: Heat, placement: Placement) -> Copies:
        """Whether or not there is room for them."""
        most = most_per_device(self._num_copies)
        return choose_copies(heat, placement, self._num_copies, most)

    def _heat(self) -> Heat:
        """What is counted, of each layer; layers with too little say nothing."""
        shape, counted = self._memory.shape(), self._instances.heat()
        nothing = [0] * shape.num_experts
        layer_ids = {region.layer_id for region in shape.regions if region.layer_id >= 0}
        least = _LEAST_TOKENS_PER_EXPERT * shape.num_experts
        return {
            layer_id: counted[layer_id] if sum(counted.get(layer_id, ())) >= least else nothing
            for layer_id in sorted(layer_ids)
        }

    def is_due(self) -> bool:
        """Whether other copies would leave less imbalance by what is worth a stop of the ranks.

        Those that had no room are not tried again before devices or adapters have changed.
        """
        placement = self._instances.serving()[1]
        heat = self._heat()
        refused = self._without_room.on(placement, self._memory.adapters())
        wanted = tuple(copy for copy in self._best(heat, placement) if copy not in refused)
        copies = self._copies_of(placement)
        if not copies:
            return bool(wanted)
        now, then = (expert_load(heat, placement, each) for each in (copies, wanted))
        return now.imbalance - then.imbalance > _WORTH_A_RENEWAL

    def report(self) -> dict[str, Any]:
        """What GET /v1/instances says."""
        placement, heat = self._instances.serving()[1], self._heat()
        copies = self._copies_of(placement)
        return {
            "per_layer": self._num_copies,
            "imbalance": expert_load(heat, placement, copies).imbalance,
            "imbalance_without": expert_load(heat, placement, ()).imbalance,
            "devices": [_device(placement, copies, each, heat) for each in placement.device_ids],
        }

    def _copies_of(self, placement: Placement) -> Copies:
        """After a loss another placement serves for a while before former copies are forgotten."""
        return tuple(
            copy
            for copy in self._copies
            if copy.device_id in placement.device_ids
            and copy.device_id != placement.homes[copy.expert_id]
        )


def _device(
    placement: Placement, copies: Sequence[ExpertCopy], device_id: int, heat: Mapping[int, Any]
) -> dict[str, int]:
    return {
        "device_id": device_id,
        "copies": sum(copy.device_id == device_id for copy in copies),
        "experts_only_here": not_copied(placement, copies, tuple(heat), device_id),
    }
