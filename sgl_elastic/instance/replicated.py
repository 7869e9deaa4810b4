"""Two instances that serve at once, for horizontal scaling.

    strategy_replicas.py --> [ReplicatedInstances] --> the first instance, and a second beside it

Together they are named `first+second`. The second reads its weights from disk and shares nothing.
"""

from __future__ import annotations

from typing import Any

from sgl_elastic.instance.from_disk import DiskInstances
from sgl_elastic.instance.state import InstanceState
from sgl_elastic.plan.replicas import both
from sgl_elastic.types import Placement


class ReplicatedInstances(DiskInstances):
    """`Replicas` of coordinator/strategy_replicas.py."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, shares_memory=False, **options)
        self._second = ""

    def serving(self) -> tuple[str, Placement]:
        name, placement = super().serving()
        second = self._running.get(self._second)
        if second is None or second.record.placement is None:
            return name, placement
        return f"{name}+{self._second}", both(placement, second.record.placement)

    def is_lost(self) -> bool:
        return False  # a baseline: what dies is not replaced

    def join(self, instance: str) -> str:
        """A prepared replica runs beside the first; the name of the two together."""
        running = self._running[instance]
        self._run(running)
        self._advance(running, InstanceState.ACTIVE)
        self._second = instance
        return self.serving()[0]

    def first(self) -> str:
        """The name of the first by itself."""
        return self._active

    def end_second(self) -> None:
        """The second replica ends; harmless a second time."""
        self.stop(self._second)
        self._second = ""
