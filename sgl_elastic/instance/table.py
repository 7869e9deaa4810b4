"""All instances of one server: who is there, who is lost, how each of them ends.

    starting.py, manager.py (what instances do) --are--> [InstanceTable] <--check-- recovery.py
                                                  |--> supervise.py, links.py, EngineLink
A lost instance's processes are ended at once. Of the one that serves, everything else stays until
a replacement has its memory and its requests.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from sgl_elastic.errors import EngineFailedError
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance import supervise
from sgl_elastic.instance.handover import AttachMessages, attach_messages
from sgl_elastic.instance.links import RankLink, RankServer, send_all
from sgl_elastic.instance.running import EngineLink, Running, Timeouts
from sgl_elastic.instance.standbys import Standbys
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.memory.control import Hmm
from sgl_elastic.plan.redundancy import Heat, RecentHeat
from sgl_elastic.types import AdapterEntry, Placement

logger = logging.getLogger(__name__)

_S = InstanceState


class InstanceTable:
    """Safe to use from any thread.

    `attach_messages` says what each rank of a placement maps, and what it reads from disk.
    """

    def __init__(
        self,
        settings: EngineSettings,
        hmm: Hmm,
        engine_link: EngineLink,
        *,
        standby_ranks: int,
        max_devices: int,
        timeouts: Timeouts | None = None,
        attach_messages: AttachMessages = attach_messages,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._hmm = hmm
        self._engine_link = engine_link
        self._clock = clock
        self._running: dict[str, Running] = {}
        self._standbys = Standbys(standby_ranks)
        self._active = ""
        self._max_devices = max_devices
        self._timeouts = timeouts or Timeouts()
        self._attach_messages = attach_messages
        self._names = itertools.count(1)
        self._lock = threading.RLock()
        self._heat = RecentHeat()
        self._server = RankServer(
            settings.directory / "ranks.sock", self._note_adapters, self._note_heat
        )

    def wake(self, instance: str) -> None:
        """A request is on its way to an idle instance: none of its ranks may sleep through it."""
        running = self._running.get(instance)
        if running is None:
            return
        try:
            send_all(running.links, [m.Wake()] * len(running.links))
        except EngineFailedError as error:
            logger.warning("elastic: %s was not woken: %s", instance, error)

    def drain_messages(self, timeout_s: float) -> None:
        """What the serving instance's ranks have said is known, unless they hang.

        Of one that is lost, what they said before they ended.
        """
        running = self._running.get(self._active)
        if running is None:
            return
        deadline = time.monotonic() + timeout_s
        if not running.lost:
            self.wake(self._active)
        for link in running.links:
            heard = link.read_to_the_end if running.lost else link.drain_messages
            if not heard(deadline):
                logger.warning("elastic: %s did not say all in time: the scale goes on", link.name)

    def instances(self) -> tuple[Instance, ...]:
        """All of them, the serving one first."""
        with self._lock:
            records = [running.record for running in self._running.values()]
        return tuple(sorted(records, key=lambda r: (r.instance_id != self._active, r.instance_id)))

    def check(self, now_s: float, hang_s: float) -> tuple[str, ...]:
        """Find out which instances have died or hang, and lose them. Returns their names."""
        alive = [each for each in list(self._running.items()) if not each[1].lost]
        faults = {
            name: running.fault(now_s, hang_s, self._silent_s(running)) for name, running in alive
        }
        lost = tuple(name for name, fault in faults.items() if fault)
        for name in lost:
            self.lose(name, faults[name])
        return lost

    def _silent_s(self, running: Running) -> float:
        return self._timeouts.start_s if running.is_reading else self._timeouts.silent_s

    def is_lost(self) -> bool:
        """Whether the instance that serves is gone."""
        running = self._running.get(self._active)
        return running is not None and bool(running.lost)

    def lose(self, instance: str, reason: str) -> None:
        """An instance is gone, or as good as: end it. Harmless a second time.

        Of the one that serves, memory and requests stay for its replacement.
        """
        with self._lock:
            running = self._running.get(instance)
            if running is None or running.lost:
                return
            running.lost = reason
            is_parked = instance in dict(self._standbys.parked).values()
        logger.error("elastic: instance %s is lost: %s", instance, reason)
        if instance == self._active:
            self._engine_link.lose(instance)
        running.lose(reason)
        if running.record.state is _S.STARTING:
            self._engine_link.disconnect(instance)  # whoever waits for its warm-up hears of it
        self._advance(running, _S.FAILED)
        if is_parked:
            self.stop(instance)

    def stop(self, instance: str) -> None:
        """End an instance's processes; harmless a second time."""
        with self._lock:
            running = self._running.pop(instance, None)
            parked = tuple(x for x in self._standbys.parked if x[1] != instance)
            self._standbys = replace(self._standbys, parked=parked)
        if running is None:
            return
        running.process.kill_group()
        self._server.forget(instance)
        self._engine_link.disconnect(instance)
        supervise.clean(self._settings, instance)

    def close(self) -> None:
        """End everything."""
        for name in list(self._running):
            self.stop(name)
        self._server.close()

    def _advance(
        self, running: Running, to: InstanceState, placement: Placement | None = None
    ) -> None:
        with self._lock:
            running.record = running.record.with_state(to, self._clock(), placement)

    def _note_adapters(self, link: RankLink, adapters: tuple[AdapterEntry, ...]) -> None:
        """Every rank of the serving instance reports the same table; the first one's counts."""
        if link.rank == 0:
            self._hmm.set_adapters(adapters)

    def _note_heat(self, link: RankLink, heat: m.HeatReport) -> None:
        """Every rank sees the tokens of all; the first one reports."""
        self._heat.note(link.instance, heat.tokens)

    def heat(self) -> Heat:
        """Layer id -> tokens by expert id, of the last while."""
        return self._heat.recent()

    def _is_alive(self, name: str) -> bool:
        running = self._running.get(name)
        return running is not None and running.process.poll() is None
