"""One scale at a time: plan, memory, prepare, switch, retire, after.

    POST /v1/scale, autoscaler --> [Coordinator.submit] --> thread: [scale] --> memory, instances,
                                                                                front
Before the switch every failure undoes what was done, in reverse order, and the old instance goes
on. The switch is over when the new instance has taken over KV and requests; from then on there is
only forwards: what remains is tried again, and what still fails is left to the next scale.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from sgl_elastic.coordinator.operations import Journal, Operation, PhaseRecord, StepRecord
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Clock, Progress
from sgl_elastic.coordinator.steps import PostSwitchTasks, RetryPolicy, Steps, Task
from sgl_elastic.errors import BusyError, ClosingError, ElasticError, EngineFailedError
from sgl_elastic.plan.planner import is_empty, placement_at_switch
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest, Step, StepKind

__all__ = ["Clock", "Coordinator", "PostSwitchTasks", "RetryPolicy", "Task"]

logger = logging.getLogger(__name__)

# Plans a request against the placement that serves. Raises BadScaleError, DoesNotFitError.
MakePlan: TypeAlias = Callable[[ScaleRequest, Placement], Plan]
Describe: TypeAlias = Callable[[Plan], dict[str, Any]]
# Gets every snapshot, and the placement that serves. Called in the scale's thread: it is quick,
# raises nothing and submits nothing.
Listener: TypeAlias = Callable[[Operation, Placement], None]


class Coordinator:
    """Accepts scale requests and carries them out, one at a time. Safe to use from any thread.

    The ports are called from one thread at a time: from `submit`'s caller while it plans, and from
    the scale's own thread otherwise.
    """

    def __init__(
        self,
        memory: Memory,
        instances: Instances,
        front: Front,
        make_plan: MakePlan,
        describe: Describe,
        journal: Journal | None = None,
        *,
        retry_policy: RetryPolicy | None = None,
        clock: Clock | None = None,
        new_id: Callable[[], str] = lambda: f"scale-{uuid.uuid4().hex[:12]}",
    ) -> None:
        self._memory = memory
        self._instances = instances
        self._steps = Steps(memory, instances)
        self._front = front
        self._make_plan = make_plan
        self._describe = describe
        self.journal = journal or Journal()
        self._retry_policy = retry_policy or RetryPolicy()
        self._clock = clock or Clock()
        self._new_id = new_id
        self._lock = threading.Lock()
        self._is_closing = False
        self._idle = threading.Event()  # nothing runs, and the last one's listeners have heard
        self._idle.set()
        self._running = ""  # the id of the operation that runs
        self._post_switch: PostSwitchTasks | None = None
        self._replaced_by: dict[str, str] = {}  # lost instances
        self._listeners: tuple[Listener, ...] = ()
        self._serving = instances.serving()
        cut_off = self.journal.recover(self._clock.now())
        if cut_off is not None and cut_off.error is not None:
            logger.warning("Scale %s was cut off: %s", cut_off.operation_id, cut_off.error.message)

    @property
    def serving(self) -> tuple[str, Placement]:
        """The instance that serves and its placement, as the last finished phase left them."""
        return self._serving

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every later snapshot."""
        self._listeners = (*self._listeners, listener)

    def running(self) -> Operation | None:
        """The operation that runs now, or None."""
        running = self._running
        return self.journal.get(running) if running else None

    def wait(self, operation_id: str, timeout_s: float) -> Operation:
        """The operation once it has finished, or as it is at the time-out."""
        return self.journal.wait(operation_id, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Nothing new begins; wait for what runs. False when it still runs at the time-out."""
        with self._lock:
            self._is_closing = True
        return self._idle.wait(timeout_s)

    def submit(self, request: ScaleRequest) -> Operation:
        """Plan a request, and start carrying it out unless it is a dry run.

        A dry run's operation is kept nowhere and has an empty id; its `plan` is the answer. A key
        that came before gives that operation again, whatever became of it. Raises RequestError's
        subclasses, BusyError and ClosingError, and then nothing was changed.
        """
        with self._lock:
            known = None if request.dry_run else self.journal.find_key(request)
            if known is not None:
                return known
            self._check_idle()
            if request.dry_run:
                return self._planned(request)[0]
            with self._adapters_settled():
                operation, plan = self._planned(request)
                self._start(operation, plan)
        return operation

    @contextmanager
    def _adapters_settled(self) -> Iterator[None]:
        """A plan, and the ranks that take over, are to know every adapter that is there.

        They stay as they are until the operation has ended, or now if none begins.
        """
        if self._front.settle(self._retry_policy.settle_s):
            self._instances.drain_messages(self._retry_policy.drain_messages_s)
        try:
            yield
        except BaseException:
            self._front.scaling(False)
            raise

    def _check_idle(self) -> None:
        if self._is_closing:
            raise ClosingError("the server ends and scales no more: ask another one")
        if self._running:
            raise BusyError(
                f"scale operation {self._running} is running: wait until GET "
                f"/v1/scale/{self._running} says that it has finished"
            )

    def _planned(self, request: ScaleRequest) -> tuple[Operation, Plan]:
        began = self._clock.monotonic()
        self._serving = self._expected()
        self._memory.require(self._serving[1].device_ids)
        plan = self._make_plan(request, self._serving[1])
        operation = Operation(
            operation_id="" if request.dry_run else self._new_id(),
            request=request,
            plan=self._describe(plan),
            steps=tuple(StepRecord.of(step) for step in (*plan.before, *plan.after)),
            phases=(PhaseRecord("plan", self._clock.monotonic() - began),),
            created_s=self._clock.now(),
        )
        return operation, plan

    def _start(self, operation: Operation, plan: Plan) -> None:
        self.journal.record(operation)
        progress = Progress(operation, self.journal, self._clock, self._announce)
        threading.Thread(
            target=self._run, args=(progress, plan), name=operation.operation_id, daemon=True
        ).start()
        # The thread cannot end before this: its end takes the lock that `submit` holds.
        self._begin(operation.operation_id)

    def _run(self, progress: Progress, plan: Plan) -> None:
        """The thread of one operation: whatever happens, it finishes and the next may come."""
        error: Exception | None = None
        try:
            self._finish_former()
            self._steps.flush_pending()
            if not is_empty(plan):
                self.scale(progress, plan)
        except Exception as caught:  # nobody is above a thread's main loop
            logger.exception("Scale %s failed", progress.operation.operation_id)
            error = caught
        self._end(progress, error)

    def _begin(self, operation_id: str) -> None:
        self._running = operation_id
        self._idle.clear()

    def _end(self, progress: Progress, error: Exception | None) -> None:
        with self._lock:
            self._running = ""
            progress.finish(_outcome(progress.operation, error), error)
            self._idle.set()

    def recover(self) -> Operation | None:
        """Replace the instance that serves, which is lost, by one over the same memory.

        Like a scale, in the caller's thread. None after `close`, and while one runs: it goes on to
        its new instance, or is rolled back and this is called again. After a failure requests still
        wait.
        """
        with self._lock:
            if self._running or self._is_closing:
                return None
            self._serving = lost, placement = self._expected()
            request = ScaleRequest(placement.dp_size, placement.device_ids)
            name = self._new_id().replace("scale-", "recovery-")
            operation = Operation(name, request, created_s=self._clock.now())
            self.journal.record(operation)  # before it is the one that runs: `running` reads it
            self._begin(name)
        progress = Progress(operation, self.journal, self._clock, self._announce)
        error: Exception | None = None
        try:
            self._replace(progress, lost, placement)
        except Exception as caught:  # as in `_run`: nobody is above
            logger.exception("Instance %s could not be replaced", lost)
            error = caught
        self._end(progress, error)
        return progress.operation

    def _replace(self, progress: Progress, lost: str, placement: Placement) -> None:
        """The lost instance's memory and requests become another one's; its KV is not trusted."""
        progress.enter("prepare")
        self._hold(progress)
        self._memory.require(placement.device_ids)
        self._instances.drain_messages(self._retry_policy.drain_messages_s)
        self._memory.drop_partial_adapters(placement)
        for device_id, num_tokens in zip(placement.device_ids, placement.kv_tokens, strict=True):
            # It may have been lost while its KV was growing or shrinking.
            self._memory.execute(Step(StepKind.MAP_KV, device_id, num_tokens=num_tokens))
        self._memory.commit()
        new = self._instances.prepare(placement)
        progress.enter("switch")
        with ExitStack() as stack:
            stack.callback(self._undo, progress, self._instances.cancel, new)
            self._instances.freeze(lost)
            self._instances.activate(new, lost, {})
            stack.pop_all()
        progress.switched()
        self._steps.forget_pending()
        self._replaced_by[lost] = new
        if self._post_switch is not None:  # its switch is this one
            rest = (task for task in self._post_switch.tasks if task.phase != "switch")
            self._post_switch.tasks = deque(rest)
        self._note_serving(new, placement)
        self._retry(partial(self._front.switch, new, placement))
        self._release(progress)
        progress.enter("retire")
        self._retry(partial(self._instances.retire, lost))

    def scale(self, progress: Progress, plan: Plan) -> None:
        """Carry a plan out. Raises what stopped it; before the switch everything is undone then."""
        (old, _), placement = self._serving, placement_at_switch(plan)
        with self._nothing_stays_held(progress), ExitStack() as stack:
            undo = partial(self._undo_later, stack, progress)
            new = self._prepared(progress, plan, placement, undo)
            progress.enter("switch")
            self._hold(progress)
            undo(self._release, progress)
            self._drain_if_asked(progress, old)
            self._instances.freeze(old)
            undo(self._instances.resume, old)
            self._instances.activate(new, old, plan.kv_moves)
            self._post_switch = self._after_the_switch(progress, old, new, placement, plan)
            stack.pop_all()
            progress.switched()
            self._go_on(self._post_switch)

    def _prepared(
        self, progress: Progress, plan: Plan, placement: Placement, undo: Callable[..., object]
    ) -> str:
        """Memory, then an instance attached to it; `undo` is told how to take each part back."""
        progress.enter("memory")
        for index, step in enumerate(plan.before):
            undo(self._take_back, progress, index, step, plan.old)  # it may fail when half done
            self._do(progress, index, step)
        progress.enter("prepare")
        new = self._instances.prepare(placement)
        undo(self._instances.cancel, new)
        return new

    def _after_the_switch(
        self, progress: Progress, old: str, new: str, placement: Placement, plan: Plan
    ) -> PostSwitchTasks:
        """All that follows the point of no return, in order."""
        first = len(plan.before)
        tasks = [
            Task("switch", partial(self._note_serving, new, placement)),
            Task("switch", partial(self._front.switch, new, placement)),
            Task("switch", partial(self._release, progress)),
            Task("retire", partial(self._instances.retire, old)),
            *(
                Task("after", partial(self._do, progress, first + number, step))
                for number, step in enumerate(plan.after)
            ),
            Task("after", partial(self._note_serving, new, plan.new)),
        ]
        return PostSwitchTasks(progress, deque(tasks))

    def _note_serving(self, instance: str, placement: Placement) -> None:
        while instance in self._replaced_by:
            instance = self._replaced_by[instance]
        self._serving = (instance, placement)

    def _go_on(self, post_switch: PostSwitchTasks) -> None:
        """Do the tasks in order. Raises when one fails in every attempt; it and the rest stay."""
        while post_switch.tasks:
            task = post_switch.tasks[0]
            post_switch.progress.enter(task.phase)
            self._retry(task.act)
            post_switch.tasks.popleft()
        self._memory.commit()
        self._post_switch = None

    def _expected(self) -> tuple[str, Placement]:
        """What serves, as the plans see it: what is pending is given back before they begin."""
        name, placement = self._instances.serving()
        return name, self._steps.with_pending(placement)

    def _finish_former(self) -> None:
        """What a degraded operation left; its pages must be free before the next plan's steps."""
        former = self._post_switch
        if former is not None:
            self._go_on(former)
            former.progress.finish(OperationState.SUCCEEDED, None)

    def _do(self, progress: Progress, index: int, step: Step) -> None:
        with progress.step(index):
            self._steps.do(step)

    def _take_back(self, progress: Progress, index: int, step: Step, old: Placement) -> None:
        self._steps.take_back(step, old)
        progress.undone(index)

    def _undo_later(self, stack: ExitStack, progress: Progress, *call: Any) -> None:
        stack.callback(self._undo, progress, *call)

    def _undo(self, progress: Progress, action: Callable[..., None], *args: Any) -> None:
        """One undo, and the undos below it run whether it fails or not."""
        progress.enter("undo")
        self._or_noted(progress, action, *args)

    def _or_noted(self, progress: Progress, action: Callable[..., None], *args: Any) -> None:
        """Try an action patiently; a failure is noted in the operation and goes no further."""
        try:
            self._retry(partial(action, *args))
        except ElasticError as error:
            logger.error("Scale %s: undo failed: %s", progress.operation.operation_id, error)
            progress.undo_failed(error)

    def _hold(self, progress: Progress) -> None:
        progress.held()
        self._front.hold()

    def _release(self, progress: Progress) -> None:
        self._front.release()
        progress.released()

    @contextmanager
    def _nothing_stays_held(self, progress: Progress) -> Iterator[None]:
        """However the block ends, requests go on; what ended it stays the error."""
        try:
            yield
        finally:
            if progress.holding:
                self._or_noted(progress, self._release, progress)

    def _drain_if_asked(self, progress: Progress, old: str) -> None:
        """Let running requests finish on the old instance while new ones wait.

        Those that still run at the time-out are handed over like without a drain. New ones must
        wait, because the old and the new instance share the KV and only one may write to it.
        """
        if not progress.operation.request.drain:
            return
        progress.enter("drain")
        try:
            self._instances.drain(old, self._retry_policy.drain_timeout_s)
        except EngineFailedError as error:
            logger.warning("Drain of %s given up: %s", old, error)
        progress.enter("switch")

    def _retry(self, act: Callable[[], None]) -> None:
        self._retry_policy.retry(act, self._clock.sleep)

    def _announce(self, operation: Operation) -> None:
        for listener in self._listeners:
            listener(operation, self._serving[1])


def _outcome(operation: Operation, error: BaseException | None) -> OperationState:
    if error is None:
        return OperationState.SUCCEEDED
    return OperationState.DEGRADED if operation.switched else OperationState.ROLLED_BACK
