"""A thread that looks after the processes of the server.

    /proc, heartbeats --every 0.25 s--> [Watch] --first fault--> service (in the event loop)
                                      '--> no end within 5 s: kill everything, exit

It does not need the event loop, which may hang too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sgl_esft.health import faults
from sgl_esft.health.engine import Engine
from sgl_esft.health.faults import Part, ProcessState
from sgl_esft.health.processes import state_of
from sgl_esft.health.readiness import Loop

logger = logging.getLogger(__name__)

PERIOD_S = 0.25


class Watch:
    """Calls `on_fault` once, with what is wrong."""

    def __init__(
        self,
        engine: Engine,
        detokenizer: Callable[[], Loop],
        on_fault: Callable[[str], None],
        hang_s: float,
        *,
        state_of: Callable[[int], ProcessState] = state_of,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._detokenizer = detokenizer
        self._on_fault = on_fault
        self._hang_s = hang_s
        self._state_of = state_of
        self._clock_ns = clock_ns
        self._stopped_since_ns: dict[int, int] = {}
        self._looked_ns = self._since_ns = clock_ns()
        self._ended = threading.Event()
        self._is_blind = False  # the last round has failed

    def start(self) -> None:
        """From now on, until `stop` or the first fault."""
        threading.Thread(target=self._run, name="health-watch", daemon=True).start()

    def stop(self) -> None:
        """Processes end now because they are told to."""
        self._ended.set()

    def look(self) -> str | None:
        """One round. Returns what is wrong, None if nothing is."""
        now_ns = self._clock_ns()
        if now_ns - self._looked_ns > 8e9 * PERIOD_S:
            # This process was stopped or starved itself, and perhaps the others with it: they get
            # all of their time again.
            self._stopped_since_ns.clear()
            self._since_ns = now_ns
        self._looked_ns = now_ns
        return faults.first_fault(self._parts(now_ns), self._hang_s)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            fault = self._look_or_log()
            if fault is not None and not self._ended.is_set():
                self._ended.set()
                logger.error("health: %s", fault)
                self._on_fault(fault)

    def _look_or_log(self) -> str | None:
        """A round that fails is a defect here, and no reason to look no more."""
        try:
            fault = self.look()
        except Exception:  # nobody is above a thread's main loop
            if not self._is_blind:  # once, and not four times a second
                logger.exception("health: a round of the watch failed; it goes on")
            self._is_blind = True
            return None
        self._is_blind = False
        return fault

    def _parts(self, now_ns: int) -> Sequence[Part]:
        loops = [self._detokenizer()]
        if not self._engine.replaces_ranks:
            loops += self._engine.ranks()
        parts = [
            self._part(loop.name, loop.beat.pid, now_ns, loop.silent_s(now_ns))
            for loop in loops
            if loop.beat is not None
        ]
        known = {part.pid for part in parts}
        others = [child for child in self._engine.children() if child[1] not in known]
        return parts + [self._part(name, pid, now_ns) for name, pid in others]

    def _part(self, name: str, pid: int, now_ns: int, silent_s: float | None = None) -> Part:
        state = self._state_of(pid)
        if silent_s is not None:
            silent_s = min(silent_s, (now_ns - self._since_ns) / 1e9)
        if state is not ProcessState.STOPPED:
            self._stopped_since_ns.pop(pid, None)
            return Part(name, pid, state, silent_s=silent_s)
        since_ns = self._stopped_since_ns.setdefault(pid, now_ns)
        return Part(name, pid, state, (now_ns - since_ns) / 1e9, silent_s)
