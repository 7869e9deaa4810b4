"""A new instance with memory of its own, beside the old one or in its place.

    [side_by_side]  memory, weights from disk --> hold --> freeze old --> activate new --> old gone
    [cold_restart]  hold --> freeze old --> [no return] --> old gone, memory gone --> memory,
                    weights from disk --> activate new --> release

Either way requests go on in the new one, their KV computed again. A cold restart does nothing
before the freeze that could be undone; after it there is no old instance to go back to, so what
fails is tried again, and then the operation is degraded and nothing serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sgl_elastic.baselines.from_disk import without_kv
from sgl_elastic.coordinator.scale import Scaling
from sgl_elastic.coordinator.steps import Task
from sgl_elastic.errors import ElasticInternalError
from sgl_elastic.instance.handover import FrozenInstance, HandedOver
from sgl_elastic.types import Plan


def side_by_side(scaling: Scaling, plan: Plan) -> None:
    """`CarryOut`: the elastic way, but that no KV is handed over."""
    scaling.map_memory(plan)
    new = scaling.prepare(plan.new)
    frozen = without_kv(scaling.freeze())
    handover = scaling.instances.activate(new, frozen, plan.kv_moves)
    switch = scaling.switch_tasks(new, plan.new, handover)
    scaling.finish([*switch, *scaling.retire_tasks(new, plan)])


def cold_restart(scaling: Scaling, plan: Plan) -> None:
    """`CarryOut` of plans that have no step before the switch."""
    if plan.before:
        raise ElasticInternalError(f"a cold restart does nothing before it: {plan.before}")
    restart = _Restart(scaling, plan, without_kv(scaling.freeze()))
    scaling.finish(
        [
            Task("retire", partial(scaling.instances.retire, scaling.old)),
            *scaling.step_tasks("memory", plan),
            Task("prepare", restart.prepare),
            Task("switch", restart.take_over),
        ]
    )


@dataclass
class _Restart:
    """The new instance and what it took over, once they are there. Its parts are repeatable."""

    scaling: Scaling
    plan: Plan
    frozen: FrozenInstance
    instance: str = ""
    handover: HandedOver | None = None

    def prepare(self) -> None:
        self.instance = self.scaling.instances.prepare(self.plan.new)

    def take_over(self) -> None:
        """Requests go on in it, those that waited too; it takes over once."""
        if self.handover is None:
            self.handover = self.scaling.instances.activate(
                self.instance, self.frozen, self.plan.kv_moves
            )
        for task in self.scaling.switch_tasks(self.instance, self.plan.new, self.handover):
            task.act()
