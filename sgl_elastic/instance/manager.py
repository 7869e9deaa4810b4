"""The instance manager (IMM): engines that start, park, attach, serve and leave.

    coordinator --[Instances]--> [InstanceManager] --> supervisors (process.py), ranks (links.py)
                                        |--> Courier: what travels SGLang's own way (front.py)
                                        '--> Hmm: sockets, the adapter table

A parked instance has been warmed up on scratch memory: to attach is to map pages, nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from sgl_elastic.engine.config import EngineConfig
from sgl_elastic.errors import EngineFailedError, StepFailedError
from sgl_elastic.instance import messages as m
from sgl_elastic.instance.links import RankLink, RankServer
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.instance.shapes import shape_from_json
from sgl_elastic.instance.standbys import Standbys, likely_next
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import AdapterEntry, MemoryShape, Placement, Step, StepKind

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=m.FromRank)

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
class EngineSettings:
    """The same for every instance."""

    directory: Path
    sglang_argv: tuple[str, ...]  # without sizes, ports and addresses
    tokenizer_ipc: str
    detokenizer_ipc: str
    backend: str
    page_bytes: int
    max_kv_tokens: int
    parked_kv_tokens: int  # what an instance is started with, before it is attached
    first_argv: tuple[str, ...] = ()  # more, for the one that loads from disk
    environment: Callable[[int], Mapping[str, str]] = lambda num_ranks: {}


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


@dataclass(frozen=True)
class HandedOver:
    """Where frozen requests went: request id -> rank of the new instance, and tokens sent."""

    ranks: Mapping[str, int]
    num_sent: Mapping[str, int]
    rank_of_old: Mapping[int, int]  # old rank -> new rank, for requests without any token yet


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
        self._send_all(running, self._attach_messages(placement, must_load=True))
        deadline = time.monotonic() + self._patience.start_s
        loaded = [link.expect(m.Loaded, deadline) for link in running.links]
        logger.info("elastic: %d bytes read from disk", sum(x.num_disk_bytes for x in loaded))
        self._spread_trunk(placement)
        self._send_all(running, [m.Run()] * len(running.links))
        self._expect_all(running, m.Started, self._patience.start_s)
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
            self._send_all(running, [m.Park()] * len(running.links))
            self._expect_all(running, m.Started, self._patience.start_s)
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
            self._send_all(running, self._attach_messages(placement, must_load=False))
            self._expect_all(running, m.Done, self._patience.step_s)
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
        activations, self._handed = self._hand_over(former, new, kv_moves)
        self._send_all(new, activations)
        self._expect_all(new, m.Done, self._patience.step_s)
        self._run(new)
        self._advance(new, _S.ACTIVE)
        with self._lock:
            self._active = instance

    def retire(self, instance: str) -> None:
        running = self._running.get(instance)
        if running is None or running.record.state in (_S.PARKED, _S.STOPPED):
            return
        try:
            self._send_all(running, [m.Detach()] * len(running.links))
            self._expect_all(running, m.Done, self._patience.step_s)
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
        _kill_group(running.process)
        self._server.forget(instance)
        self._courier.disconnect(instance)
        _remove_sockets(self._settings.directory, instance)

    def close(self) -> None:
        """End everything."""
        for name in list(self._running):
            self.stop(name)
        self._server.close()

    # ---- parts ----

    def _spawn(self, device_ids: tuple[int, ...], more_argv: tuple[str, ...]) -> str:
        name = f"i{next(self._names)}"
        settings = self._settings
        input_ipc = f"ipc://{settings.directory}/{name}.in"
        engine = EngineConfig(
            instance=name,
            directory=str(settings.directory),
            device_ids=device_ids,
            backend=settings.backend,
            page_bytes=settings.page_bytes,
            max_kv_tokens=settings.max_kv_tokens,
        )
        spec = InstanceSpec(
            engine=engine.to_json(),
            sglang_argv=(*settings.sglang_argv, *more_argv, *self._size_argv(device_ids)),
            tokenizer_ipc=settings.tokenizer_ipc,
            detokenizer_ipc=settings.detokenizer_ipc,
            input_ipc=input_ipc,
        )
        self._courier.connect(name, input_ipc)
        process = subprocess.Popen(
            [sys.executable, "-m", "sgl_elastic.instance.process"],
            stdin=subprocess.PIPE,
            env={**os.environ, **settings.environment(len(device_ids))},
            start_new_session=True,
        )
        if process.stdin is None:
            raise EngineFailedError("a supervisor has no standard input")
        process.stdin.write(spec.to_json().encode() + b"\n")
        process.stdin.close()
        record = Instance(name, device_ids, pid=process.pid, since_s=self._clock())
        with self._lock:
            self._running[name] = _Running(record, process)
        logger.info("elastic: instance %s starts on devices %s", name, device_ids)
        return name

    def _size_argv(self, device_ids: tuple[int, ...]) -> list[str]:
        size = str(len(device_ids))
        argv = ["--tp-size", size, "--dp-size", size]
        argv += ["--max-total-tokens", str(self._settings.parked_kv_tokens)]
        if len(device_ids) > 1:
            argv += ["--enable-dp-attention", "--enable-dp-lm-head", "--moe-dense-tp-size", "1"]
        return argv

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

    def _attach_messages(self, placement: Placement, *, must_load: bool) -> list[m.ToRank]:
        adapters = tuple(m.Adapter(**asdict(entry)) for entry in self._hmm.adapters())
        return [
            m.Attach(
                socket=str(self._hmm.socket_path(device_id)),
                expert_ids=placement.experts_of(device_id),
                kv_tokens=placement.kv_tokens_of(device_id),
                adapters=adapters,
                must_load=must_load,
                loads_trunk=must_load and rank == 0,
            )
            for rank, device_id in enumerate(placement.device_ids)
        ]

    def _pause(self, running: _Running) -> None:
        for link in running.links:
            link.forget_answers()
        self._courier.pause(running.record.instance_id)
        running.frozen = self._expect_all(running, m.Frozen, self._patience.freeze_s)

    def _run(self, running: _Running) -> None:
        self._send_all(running, [m.Run()] * len(running.links))
        self._expect_all(running, m.Done, self._patience.step_s)

    def _hand_over(
        self, old: _Running, new: _Running, kv_moves: Mapping[int, int]
    ) -> tuple[list[m.ToRank], HandedOver]:
        """What each new rank takes over: of its own device, and of leaving ones by `kv_moves`."""
        device_to_rank = {d: r for r, d in enumerate(new.record.device_ids)}
        rank_of_old = {
            rank: device_to_rank[d if d in device_to_rank else kv_moves[d]]
            for rank, d in enumerate(old.record.device_ids)
        }
        activations: list[m.ToRank] = []
        for rank, device_id in enumerate(new.record.device_ids):
            sources = [r for r, target in rank_of_old.items() if target == rank]
            stays = [r for r in sources if old.record.device_ids[r] == device_id]
            leaves = [r for r in sources if old.record.device_ids[r] != device_id]
            activations.append(
                m.Activate(
                    sequences=tuple(s for r in stays for s in old.frozen[r].sequences),
                    moves=tuple(self._kv_move(old, r) for r in leaves),
                    requests=tuple(q for r in sources for q in old.frozen[r].requests),
                )
            )
        states = {q.rid: (rank_of_old[r], q) for r, f in enumerate(old.frozen) for q in f.requests}
        handed = HandedOver(
            ranks={rid: rank for rid, (rank, _) in states.items()},
            num_sent={rid: state.num_sent for rid, (_, state) in states.items()},
            rank_of_old=rank_of_old,
        )
        return activations, handed

    def _kv_move(self, old: _Running, rank: int) -> m.KvMove:
        """A leaving device's sequences, the one used last first: room may end before they do."""
        socket = str(self._hmm.socket_path(old.record.device_ids[rank]))
        return m.KvMove(socket, tuple(reversed(old.frozen[rank].sequences)))

    def _send_all(self, running: _Running, messages: list[m.ToRank]) -> None:
        for link, message in zip(running.links, messages, strict=True):
            link.send(message)

    def _expect_all(self, running: _Running, kind: type[Answer], timeout_s: float) -> list[Answer]:
        deadline = time.monotonic() + timeout_s
        return [link.expect(kind, deadline) for link in running.links]

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


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The supervisor and its ranks, which are its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_sockets(directory: Path, instance: str) -> None:
    for path in directory.glob(f"{instance}.in*"):
        path.unlink(missing_ok=True)
