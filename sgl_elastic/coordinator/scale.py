"""A scale, carried out: memory, prepare, freeze, activate, switch, retire, after.

    coordinator.py --plan--> [ScaleExecutor] --> [scale]: one line a part --> memory, instances,
                                                                              front
Before the switch every failure undoes what was done, in reverse order, and the old instance goes
on. The switch is over when the new instance has taken over KV and requests; from then on there is
only forwards: what remains is tried again, and what still fails is left to the next scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from sgl_elastic.coordinator.expert_copies import RedundantExperts
from sgl_elastic.coordinator.operations import HandoverRecord
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Clock, Progress
from sgl_elastic.coordinator.steps import PostSwitchTasks, RetryPolicy, Steps, Task
from sgl_elastic.errors import ElasticError, EngineFailedError
from sgl_elastic.instance.handover import FrozenInstance, HandedOver, kept_kv
from sgl_elastic.plan.loss import Loss, layers_of, what_is_left
from sgl_elastic.plan.planner import is_empty, placement_at_switch
from sgl_elastic.types import READS, OperationState, Placement, Plan, Step, StepKind

logger = logging.getLogger(__name__)


@dataclass
class Scaling:
    """What one operation has to work with: the verbs that every way to scale is made of.

    Until `finish` begins, what each verb did is taken back when the operation fails.
    """

    executor: ScaleExecutor
    progress: Progress
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def instances(self) -> Instances:
        """The port."""
        return self.executor.instances

    @property
    def old(self) -> str:
        """The instance that served when the operation began to plan."""
        return self.executor.serving[0]

    def map_memory(self, plan: Plan) -> None:
        """The plan's steps before the switch."""
        self.progress.enter("memory")
        for index, step in enumerate(plan.before):
            if step.kind in READS:
                continue  # the new instance's ranks do that, in `prepare`
            self._undo_later(self._take_back, index, step, plan.old)  # it may fail when half done
            self.do(index, step)

    def prepare(self, placement: Placement, plan: Plan | None = None) -> str:
        """An instance that is attached to the placement's memory, and has read what `plan` says."""
        self.progress.enter("prepare")
        reads = {i: s for i, s in enumerate(plan.before if plan else ()) if s.kind in READS}
        with ExitStack() as timed:
            for index in reads:
                timed.enter_context(self.progress.step(index))
            new = self.instances.prepare(placement, tuple(reads.values()))
            for index, num_bytes in self._num_read(new, reads).items():
                self.progress.copied(index, num_bytes)
        self._undo_later(self.instances.cancel, new)
        return new

    def _num_read(self, new: str, reads: Mapping[int, Step]) -> dict[int, int]:
        """Step -> bytes. A rank counts what it reads together: it is said once."""
        first = {step.device_id: index for index, step in reversed(list(reads.items()))}
        return {at: self.instances.num_read(new, device) for device, at in first.items()}

    def freeze(self) -> FrozenInstance:
        """Requests wait from now on, and the old instance stops: after a drain if that is asked."""
        self.progress.enter("switch")
        self.hold()
        self._undo_later(self.release)
        self._drain_if_asked()
        frozen = self.instances.freeze(self.old)
        self._undo_later(self.instances.resume, self.old)
        return frozen

    def switch_tasks(self, new: str, placement: Placement, handover: HandedOver) -> list[Task]:
        """Requests go to the instance that has taken over; it runs when they have been sent."""
        front = self.executor.front
        self.progress.handed_over(handover_record(handover))
        return [
            Task("switch", partial(self.executor.note_serving, new, placement)),
            Task("switch", partial(front.switch, new, placement, handover)),
            Task("switch", partial(self.instances.start_serving, new)),
            Task("switch", self.release),
        ]

    def retire_tasks(self, new: str, plan: Plan) -> list[Task]:
        """The old instance leaves, then the plan's steps after the switch are done."""
        return [
            Task("retire", partial(self.instances.retire, self.old)),
            *self.step_tasks("after", plan),
            Task("after", partial(self.executor.note_serving, new, plan.new)),
        ]

    def step_tasks(self, phase: str, plan: Plan) -> list[Task]:
        """The plan's steps after the switch."""
        steps = enumerate(plan.after, len(plan.before))
        return [Task(phase, partial(self.do, index, step)) for index, step in steps]

    def finish(self, tasks: Sequence[Task]) -> None:
        """The point of no return: nothing is undone any more, and these tasks must be done.

        Raises when one fails in every attempt; it and the rest are left to the next operation.
        """
        self.undo.pop_all()
        self.progress.switched()
        self.executor.finish(PostSwitchTasks(self.progress, list(tasks)))

    def do(self, index: int, step: Step) -> None:
        """One step of the plan. Raises StepFailedError."""
        with self.progress.step(index):
            self.progress.copied(index, self.executor.steps.do(step))

    def hold(self) -> None:
        """Requests wait from now on."""
        self.progress.held()
        self.executor.front.hold()

    def release(self) -> None:
        """Requests go on."""
        self.executor.front.release()
        self.progress.released()

    @contextmanager
    def nothing_stays_held(self) -> Iterator[None]:
        """However the block ends, requests go on; what ended it stays the error."""
        try:
            yield
        finally:
            if self.progress.holding:
                self._retry_or_note(self.release)

    def _take_back(self, index: int, step: Step, old: Placement) -> None:
        self.executor.steps.take_back(step, old)
        self.progress.undone(index)

    def _undo_later(self, action: Callable[..., None], *args: object) -> None:
        self.undo.callback(self._undo, partial(action, *args))

    def _undo(self, action: Callable[[], None]) -> None:
        """One undo, and the undos below it run whether it fails or not."""
        self.progress.enter("undo")
        self._retry_or_note(action)

    def _retry_or_note(self, action: Callable[[], None]) -> None:
        """Try an action several times; a failure is noted in the operation and goes no further."""
        try:
            self.executor.retry(action)
        except ElasticError as error:
            name = self.progress.operation.operation_id
            logger.error("Scale %s: undo failed: %s", name, error)
            self.progress.undo_failed(error)

    def _drain_if_asked(self) -> None:
        """Let running requests finish on the old instance while new ones wait.

        Those that still run at the time-out are handed over like without a drain. New ones must
        wait, because the old and the new instance share the KV and only one may write to it.
        """
        if not self.progress.operation.request.drain:
            return
        self.progress.enter("drain")
        try:
            self.instances.drain(self.old, self.executor.retry_policy.drain_timeout_s)
        except EngineFailedError as error:
            logger.warning("Drain of %s given up: %s", self.old, error)
        self.progress.enter("switch")


class MakeLossPlan(Protocol):
    """What is to be done about memory that is lost."""

    def __call__(self, old: Placement, *, is_serving: bool) -> Plan:
        """Raises DoesNotFitError."""


# How a plan is carried out; the paper's other ways to scale have theirs (baselines/).
CarryOut: TypeAlias = Callable[[Scaling, Plan], None]


def handover_record(handover: HandedOver) -> HandoverRecord:
    """What an operation says of a hand-over."""
    return HandoverRecord(
        num_requests=len(handover.ranks),
        frozen_kv_slots=handover.num_frozen_slots,
        kept_kv_slots=handover.num_kept_slots,
        copied_kv_slots=handover.num_copied_slots,
    )


def scale(scaling: Scaling, plan: Plan) -> None:
    """The elastic way. Raises what stopped it; before `finish` everything is undone then."""
    placement = placement_at_switch(plan)
    scaling.map_memory(plan)
    new = scaling.prepare(placement, plan)
    frozen = kept_kv(scaling.freeze(), plan.old.device_ids)
    handover = scaling.instances.activate(new, frozen, plan.kv_moves)
    switch = scaling.switch_tasks(new, placement, handover)
    scaling.finish([*switch, *scaling.retire_tasks(new, plan)])


class ScaleExecutor:
    """Carries out one operation at a time, and keeps what it could not finish for the next.

    For one thread at a time, like its ports.
    """

    def __init__(
        self,
        memory: Memory,
        instances: Instances,
        front: Front,
        retry_policy: RetryPolicy,
        clock: Clock,
        carry_out: CarryOut = scale,
        redundancy: RedundantExperts | None = None,
    ) -> None:
        self.memory = memory
        self.instances = instances
        self.front = front
        self.steps = Steps(memory, instances)
        self.retry_policy = retry_policy
        self._clock = clock
        self._carry_out = carry_out
        self._post_switch: PostSwitchTasks | None = None
        self.redundancy = redundancy
        self._replaced_by: dict[str, str] = {}  # lost instances
        self._has_failed_to_move_on = False
        self.serving = instances.serving()

    def look(self) -> tuple[str, Placement]:
        """What serves, as plans see it: KV that is pending is given back before they begin."""
        name, placement = self.instances.serving()
        self.serving = (name, self.steps.with_pending(placement))
        return self.serving

    def run(self, progress: Progress, plan: Plan) -> None:
        """What was left before, then this plan. Raises what stopped it."""
        self._finish_former()
        self.steps.flush_pending()
        if is_empty(plan):
            self._renew_copies()
            return
        if self.redundancy is not None:
            self.redundancy.drop()
        scaling = Scaling(self, progress)
        try:
            with scaling.nothing_stays_held(), scaling.undo:
                self._carry_out(scaling, plan)
        except Exception:
            if not progress.operation.switched:
                self._renew_copies()
            raise
        self._renew_copies()

    def _renew_copies(self) -> None:
        """Of a degraded operation steps are left: copies wait until they are done."""
        if self.redundancy is not None and self._post_switch is None:
            self.redundancy.renew()

    def _begin_copies_anew(self, placement: Placement) -> None:
        """Another instance has come, whose ranks know of none: former ones go, then others come."""
        if self.redundancy is not None:
            self.retry(partial(self.redundancy.forget, placement))
            self._renew_copies()

    def replace(self, progress: Progress, lost: str, placement: Placement) -> None:
        """The lost instance's memory and requests become another one's; its KV is not trusted.

        After a failure requests still wait: there is no instance that they could go to.
        """
        scaling = Scaling(self, progress)
        progress.enter("prepare")
        scaling.hold()
        self._restore_memory(placement)
        with scaling.undo:
            new = scaling.prepare(placement)
            progress.enter("switch")
            handover = self.instances.activate(new, self.instances.freeze(lost), {})
            scaling.undo.pop_all()
        progress.switched()
        self.steps.forget_pending()
        self._replaced_by[lost] = new
        self._drop_post_switch("switch")  # its switch is this one
        for task in scaling.switch_tasks(new, placement, handover):
            self.retry(task.act)
        progress.enter("retire")
        self.retry(partial(self.instances.retire, lost))
        self._begin_copies_anew(placement)

    def move_away(self, progress: Progress, placement: Placement, make_plan: MakeLossPlan) -> None:
        """Memory is lost, and the instance over it computes on until others have what was lost."""
        progress.enter("plan")
        self.memory.forget(lost := self.memory.lost(placement.device_ids))
        self._finish_former("after")
        self.steps.forget_pending(lost)
        self.steps.flush_pending()
        plan = make_plan(placement, is_serving=True)
        scaling = Scaling(self, progress)
        with scaling.nothing_stays_held(), scaling.undo:
            scale(scaling, plan)
        self.retry(partial(self.memory.keep_only, plan.new))
        self._begin_copies_anew(plan.new)

    def move_on(self, progress: Progress, placement: Placement, make_plan: MakeLossPlan) -> None:
        """Memory is lost, and so is the instance: another one goes on with what is left.

        After a failure requests still wait. Copies of experts in some layers only cost room beside
        what they are copied to: where that may be why, the next attempt does without them.
        """
        scaling = Scaling(self, progress)
        progress.enter("plan")
        scaling.hold()
        self.memory.forget(lost := self.memory.lost(placement.device_ids))
        self._finish_former("switch", "after")
        self.steps.forget_pending()
        left = self._left_of(placement, lost)
        self._restore_memory(left, keeps_copies=True)
        if self._has_failed_to_move_on:
            self.memory.keep_only(left)
        self._has_failed_to_move_on = True
        plan = make_plan(placement, is_serving=False)
        with scaling.undo:
            scale(scaling, plan)
        self._has_failed_to_move_on = False
        self.retry(partial(self.memory.keep_only, plan.new))
        self._begin_copies_anew(plan.new)

    def _left_of(self, placement: Placement, lost: Sequence[int]) -> Placement:
        held = self.memory.held(d for d in placement.device_ids if d not in lost)
        return what_is_left(placement, Loss(tuple(lost), held), layers_of(self.memory.shape()))

    def _drop_post_switch(self, *phases: str) -> None:
        """What a degraded operation left of these phases is another's to do now."""
        if self._post_switch is not None:
            rest = [task for task in self._post_switch.tasks if task.phase not in phases]
            self._post_switch.tasks = rest

    def _restore_memory(self, placement: Placement, *, keeps_copies: bool = False) -> None:
        """Whole adapters only, and all of the KV: the loss may have come while either changed."""
        self.memory.require(placement.device_ids)
        self.instances.drain_messages(self.retry_policy.drain_messages_s)
        self.memory.drop_partial_adapters(placement, keeps_copies=keeps_copies)
        for device_id, num_tokens in zip(placement.device_ids, placement.kv_tokens, strict=True):
            self.memory.execute(Step(StepKind.MAP_KV, device_id, num_tokens=num_tokens))
        self.memory.commit()

    def note_serving(self, instance: str, placement: Placement) -> None:
        """This instance, or what has replaced it since, serves."""
        while instance in self._replaced_by:
            instance = self._replaced_by[instance]
        self.serving = (instance, placement)

    def finish(self, post_switch: PostSwitchTasks) -> None:
        """Do the tasks in order. Raises when one fails in every attempt; it and the rest stay."""
        self._post_switch = post_switch
        while post_switch.tasks:
            task = post_switch.tasks[0]
            post_switch.progress.enter(task.phase)
            self.retry(task.act)
            post_switch.tasks.pop(0)
        self.memory.commit()
        self._post_switch = None

    def _finish_former(self, *but: str) -> None:
        """What a degraded operation left; its pages must be free before the next plan's steps.

        `but`: phases whose tasks are another's now.
        """
        self._drop_post_switch(*but)
        former = self._post_switch
        if former is not None:
            self.finish(former)
            former.progress.finish(OperationState.SUCCEEDED, None)

    def retry(self, action: Callable[[], None]) -> None:
        """Try an action that is harmless to repeat. Raises the last attempt's error."""
        self.retry_policy.retry(action, self._clock.sleep)
