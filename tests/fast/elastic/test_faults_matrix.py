"""Every fault at every memory step of a scale, over real workers: old or new, nothing left over."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.errors import MemoryLostError
from sgl_elastic.memory import connection, worker_processes
from sgl_elastic.types import OperationState, StepKind
from tests.fast.elastic import fault_cells as cells
from tests.fast.elastic.fault_cells import PLANS, Inject, MemoryScale
from tests.fast.elastic.memory.test_control import content
from tests.fast.elastic.memory_proxy import FAULTS
from tests.fast.elastic.memory_workers import PAGE, comes_to, digests, expected_digests

HANG_S = 0.5  # of what this process waits for; workers wait for each other as they always do
SOON_S = 5.0
# A worker answers only the last of its requests, and goes on by no other connection.
BETWEEN_WORKERS = [
    name for name in FAULTS if name not in ("late request", "doubled request, first answer lost")
]
_S = OperationState
Cell = tuple[Any, ...]
Fault = Callable[[MemoryScale, int], AbstractContextManager[Inject]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANG_S", HANG_S)
    monkeypatch.setattr(worker_processes, "HANG_S", HANG_S)


@pytest.fixture
def scale(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryScale]:
    """Serves what the test's `direction` starts from."""
    direction = request.node.callspec.params["direction"]
    with cells.serving(tmp_path, direction, copy_timeout_s=1.0) as found:
        yield found


def steps(*kinds: str) -> list[tuple[str, int]]:
    """(direction, position) of every step whose kind begins so."""
    return [
        (direction, at)
        for direction, plan in PLANS.items()
        for at, step in enumerate((*plan.before, *plan.after))
        if step.kind.value.startswith(kinds)
    ]


def processes_of(*kinds: str) -> list[tuple[str, int, str]]:
    """(direction, position, role) of every worker that takes part in such a step."""
    return [
        (direction, at, role)
        for direction, at in steps(*kinds)
        for role in ("target", "source")
        if (kind := kind_at(direction, at)) is not StepKind.ADD_DEVICE
        and (role == "target" or kind.value.startswith("copy"))
    ]


def sample(cells: list[Cell], every: int = 5) -> list[Cell | ParameterSet]:
    """All cells, of which only every fifth is run outside `make test-full`."""
    return [
        cell if i % every == 0 else pytest.param(*cell, marks=pytest.mark.full)
        for i, cell in enumerate(cells)
    ]


def kind_at(direction: str, at: int) -> StepKind:
    plan = PLANS[direction]
    return (*plan.before, *plan.after)[at].kind


def is_before_the_switch(scale: MemoryScale, at: int) -> bool:
    return at < len(scale.plan.before)


def clean(directory: Path, direction: str) -> dict[str, Any]:
    """What a scale without any fault leaves."""
    with cells.serving(directory, direction) as scale:
        assert scale.scale().state is _S.SUCCEEDED
        return scale.left()


def check(scale: MemoryScale, operation: Operation, before: dict[str, Any], folder: Path) -> None:
    """Old or new, to the page; and the scale can be done again, with the right bytes."""
    assert operation.undo_errors == () or operation.state is _S.ROLLED_BACK
    if operation.state is _S.ROLLED_BACK:
        scale.settle()
        assert comes_to(scale.left, before) == before
        assert scale.world.table[1].device_ids == scale.plan.old.device_ids
    again = scale.scale()  # after a success there is nothing to do, after a degraded one the rest
    assert again.state is _S.SUCCEEDED, again.error
    assert scale.world.table[1].device_ids == scale.plan.new.device_ids
    direction = next(name for name, plan in PLANS.items() if plan is scale.plan)
    assert pages(scale.left()) == pages(clean(folder / "clean", direction))
    for device_id in scale.plan.new.device_ids:
        wanted = content(scale.plan.new.experts_of(device_id))
        assert digests(scale.hmm, device_id, wanted) == expected_digests(wanted)


def pages(left: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in two servers: descriptors of a client that connected anew are not."""
    return {name: left[name] for name in ("pages", "processes", "sockets")}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize(("direction", "at", "role"), sample(processes_of("")))
def test_a_worker_that_is_stopped_or_killed(
    scale: MemoryScale, direction: str, at: int, role: str, number: int, tmp_path: Path
) -> None:
    """Noticed, and given up, long before a copy's time is over; a stopped one may go on later."""
    device_id, is_killed = concerned(scale, at, role), number == signal.SIGKILL
    before = scale.left()
    with cells.signalled(scale, device_id, number) as inject:
        began = time.monotonic()
        operation = scale.scale(at, inject)
        stopped_s = connection.HANG_S if role == "target" else 3.0
        assert time.monotonic() - began < SOON_S + (0 if is_killed else stopped_s)
    assert operation.state is expected(scale, at), operation
    if is_killed and device_id in scale.world.table[1].device_ids:  # it serves: this is for good
        with pytest.raises(MemoryLostError):
            scale.scale()
        return
    check(scale, operation, before, tmp_path)


def concerned(scale: MemoryScale, at: int, role: str) -> int:
    """The device in this role at this step."""
    step = scale.step(at)
    return step.device_id if role == "target" else step.source_id


def expected(scale: MemoryScale, at: int) -> OperationState:
    if is_before_the_switch(scale, at):
        return _S.ROLLED_BACK
    return _S.SUCCEEDED if scale.step(at).kind is StepKind.REMOVE_DEVICE else _S.DEGRADED


@pytest.mark.parametrize("direction", ["up"])
def test_a_worker_that_is_stopped_while_it_starts(
    scale: MemoryScale, direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, start = scale.left(), worker_processes.LocalProcess

    def start_stopped(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(worker_processes, "LocalProcess", start_stopped)
        began = time.monotonic()
        operation = scale.scale()
        assert time.monotonic() - began < HANG_S + SOON_S
    assert operation.state is _S.ROLLED_BACK
    check(scale, operation, before, tmp_path)


@pytest.mark.parametrize(("direction", "at"), sample(steps("map")))
def test_a_device_that_is_full(direction: str, at: int, tmp_path: Path) -> None:
    with cells.serving(tmp_path, direction, budget_bytes=64 * PAGE) as scale:
        before = scale.left()
        with cells.full(scale, scale.step(at)) as fill:
            operation = scale.scale(at, fill)
        assert operation.state is _S.ROLLED_BACK, operation
        assert "has no memory" in operation.error.message
        check(scale, operation, before, tmp_path)


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize(("direction", "at", "role"), sample(processes_of("copy")))
def test_a_handle_that_cannot_be_opened(
    scale: MemoryScale, direction: str, at: int, role: str, spare: int, tmp_path: Path
) -> None:
    """A worker is out of descriptors: for the connection, or for the pages that come by it."""
    device_id, before = concerned(scale, at, role), scale.left()
    with cells.without_descriptors(lambda: scale.hmm.client(device_id).info.pid, spare) as inject:
        operation = scale.scale(at, inject)
    assert operation.state is _S.ROLLED_BACK, operation
    check(scale, operation, before, tmp_path)


@pytest.mark.parametrize("spare", range(2))
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("direction", ["up"])
def test_no_descriptors_for_a_worker_that_joins(
    scale: MemoryScale,
    direction: str,
    is_started: bool,
    spare: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the front: for its start, or for one of the two connections once it runs."""
    before, start = scale.left(), worker_processes.LocalProcess
    with monkeypatch.context() as patch, cells.without_descriptors(os.getpid, spare) as inject:

        def start_then_inject(*args: Any, **options: Any) -> Any:
            process = start(*args, **options)
            inject()
            return process

        if is_started:
            patch.setattr(worker_processes, "LocalProcess", start_then_inject)
        operation = scale.scale(0, (lambda: None) if is_started else inject)
    assert operation.state is _S.ROLLED_BACK, operation
    assert operation.error.type == "MemoryWorkerError"
    assert "Too many open files" in operation.error.message
    check(scale, operation, before, tmp_path)


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize(("direction", "at"), sample(steps("map", "copy", "unmap")))
def test_a_message_that_is_lost_or_doubled(
    scale: MemoryScale, direction: str, at: int, how: str, tmp_path: Path
) -> None:
    before = scale.left()
    with cells.message(scale, scale.step(at), how) as inject:
        operation = scale.scale(at, inject)
    is_undone = is_before_the_switch(scale, at) and not FAULTS[how].is_harmless
    assert operation.state is (_S.ROLLED_BACK if is_undone else _S.SUCCEEDED), operation
    check(scale, operation, before, tmp_path)


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("how", BETWEEN_WORKERS)
@pytest.mark.parametrize(("direction", "at"), sample(steps("copy_experts")))
def test_a_message_between_workers_that_is_lost_or_doubled(
    direction: str, at: int, how: str, is_verified: bool, tmp_path: Path
) -> None:
    """What a worker asks for next is pages again, or, where copies are verified, a digest."""
    options = {"copy_timeout_s": 1.0, "verify_copies": is_verified}
    with cells.serving(tmp_path, direction, **options) as scale:
        before = scale.left()
        with cells.peer_message(scale, scale.step(at), how) as inject:
            operation = scale.scale(at, inject)
        wanted = _S.SUCCEEDED if FAULTS[how].is_harmless else _S.ROLLED_BACK
        assert operation.state is wanted, operation
        check(scale, operation, before, tmp_path)


@pytest.mark.parametrize("how", [how for how, fault in FAULTS.items() if fault.is_harmless])
@pytest.mark.parametrize("direction", ["down"])
def test_what_a_doubled_message_has_mapped_is_taken_back(
    scale: MemoryScale, direction: str, how: str, tmp_path: Path
) -> None:
    """On a device that stays: the copy after it fails, and the undo must know what was mapped."""
    map_step, copy_step = scale.step(0), scale.step(1)
    assert (map_step.kind, copy_step.kind) == (StepKind.MAP_EXPERTS, StepKind.COPY_EXPERTS)
    before = scale.left()
    with (
        cells.message(scale, map_step, how) as disturb,
        cells.peer_message(scale, copy_step, "cut answer") as fail,
    ):
        operation = scale.scale(0, lambda: both(disturb, fail))
    assert operation.state is _S.ROLLED_BACK, operation
    check(scale, operation, before, tmp_path)


def both(*injects: Inject) -> None:
    for inject in injects:
        inject()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_faults_one_after_the_other(seed: int, tmp_path: Path) -> None:
    """On the same workers, so that a small leak adds up."""
    rng = random.Random(seed)
    with cells.serving(tmp_path, "up", copy_timeout_s=1.0) as scale:
        before = scale.left()
        for _ in range(15):
            at = rng.randrange(1, len(scale.plan.before))
            operation = scale.scale(at, lambda: None)
            assert operation.state is _S.SUCCEEDED
            scale.plan = PLANS["down"]
            faulty(rng, scale)
            assert scale.scale().state is _S.SUCCEEDED
            scale.plan = PLANS["up"]
            faulty(rng, scale)
        scale.plan = PLANS["down"]
        assert scale.scale().state is _S.SUCCEEDED  # nothing to do, if the last fault did harm
        assert pages(scale.left()) == pages(before)
        most = sum(before["fds"].values()) + 1
        assert comes_to(lambda: sum(scale.left()["fds"].values()) <= most, True)


def faulty(rng: random.Random, scale: MemoryScale) -> None:
    """One scale with one fault before its switch: it is rolled back, unless it does no harm."""
    at = rng.randrange(1 if scale.plan is PLANS["up"] else 0, len(scale.plan.before))
    step = scale.step(at)
    how = rng.choice(["stop", *FAULTS])
    fault = (
        cells.signalled(scale, step.device_id, signal.SIGSTOP)
        if how == "stop"
        else cells.message(scale, step, how)
    )
    with fault as inject:
        operation = scale.scale(at, inject)
    is_harmless = how != "stop" and FAULTS[how].is_harmless
    assert operation.state is (_S.SUCCEEDED if is_harmless else _S.ROLLED_BACK), (
        at,
        how,
        operation,
    )
