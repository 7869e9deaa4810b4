"""How instances come to be: started, warmed up on scratch memory, parked until they are needed.

    likely sizes --[keep_standbys]--> start, Park, warm-up, pause --> Standbys (standbys.py)
    manager.py --[_take_standby]--> a parked instance, or None: one must be started

A parked instance has been warmed up: to attach it is to map pages, nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from sgl_elastic.errors import EngineFailedError, StepFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance import supervise
from sgl_elastic.instance.links import expect_all, send_all
from sgl_elastic.instance.running import Running
from sgl_elastic.instance.standbys import likely_next, without_one
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.instance.table import InstanceTable
from sgl_elastic.processes import giving_way
from sgl_elastic.types import MemoryShape

logger = logging.getLogger(__name__)

_S = InstanceState
_POLL_S = 0.02
_NO_HURRY_S = 45.0  # a standby's start takes that long on two cores at most


class InstanceStarter(InstanceTable):
    """An InstanceTable whose instances this process starts, and parks as standbys."""

    def keep_standbys(self, should_stop: Callable[[], bool]) -> None:
        """Start the standbys that the present configuration is likely to need, one at a time.

        `should_stop` is asked before each.
        """
        with self._lock:
            serving = self._running.get(self._active)
        if serving is None:
            return
        now = serving.record.device_ids
        # Last a spare of the present one, and one for each device of it, should that be lost.
        for device_ids in (*likely_next(now, self._max_devices), now, *without_one(now)):
            if should_stop():
                return
            with self._lock:
                fits = self._standbys.num_ranks + len(device_ids) <= self._standbys.capacity_ranks
                known = self._standbys.find(device_ids) is not None
            if fits and not known:
                name = self._start_parked(device_ids, in_no_hurry=True)
                self._put_away(self._running[name])

    def _start_parked(self, device_ids: tuple[int, ...], *, in_no_hurry: bool = False) -> str:
        """A new instance on scratch memory, warmed up and parked."""
        name = self._spawn(device_ids, ())
        running = self._running[name]
        process = running.process
        try:
            with giving_way(process, "when_idle", _NO_HURRY_S) if in_no_hurry else nullcontext():
                self._warm_up(running)
        except StepFailedError:
            self.stop(name)
            raise
        self._advance(running, _S.PARKED)
        return name

    def _warm_up(self, running: Running) -> None:
        """From a process that starts to one that waits with everything ahead of it done."""
        shape = self._declared(running)
        self._hmm.define(shape)  # refuses another shape
        send_all(running.links, [m.Park()] * len(running.links))
        expect_all(running.links, m.Started, self._timeouts.start_s)
        name, num_ranks = running.record.instance_id, running.record.num_ranks
        self._engine_link.warm_up(name, num_ranks, self._timeouts.start_s)
        self._pause(running)

    def _put_away(self, running: Running) -> None:
        """Into the table of standbys; what has no room there ends."""
        record = running.record
        with self._lock:
            self._standbys, surplus = self._standbys.park(record.device_ids, record.instance_id)
        for name in surplus:
            self.stop(name)

    def _take_standby(self, device_ids: tuple[int, ...]) -> str | None:
        """A parked instance; one that is just being started is waited for. None: there is none."""
        hurried: set[str] = set()
        while True:
            with self._lock:
                self._standbys, name = self._standbys.take(device_ids)
                coming = {
                    coming_name: each.process
                    for coming_name, each in self._running.items()
                    if each.record.device_ids == device_ids
                    and each.record.state in (_S.STARTING, _S.PARKED)
                    and not each.lost
                }
            if name is not None or not coming:
                return name
            for hurrying in coming.keys() - hurried:
                coming[hurrying].give_way("foreground")
            hurried |= coming.keys()
            time.sleep(_POLL_S)

    def _spawn(self, device_ids: tuple[int, ...], more_argv: tuple[str, ...]) -> str:
        name = f"i{next(self._names)}"
        settings = self._settings
        self._engine_link.connect(name, settings.input_ipc(name), partial(self.wake, name))
        process = supervise.start_instance(settings, name, device_ids, more_argv)
        record = Instance(name, device_ids, pid=process.pid, since_s=self._clock())
        with self._lock:
            self._running[name] = Running(record, process)
        logger.info("elastic: instance %s starts on devices %s", name, device_ids)
        return name

    def _declared(self, running: Running) -> MemoryShape:
        """The shape that all ranks declare. Raises EngineFailedError when they disagree."""
        record = running.record
        deadline = time.monotonic() + self._timeouts.start_s
        running.links = self._server.wait_for(
            record.instance_id,
            record.num_ranks,
            deadline,
            lambda: running.process.poll() is None,
        )
        shapes = {link.expect(m.Declared, deadline).shape for link in running.links}
        if len(shapes) != 1:
            raise EngineFailedError(f"the ranks of {record.instance_id} declare different shapes")
        return shapes.pop()

    def _pause(self, running: Running) -> tuple[m.Frozen, ...]:
        """All ranks stop at the same step, and publish what they have."""
        for link in running.links:
            link.forget_answers()
        self._engine_link.pause(running.record.instance_id)
        return tuple(expect_all(running.links, m.Frozen, self._timeouts.freeze_s))

    def _run(self, running: Running) -> None:
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.RankDone, self._timeouts.step_s)
