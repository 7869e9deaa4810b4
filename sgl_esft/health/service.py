"""The life of the process that serves HTTP: ready, draining, stopping, failed.

    signals, POST /v1/drain, watch.py, admission.py --events--> phases.advance --> [Service] acts

Everything here runs in the event loop, but for what is said to be called from threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from sgl_esft.errors import (
    DrainingError,
    DrainTimeoutError,
    EngineLostError,
    EsftError,
    StartingError,
)
from sgl_esft.health import ending, phases, readiness
from sgl_esft.health.engine import Engine
from sgl_esft.health.heartbeat import DETOKENIZER, HeartbeatTable
from sgl_esft.health.phases import Act, Event, Life, Phase
from sgl_esft.health.processes import kill_children
from sgl_esft.health.readiness import Loop, Readiness
from sgl_esft.health.watch import Watch

logger = logging.getLogger(__name__)

FAIL_S = 5.0  # for the event loop, to end what is in flight when the engine has failed
STOP_S = 15.0  # for an orderly end once nothing is in flight
_CUT_S = 1.0  # for requests that are cut, to say so
_POLL_S = 0.05


@dataclass(frozen=True)
class Times:
    """Of flags, in seconds."""

    ready_s: float
    drain_s: float
    hang_s: float


@dataclass(frozen=True)
class CrashDump:
    """What SGLang is asked to write down when the engine has failed, before requests are ended.

    `takes_s` is for what its operator asked for beyond that of requests.
    """

    write: Callable[[], None] = lambda: None
    takes_s: float = 0.0


class InFlight:
    """The requests that are being answered, and how they are ended before they are."""

    def __init__(self) -> None:
        self.number = 0
        self._over: asyncio.Future[EsftError] = asyncio.get_running_loop().create_future()

    @contextmanager
    def one_more(self) -> Iterator[asyncio.Future[EsftError]]:
        """Yields a future that has the error by which the request is to end."""
        self.number += 1
        try:
            yield self._over
        finally:
            self.number -= 1

    async def end(self, error: EsftError) -> None:
        """Returns when all have said so, or after _CUT_S."""
        if not self._over.done():
            self._over.set_result(error)
        deadline = time.monotonic() + _CUT_S
        while self.number and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)


class Service:
    """`stop_server` makes the HTTP server end; `exit_` ends the process at once."""

    def __init__(
        self,
        times: Times,
        heartbeats: HeartbeatTable,
        engine: Engine,
        stop_server: Callable[[], None],
        *,
        crash_dump: CrashDump | None = None,
        exit_: Callable[[int], None] = os._exit,
    ) -> None:
        self.life = Life()
        self._times = times
        self._heartbeats = heartbeats
        self._engine = engine
        self._stop_server = stop_server
        self._crash_dump = crash_dump or CrashDump()
        self._exit = exit_
        self._fault = ""
        self._closed = threading.Event()
        self._deadline_ns = 0  # of the drain
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = Watch(
            engine, lambda: detokenizer_loop(heartbeats), self.note_fault, times.hang_s
        )

    # ---- what admission.py asks ----

    def begin(self) -> None:
        """In the event loop, before the server listens: hear signals, watch processes."""
        self._loop = asyncio.get_running_loop()
        self._in_flight = InFlight()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.on_signal, number)
        self._loop.add_signal_handler(signal.SIGQUIT, self.on_quit)
        self._engine.begin()
        self._watch.start()

    def close(self) -> None:
        """No more threads that look after anything."""
        self._watch.stop()
        self._closed.set()

    def refusal(self) -> EsftError | None:
        """503 once the server ends, with how long that may take."""
        if self.life.phase in (Phase.STARTING, Phase.SERVING):
            return None
        if self.life.phase is Phase.FAILED:
            return EngineLostError(f"the server ends: {self._fault}")
        left_s = max((self._deadline_ns - time.monotonic_ns()) / 1e9, 1.0)
        return DrainingError("the server is draining: ask another one, or again later", left_s)

    def in_flight(self) -> AbstractContextManager[asyncio.Future[EsftError]]:
        """One more request that is to be answered before the end."""
        return self._in_flight.one_more()

    # ---- what routes and others ask ----

    def readiness(self) -> Readiness:
        """The answer of GET /readyz. From any thread."""
        trouble = self._fault or self._engine.trouble()
        return readiness.judge(
            self.life.phase,
            trouble,
            self._engine.ranks(),
            detokenizer_loop(self._heartbeats),
            time.monotonic_ns(),
            self._times.ready_s,
        )

    @property
    def num_in_flight(self) -> int:
        """Requests that are being answered."""
        return self._in_flight.number

    def drain_left_s(self) -> float:
        """Seconds until what is in flight is cut; 0 when the server does not drain."""
        if self.life.phase is not Phase.DRAINING:
            return 0.0
        return max((self._deadline_ns - time.monotonic_ns()) / 1e9, 0.0)

    # ---- events ----

    def started(self) -> None:
        """Requests can be served. From any thread."""
        self._from_thread(lambda: self._take(Event.STARTED))

    def drain(self, timeout_s: float | None = None) -> None:
        """POST /v1/drain; of several times the last one counts. Raises StartingError."""
        if self.life.phase is Phase.STARTING:
            raise StartingError("the server starts, and can drain when GET /readyz answers 200")
        self._take(Event.DRAIN, timeout_s)

    def on_signal(self, number: int) -> None:
        """SIGINT or SIGTERM; the second one forces, while the server starts the first one."""
        logger.warning("health: %s, stopping...", signal.Signals(number).name)
        self._take(Event.SIGNAL, signum=number)

    def on_quit(self) -> None:
        """SIGQUIT: by it SGLang's processes, and the elastic runtime, say that one has failed."""
        self.note_fault("a process of the engine has failed; its reason is in the log above")

    def note_fault(self, fault: str) -> None:
        """A process has died or hangs. From any thread; this one ends within FAIL_S and the dump.

        Not when it ends anyway: then others end too.
        """
        if self._fault or self.life.phase in (Phase.STOPPING, Phase.FAILED):
            return
        self._fault = fault
        within_s = FAIL_S + self._crash_dump.takes_s
        ending.leave_within(within_s, phases.EXIT_FAILED, self._closed, self._exit)
        self._from_thread(lambda: self._take(Event.FAULT))

    def _take(self, event: Event, timeout_s: float | None = None, signum: int = 0) -> None:
        was = self.life.phase
        self.life, act = phases.advance(self.life, event)
        if self.life.phase is not was:
            logger.info(
                "health: %s, after %s; %d requests in flight",
                self.life.phase,
                event,
                self.num_in_flight,
            )
        match act:
            case Act.DRAIN:
                self._begin_drain(self._times.drain_s if timeout_s is None else timeout_s)
            case Act.STOP:
                self._run(self._stop())
            case Act.CUT:
                self._run(self._stop(cuts=True))
            case Act.FAIL:
                self._run(self._fail())
            case Act.FORCE:
                logger.warning("health: ended at once; %d requests are lost", self.num_in_flight)
                kill_children()
                self._exit(128 + signum)
            case Act.NOTHING:
                pass

    # ---- acts ----

    def _begin_drain(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        is_first = self._deadline_ns == 0
        self._deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        if is_first:
            self._run(self._wait_until_idle())

    async def _wait_until_idle(self) -> None:
        while self.life.phase is Phase.DRAINING:
            if self.num_in_flight == 0:
                self._take(Event.IDLE)
            elif time.monotonic_ns() >= self._deadline_ns:
                self._take(Event.TIMED_OUT)
            else:
                await asyncio.sleep(_POLL_S)

    async def _fail(self) -> None:
        try:
            self._crash_dump.write()  # here: SGLang's own loop must not change what is written
        except Exception:  # the server ends all the same
            logger.exception("health: the crash dump failed")
        await self._in_flight.end(EngineLostError(f"the request is lost: {self._fault}"))
        kill_children()
        self._stop_server()

    async def _stop(self, *, cuts: bool = False) -> None:
        if cuts:
            await self._in_flight.end(
                DrainTimeoutError(
                    f"the server ends and waited {self._timeout_s:g} s for this request: send it "
                    "to another server, or again later"
                )
            )
        self._watch.stop()
        ending.leave_within(STOP_S, self.life.exit_status, self._closed, self._exit)
        try:
            await self._engine.end()
        except Exception:  # the server ends all the same
            logger.exception("health: the engine did not end in an orderly way")
        self._stop_server()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _from_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            logger.warning("health: the event loop has ended already")


def detokenizer_loop(heartbeats: HeartbeatTable) -> Loop:
    """The detokenizer's loop, from any thread."""
    return Loop("the detokenizer", heartbeats.read(DETOKENIZER))
