"""The instance manager (IMM): engines that start, park, attach, serve and leave.

    coordinator --[Instances]--> [InstanceManager] --> processes (supervise.py), ranks (links.py)
                                        |--> Courier: what travels SGLang's own way (switchboard)
                                        '--> Hmm: sockets, the adapter table

A parked instance has been warmed up on scratch memory: to attach is to map pages, nothing else.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from sgl_elastic.errors import EngineFailedError, StepFailedError
from sgl_elastic.instance import handover, supervise
from sgl_elastic.instance import messages as m
from sgl_elastic.instance.handover import HandedOver
from sgl_elastic.instance.links import RankLink, RankServer, expect_all, send_all
from sgl_elastic.instance.shapes import shape_from_json
from sgl_elastic.instance.standbys import Standbys, likely_next
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step, StepKind

__all__ = ["Courier", "EngineSettings", "HandedOver", "InstanceManager", "Patience"]

logger = logging.getLogger(__name__)

_S = InstanceState


class Courier(Protocol):
    """What reaches an instance by SGLang's own messages."""

    def connect(self, instance: str, input_ipc: str) -> None:
        """Open the way to an instance, before it starts."""

    def disconnect(self, instance: str) -> None:
        """Close it."""

    def pause(self, instance: str) -> None:
        """All ranks stop at the same step, and park."""

    def warm_up(self, instance: str, num_ranks: int, timeout_s: float) -> None:
        """A short request on each rank; returns when they are answered."""

    def num_running(self) -> int:
        """Requests that have not been answered in full."""


@dataclass(frozen=True)
class Patience:
    """How long the manager waits for what, in seconds."""

    start_s: float = 300.0
    step_s: float = 30.0  # any one instruction
    freeze_s: float = 5.0


@dataclass
class _Running:
    """An instance and its processes."""

    record: Instance
    process: subprocess.Popen[bytes]
    links: list[RankLink] = field(default_factory=list)
    frozen: list[m.Frozen] = field(default_factory=list)
    sent: tuple[m.Attach, ...] = ()


class InstanceManager:
    """The engines of one server. `Instances` of coordinator/ports.py, and what starts the first."""

    def __init__(
        self,
        settings: EngineSettings,
        hmm: Hmm,
        courier: Courier,
        *,
        standby_ranks: int,
        max_devices: int,
        patience: Patience | None = None,
        on_adapters: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._hmm = hmm
        self._courier = courier
        self._patience = patience or Patience()
        self._max_devices = max_devices
        self._on_adapters = on_adapters
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._standbys = Standbys(standby_ranks)
        self._active = ""
        self._names = itertools.count(1)
        self._lock = threading.RLock()
        self._handed = HandedOver({}, {}, {})
        self._tables: dict[int, tuple[m.Adapter, ...]] = {}
        self._server = RankServer(settings.directory / "ranks.sock", self._note_adapters)

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
        deadline = time.monotonic() + self._patience.start_s
        loaded = [link.expect(m.Loaded, deadline) for link in running.links]
        logger.info("elastic: %d bytes read from disk", sum(x.num_disk_bytes for x in loaded))
        self._spread_trunk(placement)
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.Started, self._patience.start_s)
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
        for device_ids in likely_next(now, self._max_devices):
            if stop.is_set():
                return
            with self._lock:
                fits = self._standbys.num_ranks + len(device_ids) <= self._standbys.capacity_ranks
                known = self._standbys.find(device_ids) is not None
            if fits and not known:
                self._park_new(device_ids)

    def _park_new(self, device_ids: tuple[int, ...]) -> str:
        name = self._start_parked(device_ids)
        self._put_away(self._running[name])
        return name

    def _start_parked(self, device_ids: tuple[int, ...]) -> str:
        """A new instance on scratch memory, warmed up and parked."""
        name = self._spawn(device_ids, ())
        running = self._running[name]
        try:
            shape = self._declared(running)
            self._hmm.define(shape)  # refuses another shape
            send_all(running.links, [m.Park()] * len(running.links))
            expect_all(running.links, m.Started, self._patience.start_s)
            self._courier.warm_up(name, len(running.links), self._patience.start_s)
            self._pause(running)
        except StepFailedError:
            self.stop(name)
            raise
        self._advance(running, _S.PARKED)
        return name

    def _put_away(self, running: _Running) -> None:
        """Into the table of standbys; what has no room there ends."""
        record = running.record
        with self._lock:
            self._standbys, surplus = self._standbys.park(record.device_ids, record.instance_id)
        for name in surplus:
            self.stop(name)

    # ---- Instances ----

    def serving(self) -> tuple[str, Placement]:
        with self._lock:
            record = self._running[self._active].record
        if record.placement is None:
            raise EngineFailedError(f"instance {record.instance_id} has no memory")
        return record.instance_id, record.placement

    def prepare(self, placement: Placement) -> str:
        with self._lock:
            self._standbys, name = self._standbys.take(placement.device_ids)
        if name is not None and not self._is_alive(name):
            self.stop(name)
            name = None
        if name is None:
            name = self._start_parked(placement.device_ids)
        running = self._running[name]
        try:
            self._attach_all(running, placement, must_load=False)
            expect_all(running.links, m.Done, self._patience.step_s)
        except StepFailedError:
            self.stop(name)
            raise
        self._advance(running, _S.ATTACHED, placement)
        self._advance(running, _S.WARM)
        return name

    def cancel(self, instance: str) -> None:
        self.retire(instance)

    def freeze(self, instance: str) -> None:
        running = self._running[instance]
        self._pause(running)
        self._advance(running, _S.FROZEN)

    def resume(self, instance: str) -> None:
        running = self._running[instance]
        self._run(running)
        self._advance(running, _S.ACTIVE)

    def drain(self, instance: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._courier.num_running() > 0:
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
        )
        send_all(new.links, activations)
        expect_all(new.links, m.Done, self._patience.step_s)
        self._run(new)
        self._advance(new, _S.ACTIVE)
        with self._lock:
            self._active = instance

    def retire(self, instance: str) -> None:
        running = self._running.get(instance)
        if running is None or running.record.state in (_S.PARKED, _S.STOPPED):
            return
        try:
            send_all(running.links, [m.Detach()] * len(running.links))
            expect_all(running.links, m.Done, self._patience.step_s)
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
        try:
            running.links[rank].send(m.ResizeKv(num_tokens))
            running.links[rank].expect(m.Done, time.monotonic() + self._patience.step_s)
        finally:
            if shrinks:
                self.resume(name)
        tokens = list(placement.kv_tokens)
        tokens[rank] = num_tokens
        with self._lock:
            resized = replace(placement, kv_tokens=tuple(tokens))
            running.record = replace(running.record, placement=resized)

    # ---- for the front and for people ----

    def wake(self, instance: str) -> None:
        """A request is on its way to an idle instance: none of its ranks may sleep through it."""
        running = self._running.get(instance)
        if running is None:
            return
        try:
            send_all(running.links, [m.Wake()] * len(running.links))
        except EngineFailedError as error:
            logger.warning("elastic: %s was not woken: %s", instance, error)

    def handed_over(self) -> HandedOver:
        """Where the last frozen instance's requests went."""
        return self._handed

    def instances(self) -> tuple[Instance, ...]:
        """All of them, the serving one first."""
        with self._lock:
            records = [running.record for running in self._running.values()]
        return tuple(sorted(records, key=lambda r: (r.instance_id != self._active, r.instance_id)))

    def rank_pids(self, instance: str) -> tuple[int, ...]:
        """Process ids of an instance's ranks."""
        return tuple(link.pid for link in self._running[instance].links)

    def dead(self) -> tuple[str, ...]:
        """Instances whose processes have ended by themselves."""
        return tuple(name for name in list(self._running) if not self._is_alive(name))

    def stop(self, instance: str) -> None:
        """End an instance's processes; harmless a second time."""
        with self._lock:
            running = self._running.pop(instance, None)
            parked = tuple(x for x in self._standbys.parked if x[1] != instance)
            self._standbys = replace(self._standbys, parked=parked)
        if running is None:
            return
        supervise.kill_group(running.process)
        self._server.forget(instance)
        self._courier.disconnect(instance)
        supervise.remove_sockets(self._settings.directory, instance)

    def close(self) -> None:
        """End everything."""
        for name in list(self._running):
            self.stop(name)
        self._server.close()

    # ---- parts ----

    def _spawn(self, device_ids: tuple[int, ...], more_argv: tuple[str, ...]) -> str:
        name = f"i{next(self._names)}"
        settings = self._settings
        self._courier.connect(name, settings.input_ipc(name))
        spec = supervise.spec_of(settings, name, device_ids, more_argv)
        process = supervise.start(spec, settings.environment(len(device_ids)))
        record = Instance(name, device_ids, pid=process.pid, since_s=self._clock())
        with self._lock:
            self._running[name] = _Running(record, process)
        logger.info("elastic: instance %s starts on devices %s", name, device_ids)
        return name

    def _declared(self, running: _Running) -> MemoryShape:
        """The shape that all ranks declare. Raises EngineFailedError when they disagree."""
        record = running.record
        deadline = time.monotonic() + self._patience.start_s
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

    def _attach_all(self, running: _Running, placement: Placement, *, must_load: bool) -> None:
        """Tell the ranks what to map; each answers when it has."""
        adapters, socket_of = self._hmm.adapters(), self._hmm.socket_path
        messages = handover.attach_messages(placement, adapters, socket_of, must_load=must_load)
        send_all(running.links, messages)

    def _pause(self, running: _Running) -> None:
        for link in running.links:
            link.forget_answers()
        self._courier.pause(running.record.instance_id)
        running.frozen = expect_all(running.links, m.Frozen, self._patience.freeze_s)

    def _run(self, running: _Running) -> None:
        send_all(running.links, [m.Run()] * len(running.links))
        expect_all(running.links, m.Done, self._patience.step_s)

    def _advance(
        self, running: _Running, to: InstanceState, placement: Placement | None = None
    ) -> None:
        with self._lock:
            running.record = running.record.with_state(to, self._clock(), placement)

    def _is_alive(self, name: str) -> bool:
        running = self._running.get(name)
        return running is not None and running.process.poll() is None

    def _note_adapters(self, link: RankLink, adapters: tuple[m.Adapter, ...]) -> None:
        """Every rank of the serving instance reports the same table; the first one's counts."""
        if link.rank == 0:
            self._hmm.set_adapters(
                tuple(AdapterEntry(**msgspec.structs.asdict(adapter)) for adapter in adapters)
            )
            self._on_adapters()
