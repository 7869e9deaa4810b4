"""Cold restart: the old instance lets go first, and requests wait until the new one is up.

    hold --> freeze old --> [no return] --> old gone, memory gone --> memory, weights from disk
         --> requests go on in the new one, their KV computed again --> release

Nothing before the freeze is undone, because nothing is done; after it there is no old instance to
go back to, so what fails is tried again, and then the operation is degraded and nothing serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from sgl_elastic.coordinator.coordinator import Coordinator, PostSwitchTasks, Task
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Progress
from sgl_elastic.errors import ElasticInternalError
from sgl_elastic.types import Placement, Plan


class CutOverInstances(Instances, Protocol):
    """instance/from_disk.py's DiskInstances."""

    def let_go(self, instance: str) -> None:
        """A frozen instance gives its memory up; who it served is remembered for `activate`."""


class CutOverCoordinator(Coordinator):
    """A Coordinator whose plans have no step before the switch."""

    def __init__(
        self, memory: Memory, instances: CutOverInstances, front: Front, *args: Any, **options: Any
    ) -> None:
        super().__init__(memory, instances, front, *args, **options)
        self._cut_over = instances

    def scale(self, progress: Progress, plan: Plan) -> None:
        """Carry a plan out. Raises what stopped it; the old instance goes on if it was frozen."""
        if plan.before:
            raise ElasticInternalError(f"a cold restart does nothing before it: {plan.before}")
        old, _ = self._serving
        with self._nothing_stays_held(progress):
            progress.enter("switch")
            self._hold(progress)
            self._drain_if_asked(progress, old)
            self._instances.freeze(old)
            self._post_switch = PostSwitchTasks(progress, deque(self._tasks(progress, old, plan)))
            progress.switched()
            self._go_on(self._post_switch)

    def _tasks(self, progress: Progress, old: str, plan: Plan) -> list[Task]:
        new = _Later()
        steps = enumerate(plan.after)
        return [
            Task("retire", partial(self._cut_over.let_go, old)),
            *(Task("memory", partial(self._do, progress, index, step)) for index, step in steps),
            Task("prepare", partial(self._prepare, new, plan.new)),
            Task("switch", partial(self._take_over, new, old, plan.new, plan.kv_moves)),
            Task("switch", partial(self._release, progress)),
        ]

    def _prepare(self, new: _Later, placement: Placement) -> None:
        new.instance = self._instances.prepare(placement)

    def _take_over(
        self, new: _Later, old: str, placement: Placement, kv_moves: Mapping[int, int]
    ) -> None:
        if not new.is_active:
            self._instances.activate(new.instance, old, kv_moves)
            new.is_active = True
        self._note_serving(new.instance, placement)
        self._front.switch(new.instance, placement)


class _Later:
    """The new instance, once it is there."""

    instance = ""
    is_active = False
