"""The instance manager (IMM): engines that start, park, attach, serve and leave.

    coordinator --[Instances]--> [InstanceManager] --> table.py: processes, ranks, how they end
                                        |--> EngineLink: what travels SGLang's own way (router)
                                        '--> Hmm: sockets, the adapter table

A parked instance has been warmed up on scratch memory: to attach is to map pages, nothing else.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import msgspec

from sgl_elastic.errors import EngineFailedError, StepFailedError
from sgl_elastic.instance import handover, supervise
from sgl_elastic.instance import rank_messages as m
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.links import RankLink, expect_all, send_all
from sgl_elastic.instance.rank_messages import shape_from_json
from sgl_elastic.instance.running import EngineLink, Running, Timeouts
from sgl_elastic.instance.standbys import likely_next
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.instance.table import InstanceTable
from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step, StepKind

__all__ = ["EngineLink", "EngineSettings", "HandedOver", "InstanceManager", "Timeouts"]

logger = logging.getLogger(__name__)

_S = InstanceState
_POLL_S = 0.02
_DELIVERY_S = 0.005
_FINISH_S = 1.0  # what a rank of an instance that cannot take over has, to answer
_NO_HURRY_S = 45.0  # a standby's start takes that long on two cores at most


class InstanceManager(InstanceTable):
    """The engines of one server. `Instances` of coordinator/ports.py, and what starts the first."""

    def __init__(
        self,
        settings: EngineSettings,
        hmm: Hmm,
        engine_link: EngineLink,
        *,
        standby_ranks: int,
        max_devices: int,
        timeouts: Timeouts | None = None,
        on_adapters: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        super().__init__(
            settings,
            engine_link,
            standby_ranks,
            self._note_adapters,
            clock,
            self._timeouts.silent_s,
        )
        self._hmm = hmm
        self._max_devices = max_devices
        self._on_adapters = on_adapters
        self._names = itertools.count(1)
        self._handed = HandedOver({}, {})

    # ---- the first instance ----

    def start_first(
        self, device_ids: tuple[int, ...], place: Callable[[MemoryShape], Placement]
    ) -> str:
        """Start, load from disk, serve. `place` is asked once the memory's shape is known."""
        name = self._spawn(device_ids, self._settings.first_argv)
        running = self._running[name]
        shape = self._declared(running)
        self._hmm.define(shape)
        placement = place(shape)
        self._hmm.map_placement(placement)
        self._attach_all(running, placement, must_load=True)
        deadline = time.monotonic() + self._timeouts.start_s
        loaded = [link.expect(m.Loaded, deadline) for link in running.links]
        logger.info("elastic: %d bytes read from disk", sum(x.num_disk_bytes for x in loaded))
        self._spread_trunk(placement)
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.Started, self._timeouts.start_s)
        self._advance(running, _S.ATTACHED, placement)
        self._advance(running, _S.WARM)
        self._advance(running, _S.ACTIVE)
        self._active = name
        return name

    def _spread_trunk(self, placement: Placement) -> None:
        first, *others = placement.device_ids
        for device_id in others:
            self._hmm.execute(Step(StepKind.COPY_TRUNK, device_id, source_id=first))
        self._hmm.commit()

    # ---- standbys ----

    def keep_standbys(self, stop: threading.Event) -> None:
        """Start the standbys that the present configuration is likely to need, one at a time."""
        with self._lock:
            now = self._running[self._active].record.device_ids
        # Last a spare of the present one, should that be lost.
        for device_ids in (*likely_next(now, self._max_devices), now):
            if stop.is_set():
                return
            with self._lock:
                fits = self._standbys.num_ranks + len(device_ids) <= self._standbys.capacity_ranks
                known = self._standbys.find(device_ids) is not None
            if fits and not known:
                self._park_new(device_ids)

    def _park_new(self, device_ids: tuple[int, ...]) -> str:
        name = self._start_parked(device_ids, in_no_hurry=True)
        self._put_away(self._running[name])
        return name

    def _start_parked(self, device_ids: tuple[int, ...], *, in_no_hurry: bool = False) -> str:
        """A new instance on scratch memory, warmed up and parked."""
        name = self._spawn(device_ids, ())
        running = self._running[name]
        process = running.process
        try:
            with process.when_idle(_NO_HURRY_S) if in_no_hurry else nullcontext():
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

    # ---- Instances ----

    def serving(self) -> tuple[str, Placement]:
        with self._lock:
            running = self._running[self._active]
            placement = running.record.placement or running.placement
        if placement is None:
            raise EngineFailedError(f"instance {running.record.instance_id} has no memory")
        return running.record.instance_id, placement

    def prepare(self, placement: Placement) -> str:
        for device_id in placement.device_ids:
            self._hmm.client(device_id)  # a dead worker is named as such
        name = self._take_standby(placement.device_ids)
        if name is not None:
            try:  # where its memory worker failed, another instance would fail alike
                return self._attach(name, placement)
            except EngineFailedError as error:
                logger.warning("elastic: standby %s is of no use: %s", name, error)
        return self._attach(self._start_parked(placement.device_ids), placement)

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
                coming[hurrying].foreground()
            hurried |= coming.keys()
            time.sleep(_POLL_S)

    def _attach(self, name: str, placement: Placement) -> str:
        """A parked instance gets memory; one that cannot is ended, and that is raised."""
        running = self._running[name]
        try:
            if not self._is_alive(name):
                raise EngineFailedError(f"{name} has ended")
            self._attach_all(running, placement, must_load=False)
            expect_all(running.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError:
            self.stop(name)
            raise
        self._advance(running, _S.ATTACHED, placement)
        self._advance(running, _S.WARM)
        return name

    def cancel(self, instance: str) -> None:
        self.retire(instance)

    def freeze(self, instance: str) -> None:
        """One that does not in time is lost: its requests go on from the tokens that came by.

        So is one whose last outputs do not come: what it published is of tokens nobody has seen.
        """
        running = self._running[instance]
        try:
            if not running.lost:
                self._pause(running)
                self._engine_link.wait_for_outputs(handover.num_sent(running.frozen))
                self._advance(running, _S.FROZEN)
                return
        except EngineFailedError as error:
            self.lose(instance, str(error))
        running.frozen = handover.frozen_of(self._engine_link.states(), running.record.num_ranks)

    def resume(self, instance: str) -> None:
        running = self._running[instance]
        running.frozen = []
        if running.lost:
            return  # its replacement goes on
        self._run(running)
        self._advance(running, _S.ACTIVE)

    def drain(self, instance: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._engine_link.num_running() > 0:
            if self._running[instance].lost:
                raise EngineFailedError(f"{instance} is lost: {self._running[instance].lost}")
            if time.monotonic() > deadline:
                raise EngineFailedError(f"{instance} still runs requests after {timeout_s:g} s")
            time.sleep(0.02)

    def activate(self, instance: str, old: str, kv_moves: Mapping[int, int]) -> None:
        new, former = self._running[instance], self._running[old]
        activations, self._handed = handover.hand_over(
            former.record.device_ids,
            former.frozen,
            new.record.device_ids,
            kv_moves,
            self._hmm.socket_path,
            self._hmm.are_apart,
        )
        self._take_over(new, activations)

    def _take_over(self, new: Running, activations: list[m.Activate]) -> None:
        """Tell an instance what it takes over; it runs when its requests are on their way."""
        try:
            send_all(new.links, activations)
            expect_all(new.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError as error:
            self._end_unless_done(new, str(error))
            raise
        new.took_over = True
        self._advance(new, _S.ACTIVE)
        with self._lock:
            self._active = new.record.instance_id

    def _end_unless_done(self, new: Running, reason: str) -> None:
        """A rank that is still at it writes KV into slots that the old instance may use soon.

        A rank that has failed is at nothing: an instance of such ranks can be parked again.
        """
        deadline = time.monotonic() + _FINISH_S
        if not all(link.finish(deadline) for link in new.links):
            self.lose(new.record.instance_id, reason)

    def go_on(self, instance: str) -> None:
        """An instance that has taken over runs; harmless a second time.

        The requests that were sent to it go through SGLang's controller. Ranks that begin before
        all have arrived compute them in two batches, and the second one's streams wait for both.
        """
        running = self._running[instance]
        if running.took_over:
            time.sleep(_DELIVERY_S)
            self._run(running)
            running.took_over = False

    def retire(self, instance: str) -> None:
        running = self._running.get(instance)
        if running is None or running.record.state in (_S.PARKED, _S.STOPPED):
            return
        if running.lost:
            self.stop(instance)
            return
        try:
            with running.process.in_background():
                send_all(running.links, [m.Detach()] * len(running.links))
                expect_all(running.links, m.RankDone, self._timeouts.step_s)
        except StepFailedError as error:
            logger.warning("elastic: %s could not be parked, so it ends: %s", instance, error)
            self.stop(instance)
            return
        running.frozen = []
        self._advance(running, _S.PARKED)
        self._put_away(running)

    def resize_kv(self, device_id: int, num_tokens: int) -> None:
        name, placement = self.serving()
        running = self._running[name]
        rank = placement.device_ids.index(device_id)
        shrinks = num_tokens < placement.kv_tokens[rank]
        if shrinks:
            self.freeze(name)
        if running.lost:
            raise EngineFailedError(f"instance {name} is lost: {running.lost}")
        try:
            running.links[rank].send(m.ResizeKv(num_tokens))
            running.links[rank].expect(m.RankDone, time.monotonic() + self._timeouts.step_s)
        finally:
            if shrinks:
                self.resume(name)
        tokens = list(placement.kv_tokens)
        tokens[rank] = num_tokens
        with self._lock:
            resized = replace(placement, kv_tokens=tuple(tokens))
            running.record = replace(running.record, placement=resized)

    # ---- for the front and for people ----

    def handed_over(self) -> HandedOver:
        """Where the last frozen instance's requests went."""
        return self._handed

    # ---- parts ----

    def _spawn(self, device_ids: tuple[int, ...], more_argv: tuple[str, ...]) -> str:
        name = f"i{next(self._names)}"
        settings = self._settings
        self._engine_link.connect(name, settings.input_ipc(name))
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
        return shape_from_json(shapes.pop())

    def _attach_all(self, running: Running, placement: Placement, *, must_load: bool) -> None:
        """Tell the ranks what to map; each answers when it has."""
        send_all(running.links, self._attach_messages(placement, must_load=must_load))

    def _attach_messages(self, placement: Placement, *, must_load: bool) -> list[m.Attach]:
        adapters, socket_of = self._hmm.adapters(), self._hmm.socket_path
        return handover.attach_messages(placement, adapters, socket_of, must_load=must_load)

    def _pause(self, running: Running) -> None:
        for link in running.links:
            link.forget_answers()
        self._engine_link.pause(running.record.instance_id)
        running.frozen = expect_all(running.links, m.Frozen, self._timeouts.freeze_s)

    def _run(self, running: Running) -> None:
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.RankDone, self._timeouts.step_s)

    def _note_adapters(self, link: RankLink, adapters: tuple[m.Adapter, ...]) -> None:
        """Every rank of the serving instance reports the same table; the first one's counts."""
        if link.rank == 0:
            self._hmm.set_adapters(
                tuple(AdapterEntry(**msgspec.structs.asdict(adapter)) for adapter in adapters)
            )
            self._on_adapters()
