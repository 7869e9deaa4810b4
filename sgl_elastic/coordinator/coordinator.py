"""Scale requests, one at a time: planned, answered, carried out in a thread, waited for.

POST /v1/scale, autoscaler --> [Coordinator.submit] --plan--> thread: [ScaleExecutor.run]
recovery.py, an instance or memory is lost --> [Coordinator.recover]
    --> [ScaleExecutor.replace]    the memory is all there
    --> [ScaleExecutor.move_away]  memory is lost, the instance computes on
    --> [ScaleExecutor.move_on]    both are lost
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from sgl_elastic.coordinator.expert_copies import RedundantExperts
from sgl_elastic.coordinator.operations import Journal, Operation, PhaseRecord, StepRecord
from sgl_elastic.coordinator.ports import Front, Instances, Memory
from sgl_elastic.coordinator.progress import Clock, Progress
from sgl_elastic.coordinator.scale import CarryOut, MakeLossPlan, ScaleExecutor, scale
from sgl_elastic.coordinator.steps import RetryPolicy
from sgl_elastic.errors import BusyError, ClosingError, ElasticInternalError
from sgl_elastic.types import OperationState, Placement, Plan, ScaleRequest

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
        carry_out: CarryOut = scale,
        make_loss_plan: MakeLossPlan | None = None,
        redundancy: RedundantExperts | None = None,
    ) -> None:
        """Without `make_loss_plan`, what memory workers lose stays lost.

        `redundancy`: the copies of experts that operations look after; None = there are none.
        """
        self.redundancy = redundancy
        self._make_loss_plan = make_loss_plan
        self._memory = memory
        self._instances = instances
        self._front = front
        self._make_plan = make_plan
        self._describe = describe
        self.journal = journal or Journal()
        self._retry_policy = retry_policy or RetryPolicy()
        self._clock = clock or Clock()
        self._new_id = new_id
        self._executor = ScaleExecutor(
            memory, instances, front, self._retry_policy, self._clock, carry_out, redundancy
        )
        self._lock = threading.Lock()
        self._is_closing = False
        self._idle = threading.Event()  # nothing runs, and the last one's listeners have heard
        self._idle.set()
        self._running = ""  # the id of the operation that runs
        self._listeners: tuple[Listener, ...] = ()
        cut_off = self.journal.recover(self._clock.now())
        if cut_off is not None and cut_off.error is not None:
            logger.warning("Scale %s was cut off: %s", cut_off.operation_id, cut_off.error.message)

    @property
    def serving(self) -> tuple[str, Placement]:
        """The instance that serves and its placement, as the last finished phase left them."""
        return self._executor.serving

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
            with self._adapter_changes_deferred():
                operation, plan = self._planned(request)
                self._start(operation, plan)
        return operation

    @contextmanager
    def _adapter_changes_deferred(self) -> Iterator[None]:
        """A plan, and the ranks that take over, are to know every adapter that is there.

        They stay as they are until the operation has ended, or now if none begins.
        """
        if self._front.defer_adapter_changes(self._retry_policy.adapter_change_s):
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
        began, began_s = self._clock.monotonic(), self._clock.now()
        _, placement = self._executor.look()
        self._memory.require(placement.device_ids)
        plan = self._make_plan(request, placement)
        operation = Operation(
            operation_id="" if request.dry_run else self._new_id(),
            request=request,
            plan=self._describe(plan),
            steps=tuple(StepRecord.of(step) for step in (*plan.before, *plan.after)),
            phases=(PhaseRecord("plan", self._clock.monotonic() - began, began_s),),
            created_s=self._clock.now(),
        )
        return operation, plan

    def _start(self, operation: Operation, plan: Plan) -> None:
        self.journal.record(operation)
        progress = self._progress_of(operation)
        threading.Thread(
            target=self._carry_out,
            args=(progress, partial(self._executor.run, progress, plan)),
            name=operation.operation_id,
            daemon=True,
        ).start()
        # The thread cannot end before this: its end takes the lock that `submit` holds.
        self._begin(operation.operation_id)

    def _progress_of(self, operation: Operation) -> Progress:
        return Progress(operation, self.journal, self._clock, self._announce)

    def _begin(self, operation_id: str) -> None:
        self._running = operation_id
        self._idle.clear()

    def _carry_out(self, progress: Progress, act: Callable[[], None]) -> None:
        """One operation: whatever happens, it finishes and the next may come."""
        error: Exception | None = None
        try:
            act()
        except Exception as caught:  # nobody is above a thread's main loop
            logger.exception("Scale %s failed", progress.operation.operation_id)
            error = caught
        with self._lock:
            self._running = ""
            progress.finish(_outcome(progress.operation, error), error)
            self._idle.set()

    def is_memory_lost(self) -> bool:
        """Whether a serving device's memory is gone, and others can have what was lost."""
        can_recover = self._make_loss_plan is not None
        return can_recover and bool(self._memory.lost(self.serving[1].device_ids))

    def recover(self, *, is_serving: bool = False) -> Operation | None:
        """Replace the instance that serves: it is lost, or memory of its devices is, or both.

        `is_serving`: the instance is not, so it serves until another one has what was lost.
        Like a scale, in the caller's thread. None after `close`, and while one runs: it goes on to
        its new instance, or is rolled back and this is called again. After a failure requests still
        wait, unless it serves.
        """
        with self._lock:
            if self._running or self._is_closing:
                return None
            lost, placement = self._executor.look()
            request = ScaleRequest(placement.dp_size, placement.device_ids)
            name = self._new_id().replace("scale-", "recovery-")
            operation = Operation(name, request, created_s=self._clock.now())
            self.journal.record(operation)  # before it is the one that runs: `running` reads it
            self._begin(name)
        progress = self._progress_of(operation)
        self._carry_out(progress, partial(self._recover, progress, lost, placement, is_serving))
        return progress.operation

    def _recover(
        self, progress: Progress, lost: str, placement: Placement, is_serving: bool
    ) -> None:
        """Raises what stopped it."""
        if not self.is_memory_lost():
            if not is_serving:
                self._executor.replace(progress, lost, placement)
        elif is_serving:
            if self._front.defer_adapter_changes(self._retry_policy.adapter_change_s):
                self._instances.drain_messages(self._retry_policy.drain_messages_s)
            self._executor.move_away(progress, placement, partial(self._planned_loss, progress))
        else:
            self._executor.move_on(progress, placement, partial(self._planned_loss, progress))

    def _planned_loss(self, progress: Progress, old: Placement, *, is_serving: bool) -> Plan:
        if self._make_loss_plan is None:
            raise ElasticInternalError("nobody plans for memory that is lost")
        plan = self._make_loss_plan(old, is_serving=is_serving)
        progress.planned(self._describe(plan), (*plan.before, *plan.after))
        return plan

    def _announce(self, operation: Operation) -> None:
        for listener in self._listeners:
            listener(operation, self.serving[1])


def _outcome(operation: Operation, error: BaseException | None) -> OperationState:
    if error is None:
        return OperationState.SUCCEEDED
    return OperationState.DEGRADED if operation.switched else OperationState.ROLLED_BACK
