"""What a running scale writes down about itself.

scale() --enter, step, held, finish--> [Progress] --snapshots--> Journal, listeners (metrics)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sgl_elastic.coordinator.operations import (
    ErrorRecord,
    HandoverRecord,
    Journal,
    Operation,
    StepRecord,
    StepState,
)
from sgl_elastic.errors import ElasticError
from sgl_elastic.types import OperationState, Step


@dataclass(frozen=True)
class Clock:
    """Time, as a scale sees it."""

    now: Callable[[], float] = time.time  # Unix seconds
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Progress:
    """What a scale writes down about itself: one snapshot after the other of its operation."""

    def __init__(
        self,
        operation: Operation,
        journal: Journal,
        clock: Clock,
        announce: Callable[[Operation], None],
    ) -> None:
        self.operation = operation
        self._journal = journal
        self._clock = clock
        self._announce = announce
        self._phase_began = clock.monotonic()
        self._held_since: float | None = None

    @property
    def holding(self) -> bool:
        """Whether requests may be held."""
        return self._held_since is not None

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before it ends; nothing when it is the same. Durable."""
        if self.operation.phase == phase and not self.operation.finished:
            return
        self._end_phase()
        self._phase_began = self._clock.monotonic()
        begun = self.operation.with_phase(phase, self._clock.now())
        # A degraded operation stays so until what it left is done.
        state = begun.state if begun.finished else OperationState.RUNNING
        self._publish(replace(begun, state=state), durable=True)

    def planned(self, description: dict[str, Any], steps: Iterable[Step]) -> None:
        """Only now it is known what will be done."""
        records = tuple(StepRecord.of(step) for step in steps)
        self._publish(replace(self.operation, plan=description, steps=records))

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Time the step at `index`; DONE, or FAILED when the block raises."""
        self._publish(self.operation.with_step(index, StepState.RUNNING))
        began = self._clock.monotonic()
        outcome = StepState.FAILED
        try:
            yield
            outcome = StepState.DONE
        finally:
            seconds = self._clock.monotonic() - began
            self._publish(self.operation.with_step(index, outcome, seconds))

    def copied(self, index: int, num_bytes: int) -> None:
        """So many bytes were copied by the step at `index`. It says so when it ends."""
        self.operation = self.operation.with_copied(index, num_bytes)

    def undone(self, index: int) -> None:
        """The step at `index` was taken back. One that has failed is still the one that failed."""
        step = self.operation.steps[index]
        if step.state is StepState.DONE:
            self._publish(self.operation.with_step(index, StepState.UNDONE, step.seconds))

    def undo_failed(self, error: ElasticError) -> None:
        """An undo failed in every attempt."""
        errors = (*self.operation.undo_errors, ErrorRecord.of(error))
        self._publish(replace(self.operation, undo_errors=errors))

    def held(self) -> None:
        """Requests are about to be held, or are held already."""
        if self._held_since is None:
            self._held_since = self._clock.monotonic()

    def released(self) -> None:
        """Requests are held no longer."""
        if self._held_since is not None:
            gap_s = self._clock.monotonic() - self._held_since
            self._held_since = None
            self._publish(replace(self.operation, gap_s=gap_s))

    def handed_over(self, handover: HandoverRecord) -> None:
        """The new instance has taken this over."""
        self._publish(replace(self.operation, handover=handover))

    def switched(self) -> None:
        """The point of no return is behind. In memory only: a sync would lengthen the gap."""
        self._publish(replace(self.operation, switched=True))

    def finish(self, state: OperationState, error: BaseException | None) -> None:
        """The last snapshot. Durable."""
        self._end_phase()
        record = None if error is None else ErrorRecord.of(error)
        ended = replace(self.operation, state=state, error=record, finished_s=self._clock.now())
        self._publish(ended, durable=True)

    def _end_phase(self) -> None:
        if self.operation.phases and self.operation.phases[-1].seconds < 0:
            seconds = self._clock.monotonic() - self._phase_began
            self.operation = self.operation.with_phase_ended(seconds)

    def _publish(self, operation: Operation, *, durable: bool = False) -> None:
        self.operation = operation
        (self._journal.record if durable else self._journal.update)(operation)
        self._announce(operation)
