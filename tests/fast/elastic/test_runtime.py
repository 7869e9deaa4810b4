"""The end of everything elastic, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from sgl_elastic.autoscale.metrics import SpareMetrics
from sgl_elastic.coordinator.coordinator import Coordinator
from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance.spares import SparePool
from sgl_elastic.runtime import Parts, Runtime
from sgl_elastic.types import OperationState
from tests.fast.elastic.scale_fakes import UP, WAIT_S, Paused


def runtime_of(coordinator: Coordinator, ends: list[str]) -> Runtime:
    runtime = Runtime.__new__(Runtime)  # without its workers and folders
    runtime._stopping, runtime._wanted = threading.Event(), threading.Event()
    runtime._ends = ExitStack()
    runtime.spares = SparePool(0, lambda _: {})
    runtime._parts = Parts(cast(Any, None), cast(Any, None), coordinator)
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


class Starting:
    """A manager whose standby ends while it starts, because of `why`."""

    def __init__(self, why: Callable[[], None]) -> None:
        self._why = why

    def keep_standbys(self, should_stop: Callable[[], bool]) -> None:
        self._why()
        raise EngineFailedError("instance i2 ended while it started")


@pytest.mark.parametrize("server_ends", [True, False])
def test_a_standby_that_ends_with_the_server_is_no_fault(
    server_ends: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_elastic.runtime._FIRST_PAUSE_S", 0.0)
    runtime = runtime_of(Paused().coordinator, [])
    times = iter([False, False, True])
    first = server_ends

    def why() -> None:
        if first or next(times):
            runtime._stopping.set()

    runtime._wanted.set()
    runtime._keep_ready(cast(Any, Starting(why)), SpareMetrics(CollectorRegistry()))
    assert caplog.text.count("a spare or a standby could not be started") == (
        0 if server_ends else 2
    )


def test_standbys_start_where_spares_cannot(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_elastic.runtime._FIRST_PAUSE_S", 0.0)
    runtime = runtime_of(Paused().coordinator, [])
    kept: list[str] = []

    def fill(should_stop: Callable[[], bool]) -> None:
        raise EngineFailedError("a hook is not in place")

    class Keeping:
        def keep_standbys(self, should_stop: Callable[[], bool]) -> None:
            assert not should_stop()
            kept.append("standbys")
            if len(kept) == 3:
                runtime._stopping.set()

    monkeypatch.setattr(runtime.spares, "fill", fill)
    runtime._wanted.set()
    runtime._keep_ready(cast(Any, Keeping()), SpareMetrics(CollectorRegistry()))
    assert len(kept) == 3, "a spare is tried again, and standbys are looked after each time"
    assert caplog.text.count("EngineFailedError: a hook is not in place") == 3


def test_nothing_is_started_during_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the processors; what is left is started after it."""
    monkeypatch.setattr("sgl_elastic.runtime._FIRST_PAUSE_S", 0.01)
    paused = Paused()
    runtime = runtime_of(paused.coordinator, [])
    asked: list[bool] = []

    class Keeping:
        def keep_standbys(self, should_stop: Callable[[], bool]) -> None:
            asked.append(should_stop())
            if asked[-1]:
                paused.go_on.set()
            else:
                runtime._stopping.set()

    paused.coordinator.submit(UP)
    assert paused.reached.wait(WAIT_S)
    runtime._wanted.set()
    runtime._keep_ready(cast(Any, Keeping()), SpareMetrics(CollectorRegistry()))
    assert asked[0]
    assert not asked[-1]
