"""Whose the adapter slots are, as numbers that outlive slots and servers.

    AdapterPlane --[AdapterOwners.numbers]--> StepTokens.owners: expert maps are kept by them
                                          --> a trace's SlotChange

By name: an adapter that is loaded again, from other files too, is the same task.
"""

from __future__ import annotations

import hashlib

from sgl_esft.offload.routing import NO_OWNER
from sgl_esft.weave.plane import AdapterPlane

_BYTES = 7  # of a number: never negative as int64


class AdapterOwners:
    """Of one rank."""

    def __init__(self, plane: AdapterPlane) -> None:
        self._plane = plane
        self._num_changes = -1
        self._numbers: tuple[int, ...] = ()

    def numbers(self) -> tuple[int, ...]:
        """By adapter slot; NO_OWNER for one that nobody has."""
        if self._num_changes != self._plane.uses.num_changes:
            self._num_changes = self._plane.uses.num_changes
            self._numbers = self._of_now()
        return self._numbers

    def _of_now(self) -> tuple[int, ...]:
        first = next(iter(self._plane.layers.values()))
        found = [NO_OWNER] * (first.expert_map.table.shape[0] - 1)  # the last row is the base's
        for placed in self._plane.placed():
            found[placed.adapter_slot] = owner_number(placed.source.name)
        return tuple(found)


def owner_number(name: str) -> int:
    """Of an adapter's name: the same everywhere."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_BYTES).digest(), "little")
