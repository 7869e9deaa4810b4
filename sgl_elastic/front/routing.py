"""Where requests go: one immutable table, swapped by one assignment.

    scale() --> [Routing.swap / hold / release] <-- front.py reads `table` and `held` per request

The thread of a scale writes, the front's event loop reads. A reader takes the table once and works
with what it took: it sees the old table or the new one, whole, and never waits for a lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_elastic.errors import IllegalTransitionError
from sgl_elastic.types import Placement


@dataclass(frozen=True)
class RoutingTable:
    """The instance that requests go to; `version` counts switches from 1, `since_s` is the last."""

    version: int
    instance_id: str
    placement: Placement
    since_s: float


@dataclass(frozen=True)
class Held:
    """Requests wait since `since_s`, while the table was at `version`."""

    version: int
    since_s: float


class Routing:
    """The present table, and whether requests wait. Writers come from one thread at a time."""

    def __init__(self) -> None:
        self._table: RoutingTable | None = None
        self.held: Held | None = None  # None = requests go straight to the table's instance

    @property
    def table(self) -> RoutingTable:
        """The present table. Raises IllegalTransitionError before the first `swap`."""
        if self._table is None:
            raise IllegalTransitionError(
                "no instance serves yet: swap the first instance in before routing requests"
            )
        return self._table

    def swap(self, instance_id: str, placement: Placement, now_s: float) -> RoutingTable:
        """From now on requests go there. Swapping the same instance in again changes nothing.

        Harmless to repeat, because a switch is retried until it is done.
        """
        former = self._table
        if former and (former.instance_id, former.placement) == (instance_id, placement):
            return former
        version = former.version + 1 if former else 1
        self._table = RoutingTable(version, instance_id, placement, now_s)
        return self._table

    def hold(self, now_s: float) -> Held:
        """From now on requests wait. A second hold keeps the first one's time."""
        held = self.held or Held(self.table.version, now_s)
        self.held = held
        return held

    def release(self, now_s: float) -> float:
        """Requests no longer wait; the seconds they did, 0 when nothing was held."""
        held, self.held = self.held, None
        return now_s - held.since_s if held else 0.0
