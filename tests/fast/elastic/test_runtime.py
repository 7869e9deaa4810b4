"""The end of everything elastic, in order."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

import pytest

from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.runtime import Runtime
from sgl_elastic.types import OperationState, ScaleRequest
from tests.fast.elastic.scale_fakes import WAIT_S, Paused


def runtime_of(coordinator: Coordinator, ends: list[str]) -> Runtime:
    runtime = Runtime.__new__(Runtime)  # without its workers and folders
    runtime._stopping, runtime._wanted = threading.Event(), threading.Event()
    runtime._ends = ExitStack()
    for name in ("folder", "nodes", "memory", "instances"):  # as they are made
        runtime._ends.callback(ends.append, name)
    runtime._ends.callback(runtime._end_scaling, coordinator)
    return runtime


def test_a_scale_that_runs_ends_before_what_it_works_on() -> None:
    ends: list[str] = []
    paused = Paused()
    coordinator = paused.coordinator
    coordinator.listen(lambda operation, _: ends.append("scale") if operation.finished else None)
    runtime = runtime_of(coordinator, ends)
    operation = coordinator.submit(ScaleRequest(dp_size=3))
    assert paused.reached.wait(WAIT_S)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    closing.join(0.1)
    assert ends == []
    paused.go_on.set()
    closing.join(WAIT_S)
    assert ends == ["scale", "instances", "memory", "nodes", "folder"]
    ended = coordinator.wait(operation.operation_id, WAIT_S)
    assert ended.state is OperationState.SUCCEEDED
    runtime.close()
    assert len(ends) == 5


def test_a_scale_that_hangs_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sgl_elastic.runtime._CLOSE_S", 0.05)
    ends: list[str] = []
    paused = Paused()
    coordinator = paused.coordinator
    operation = coordinator.submit(ScaleRequest(dp_size=3))
    assert paused.reached.wait(WAIT_S)
    with caplog.at_level(logging.WARNING, "sgl_elastic"):
        runtime_of(coordinator, ends).close()
    assert ends == ["instances", "memory", "nodes", "folder"]
    assert "the server ends while a scale runs" in caplog.text
    paused.go_on.set()
    coordinator.wait(operation.operation_id, WAIT_S)
