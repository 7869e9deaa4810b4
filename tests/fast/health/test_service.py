"""The life of a service with real signals, a real event loop, and a pretended engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sgl_esft.errors import DrainingError, DrainTimeoutError, EngineLostError
from sgl_esft.health import ending, process
from sgl_esft.health import service as service_module
from sgl_esft.health.phases import EXIT_CUT, EXIT_FAILED, Phase
from sgl_esft.health.service import CrashDump
from tests.fast.health.fakes import Harness, send, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def h(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with serving(**getattr(request, "param", {})) as harness:
        yield harness


@pytest.fixture(autouse=True)
def _no_children_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (service_module, ending):
        monkeypatch.setattr(module, "kill_children", lambda: None)


async def test_it_is_ready_once_it_has_started(h: Harness) -> None:
    assert h.service.readiness().is_ready
    assert h.service.refusal() is None
    h.engine.is_bad = "moving house"
    assert h.service.readiness().reason == "moving house"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, 0])
async def test_signals_and_the_route_drain_alike(h: Harness, number: int) -> None:
    with h.service.in_flight() as over:
        if number:
            send(number)
        else:
            h.service.drain()
        await h.until(lambda: h.service.life.phase is Phase.DRAINING)
        assert h.service.readiness().reason == "the server is draining"
        assert isinstance(h.service.refusal(), DrainingError)
        await asyncio.sleep(0.2)
        assert h.service.life.phase is Phase.DRAINING  # it waits for what runs
        assert not over.done()
    await h.stopped()
    assert h.engine.events == ["begin", "end", "stop"]
    assert h.service.life.exit_status == 0
    assert h.statuses == []


@pytest.mark.parametrize("h", [{"drain_s": 0.2}], indirect=True)
async def test_what_takes_too_long_is_cut(h: Harness) -> None:
    async def request() -> None:
        with h.service.in_flight() as over:
            assert isinstance(await asyncio.shield(over), DrainTimeoutError)

    running = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    h.service.drain()
    await h.stopped()
    await running
    assert h.service.life.exit_status == EXIT_CUT


async def test_the_latest_timeout_counts(h: Harness) -> None:
    with h.service.in_flight():
        h.service.drain(600.0)
        assert h.service.drain_left_s() > 500
        h.service.drain(0.1)
        await h.until(lambda: h.service.life.phase is Phase.STOPPING)
    await h.stopped()


async def test_a_second_signal_forces(h: Harness) -> None:
    with h.service.in_flight():
        send(signal.SIGTERM)
        await h.until(lambda: h.service.life.phase is Phase.DRAINING)
        send(signal.SIGINT)
        await h.until(lambda: bool(h.statuses))
    assert h.statuses == [130]


@pytest.mark.parametrize("h", [{"has_started": False}], indirect=True)
async def test_a_signal_while_it_warms_up_forces(h: Harness) -> None:
    """A drain would refuse or cut the warm-up, at which SGLang kills the process."""
    with h.service.in_flight():
        send(signal.SIGTERM)
        await h.until(lambda: bool(h.statuses))
    assert h.statuses == [143]
    assert h.service.life.phase is Phase.STOPPING


async def test_a_fault_ends_requests_and_the_server(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FAIL_S", 60.0)

    async def request() -> Any:
        with h.service.in_flight() as over:
            return await asyncio.shield(over)

    running = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    await asyncio.to_thread(h.service.note_fault, "rank 1 has died")
    await h.stopped()
    assert isinstance(await running, EngineLostError)
    assert "rank 1 has died" in str(await running)
    assert h.service.readiness().reason == "rank 1 has died"
    assert isinstance(h.service.refusal(), EngineLostError)
    assert h.service.life.exit_status == EXIT_FAILED


async def test_a_fault_that_cannot_be_handled_ends_the_process(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the event loop hangs: the thread does it."""
    monkeypatch.setattr(service_module, "FAIL_S", 0.2)
    monkeypatch.setattr(Harness, "stopped", None)
    h.service._from_thread = lambda call: None  # type: ignore[method-assign]
    h.service.note_fault("rank 1 has died")
    await h.until(lambda: bool(h.statuses))
    assert h.statuses == [EXIT_FAILED]


async def test_a_loop_of_the_front_that_fails_is_a_fault(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a metric's label is refused: SGLang would dump and sleep, then kill the process."""
    monkeypatch.setattr(service_module, "FAIL_S", 60.0)
    monkeypatch.setattr(process, "_service", h.service)

    async def handle_loop(manager: Any) -> None:
        raise ValueError("Incorrect label names")

    await process.keep_loop(handle_loop, None)
    await h.stopped()
    assert h.service.readiness().reason == "the front has failed: ValueError: Incorrect label names"
    assert h.service.life.exit_status == EXIT_FAILED


@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_crash_dump_is_written_while_there_are_requests_to_write(
    h: Harness, monkeypatch: pytest.MonkeyPatch, succeeds: bool
) -> None:
    in_flight: list[int] = []

    def write() -> None:
        in_flight.append(h.service.num_in_flight)
        if not succeeds:
            raise OSError("no space")

    monkeypatch.setattr(h.service, "_crash_dump", CrashDump(write, takes_s=60.0))

    async def request() -> None:
        with h.service.in_flight() as over:
            await asyncio.shield(over)

    running = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    monkeypatch.setattr(service_module, "FAIL_S", 0.0)
    h.service.note_fault("rank 1 has died")
    await running
    await h.stopped()
    assert in_flight == [1]
    assert h.statuses == []  # it has its own time


async def test_sigquit_is_how_the_engine_says_that_it_failed(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FAIL_S", 60.0)
    send(signal.SIGQUIT)
    await h.stopped()
    assert h.service.life.exit_status == EXIT_FAILED


async def test_an_end_that_hangs_is_bounded(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STOP_S", 0.2)
    h.engine.end_s = 60.0
    h.service.drain()
    await h.until(lambda: bool(h.statuses))
    assert h.statuses == [0]


async def test_what_dies_while_the_server_ends_is_no_fault(h: Harness) -> None:
    h.engine.end_s = 0.2
    h.service.drain()
    await h.until(lambda: h.service.life.phase is Phase.STOPPING)
    h.service.note_fault("rank 0 has died")
    await h.stopped()
    assert h.service.life.exit_status == 0
    assert h.statuses == []
