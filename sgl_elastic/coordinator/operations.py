"""What is known of every scale operation, and a journal that survives the coordinator.

    scale() --> [Operation snapshot] --> Journal (memory, file) --> GET /v1/scale/{id}, metrics

An Operation is never changed, only replaced by a later snapshot of the same id. The journal's file
is an SQLite database, written at each edge between phases: what a coordinator was doing when it was
cut off is known to the phase.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from sgl_elastic.errors import (
    ElasticConfigError,
    KeyReusedError,
    StepFailedError,
    UnknownOperationError,
)
from sgl_elastic.types import OperationState, ScaleRequest, Step, StepKind

logger = logging.getLogger(__name__)

MAX_OPERATIONS: Final = 1000
# Numbered in the order in which they came; the newest snapshot of each, as JSON.
_TABLE: Final = """CREATE TABLE IF NOT EXISTS operations
    (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, snapshot BLOB NOT NULL)"""
_RECORD: Final = """INSERT INTO operations (id, snapshot) VALUES (?, ?)
    ON CONFLICT (id) DO UPDATE SET snapshot = excluded.snapshot"""
_TRIM: Final = "DELETE FROM operations WHERE number <= (SELECT max(number) FROM operations) - ?"


class StepState(StrEnum):
    """How far a step is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNDONE = "undone"


@dataclass(frozen=True)
class StepRecord:
    """One step of a plan and what became of it. `seconds` is the time of its last attempt.

    `num_bytes` is the plan's; `copied_bytes` what the memory worker counted as it copied.
    """

    kind: StepKind
    device_id: int
    source_id: int = -1  # of a copy
    num_experts: int = 0
    num_tokens: int = 0  # of a KV step: the capacity afterwards
    num_bytes: int = 0  # of a copy
    copied_bytes: int = 0
    state: StepState = StepState.PENDING
    seconds: float = 0.0

    @classmethod
    def of(cls, step: Step) -> StepRecord:
        """The record of a step that has not begun."""
        return cls(
            kind=step.kind,
            device_id=step.device_id,
            source_id=step.source_id,
            num_experts=len(step.expert_ids),
            num_tokens=step.num_tokens,
            num_bytes=step.num_bytes,
        )


@dataclass(frozen=True)
class PhaseRecord:
    """One phase. `seconds` is -1 while it runs; it began at Unix time `began_s`."""

    name: str
    seconds: float = -1.0
    began_s: float = 0.0


@dataclass(frozen=True)
class HandoverRecord:
    """What went from the old instance's ranks to the new one's, as both counted.

    Of `frozen_kv_slots`, in use when the old ranks stopped, the new ones took `kept_kv_slots` over
    where they lay and copied `copied_kv_slots` from devices that leave.
    """

    num_requests: int = 0
    frozen_kv_slots: int = 0
    kept_kv_slots: int = 0
    copied_kv_slots: int = 0


@dataclass(frozen=True)
class ErrorRecord:
    """An error as REST shows it."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """The record of an exception."""
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Operation:
    """A snapshot of one scale operation.

    `plan` is the dry run's answer. Times are Unix seconds, `finished_s` 0 until it has finished.
    `gap_s` is how long new requests were held. `switched` turns true at the point of no return: the
    new instance has the running requests. `undo_errors` are undos that failed in every attempt.
    """

    operation_id: str
    request: ScaleRequest
    state: OperationState = OperationState.PENDING
    plan: dict[str, Any] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    gap_s: float = 0.0
    handover: HandoverRecord = HandoverRecord()
    switched: bool = False
    error: ErrorRecord | None = None
    undo_errors: tuple[ErrorRecord, ...] = ()
    created_s: float = 0.0
    finished_s: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the scale's thread has ended."""
        return self.state not in (OperationState.PENDING, OperationState.RUNNING)

    @property
    def phase(self) -> str:
        """The present or last phase, `pending` before the first."""
        return self.phases[-1].name if self.phases else "pending"

    def with_step(self, index: int, state: StepState, seconds: float = 0.0) -> Operation:
        """The snapshot in which the step at `index` is in another state."""
        record = replace(self.steps[index], state=state, seconds=seconds)
        return replace(self, steps=(*self.steps[:index], record, *self.steps[index + 1 :]))

    def with_copied(self, index: int, num_bytes: int) -> Operation:
        """The snapshot in which the step at `index` has copied so many bytes more."""
        step = self.steps[index]
        record = replace(step, copied_bytes=step.copied_bytes + num_bytes)
        return replace(self, steps=(*self.steps[:index], record, *self.steps[index + 1 :]))

    def with_phase(self, name: str, began_s: float = 0.0) -> Operation:
        """The snapshot in which a phase begins."""
        return replace(self, phases=(*self.phases, PhaseRecord(name, began_s=began_s)))

    def with_phase_ended(self, seconds: float) -> Operation:
        """The snapshot in which the last phase took `seconds`."""
        ended = replace(self.phases[-1], seconds=seconds)
        return replace(self, phases=(*self.phases[:-1], ended))

    def to_json(self) -> dict[str, Any]:
        """JSON's own types, for REST."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        return {"id": self.operation_id, "phase": self.phase, **shown}


class Journal:
    """The last operations, in memory and, given a path, in a file. Safe to use from any thread.

    A file that cannot be written at the start is an ElasticConfigError. Later that is logged and
    does not stop a scale: a disk that is full must not take the serving instance with it.
    """

    def __init__(self, path: Path | None = None, max_operations: int = MAX_OPERATIONS) -> None:
        self._path = path
        self._max_operations = max_operations
        self._changed = threading.Condition()
        self._operations: OrderedDict[str, Operation] = OrderedDict()  # the oldest first
        if path is not None:
            self._open(path)

    def update(self, operation: Operation) -> None:
        """The operation's newest snapshot, in memory only."""
        with self._changed:
            self._keep(operation)
            self._changed.notify_all()

    def record(self, operation: Operation) -> None:
        """The operation's newest snapshot, on disk before anyone can read it."""
        if self._path is not None:
            self._write(self._path, operation)
        self.update(operation)

    def get(self, operation_id: str) -> Operation:
        """The newest snapshot. Raises UnknownOperationError."""
        with self._changed:
            found = self._operations.get(operation_id)
        if found is None:
            raise UnknownOperationError(
                f"no scale operation has the id {operation_id[:100]!r}: the last "
                f"{self._max_operations} are kept, GET /v1/scale lists them"
            )
        return found

    def last(self, count: int) -> tuple[Operation, ...]:
        """The newest snapshots of the last `count` operations, the newest operation first."""
        with self._changed:
            return tuple(reversed(self._operations.values()))[:count]

    def wait(self, operation_id: str, timeout_s: float) -> Operation:
        """The snapshot when the operation has finished, or at the time-out as it is then.

        Raises UnknownOperationError.
        """

        def ended() -> bool:
            found = self._operations.get(operation_id)
            return found is None or found.finished

        with self._changed:
            self._changed.wait_for(ended, timeout_s)
        return self.get(operation_id)

    def find_key(self, request: ScaleRequest) -> Operation | None:
        """The operation that came with the request's key; None without a key or an operation.

        Raises KeyReusedError when that operation was another request's.
        """
        if not request.key:
            return None
        same = [each for each in self.last(self._max_operations) if each.request.key == request.key]
        if not same:
            return None
        if same[0].request != request:
            raise KeyReusedError(
                f"key {request.key!r} came with another request before (operation "
                f"{same[0].operation_id}): send a new key, or the same request"
            )
        return same[0]

    def recover(self, now_s: float) -> Operation | None:
        """The operation that was cut off when its coordinator ended, closed now; None if none was.

        Not switched: ROLLED_BACK, because its half-prepared instance ended with the coordinator.
        Else DEGRADED. Both name the phase in which it was cut off.
        """
        cut_off = next((each for each in self.last(1) if not each.finished), None)
        if cut_off is None:
            return None
        state = OperationState.DEGRADED if cut_off.switched else OperationState.ROLLED_BACK
        error = StepFailedError(
            f"the coordinator ended in phase {cut_off.phase} of operation {cut_off.operation_id}: "
            "compare GET /v1/instances with what was wanted, and ask again"
        )
        closed = replace(cut_off, state=state, error=ErrorRecord.of(error), finished_s=now_s)
        self.record(closed)
        return closed

    def _open(self, path: Path) -> None:
        check_file(path)
        try:
            with _transaction(path) as file:
                rows = file.execute(
                    "SELECT id, snapshot FROM operations ORDER BY number"
                ).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise ElasticConfigError(
                f"the scale journal {path} cannot be read and written ({error}): name a file in a "
                "folder of the server's own, and move away one that is damaged, or of a version "
                "that wrote lines of JSON"
            ) from error
        for operation_id, snapshot in rows:
            try:
                self._keep(msgspec.json.decode(snapshot, type=Operation))
            except msgspec.MsgspecError as error:  # another version's
                logger.warning("Scale journal %s: %s passed over: %s", path, operation_id, error)

    def _keep(self, operation: Operation) -> None:
        self._operations[operation.operation_id] = operation
        while len(self._operations) > self._max_operations:
            self._operations.popitem(last=False)

    def _write(self, path: Path, operation: Operation) -> None:
        try:
            with _transaction(path) as file:
                file.execute(_RECORD, (operation.operation_id, msgspec.json.encode(operation)))
                file.execute(_TRIM, (self._max_operations,))
        except (sqlite3.Error, OSError) as error:
            logger.error(
                "Scale journal %s could not be written, operation %s is known in memory only: %s",
                path,
                operation.operation_id,
                error,
            )


def check_file(path: Path) -> None:
    """A journal is a regular file, there or not yet. Raises ElasticConfigError."""
    if path.exists() and not path.is_file():
        raise ElasticConfigError(
            f"the scale journal {path} is a folder, a device or a pipe: name a regular file, in a "
            "folder of the server's own"
        )
    if not path.absolute().parent.is_dir():
        raise ElasticConfigError(
            f"the scale journal {path} would be in {path.absolute().parent}, which is no folder: "
            "make it, or name a file in another one"
        )


@contextlib.contextmanager
def _transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """A journal's file; what is done with it is on disk afterwards, all of it or nothing."""
    path.touch(0o600)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file, file:
        file.execute("PRAGMA synchronous = EXTRA")
        file.execute("BEGIN IMMEDIATE")
        file.execute(_TABLE)
        yield file
