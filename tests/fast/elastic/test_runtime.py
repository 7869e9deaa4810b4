"""The end of everything elastic, in order."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.runtime import Runtime
from sgl_elastic.types import OperationState
from tests.fast.elastic.scale_fakes import UP, WAIT_S, Paused


def runtime_of(coordinator: Coordinator, ends: list[str]) -> Runtime:
    runtime = Runtime.__new__(Runtime)  # without its workers and folders
    runtime._stopping, runtime._wanted = threading.Event(), threading.Event()
    runtime._ends = ExitStack()
    for name in ("folder", "nodes", "memory", "instances"):  # as they are made
        runtime._ends.callback(ends.append, name)
    runtime._ends.callback(runtime._end_scaling, coordinator)
    return runtime


@pytest.mark.parametrize("hangs", [False, True])
def test_a_scale_that_runs_ends_before_what_it_works_on(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that hangs does not hold the end up."""
    monkeypatch.setattr("sgl_elastic.runtime._CLOSE_S", 0.05 if hangs else WAIT_S)
    ends: list[str] = []
    paused = Paused()
    coordinator = paused.coordinator
    coordinator.listen(lambda operation, _: ends.append("scale") if operation.finished else None)
    runtime = runtime_of(coordinator, ends)
    operation = coordinator.submit(UP)
    assert paused.reached.wait(WAIT_S)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(WAIT_S if hangs else 0.1)
    rest = ["instances", "memory", "nodes", "folder"]
    assert ends == (rest if hangs else [])
    paused.go_on.set()
    closing.join(WAIT_S)
    assert hangs or ends == ["scale", *rest]
    assert ("the server ends while a scale runs" in caplog.text) is hangs
    ended = coordinator.wait(operation.operation_id, WAIT_S)
    assert ended.state is OperationState.SUCCEEDED
    runtime.close()
    assert ends.count("folder") == 1
