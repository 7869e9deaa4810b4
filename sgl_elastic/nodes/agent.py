"""What runs on each node: it starts memory workers and ranks there, and tells whether they live.

    front --calls (strings and numbers only)--> [NodeAgent] --> workers, supervisors: its children
                                                     '--> this node's folder, tunnels, beats

A Ray actor's class, but it knows nothing of Ray (ray_agents.py does). Its children end with it, by
their own watch. The folder has the sockets of this node's workers, and of everything elsewhere that
processes here connect to, by the same names.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sgl_elastic import workdir
from sgl_elastic.errors import (
    ElasticConfigError,
    ElasticInternalError,
    EngineFailedError,
    MemoryWorkerError,
)
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.instance.supervise import remove_sockets, start
from sgl_elastic.memory.worker_processes import Here
from sgl_elastic.nodes.certificates import NodeKey
from sgl_elastic.nodes.remote import BeatState, NodeStates, ProcessState
from sgl_elastic.nodes.tunnel import Tunnels
from sgl_elastic.processes import Process
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot
from sgl_esft.ports import pick_free_port

logger = logging.getLogger(__name__)


class NodeAgent:
    """One node's. Safe to use from any thread; `close` ends all that it started."""

    def __init__(self, host: str) -> None:
        with contextlib.suppress(PermissionError):  # Ray makes its workers give way to others
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        _let_children_find_this_code()
        for stale in workdir.remove_stale():
            logger.warning("elastic: removed %s, which a killed agent left", stale)
        self._workdir = workdir.make()
        self._directory = self._workdir.path
        self._host = host
        self._key = NodeKey()
        self._joined: Tunnels | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._children: dict[int, Process] = {}
        self._ranks: dict[int, tuple[str, int]] = {}  # number -> instance, rank
        self._heartbeats: dict[str, HeartbeatTable] = {}

    def public_key(self) -> str:
        """What the front signs; the private key stays in this process."""
        return self._key.public

    def join(self, certificate: str, authority: str) -> tuple[str, str, int]:
        """From now on the node has tunnels: its folder, and the address of its gateway.

        Raises ElasticConfigError for another's certificate.
        """
        identity = self._key.identity(certificate, authority)
        with self._lock:
            if self._joined is not None:
                raise ElasticConfigError(f"{self._host} has joined a server already")
            self._joined = Tunnels(identity, self._host)
        return (str(self._directory), *self._joined.address)

    # ---- sockets ----

    def offer(self, name: str) -> None:
        """Other nodes may connect to this socket of the folder."""
        self._tunnels.offer(name, self._directory / name)

    def lead(self, name: str, host: str, port: int) -> None:
        """From now on the folder has this socket, which leads to the gateway's of this name."""
        path = self._directory / name
        self._tunnels.shut(path)
        self._tunnels.open(path, name, (host, port))

    def shut(self, name: str) -> None:
        """Take `lead` back."""
        self._tunnels.shut(self._directory / name)

    # ---- processes ----

    def start_worker(self, device_id: int, argv: Sequence[str]) -> tuple[int, int]:
        """A memory worker: its number here, its process id. Raises MemoryWorkerError."""
        try:
            return self._keep(Here(self._directory).start(device_id, argv))
        except OSError as error:
            raise MemoryWorkerError(f"device {device_id} gets no worker: {error}") from error

    def clean_worker(self, device_id: int) -> None:
        """Remove what a worker that was killed leaves behind."""
        Here(self._directory).clean(device_id)

    def start_supervisor(
        self, instance: str, rank: int, spec: str, environment: Mapping[str, str]
    ) -> tuple[int, int]:
        """The supervisor of one rank: its number here, its process id. Raises EngineFailedError."""
        try:
            process = start(InstanceSpec.from_json(spec), environment)
        except OSError as error:
            raise EngineFailedError(f"rank {rank} of {instance} cannot start: {error}") from error
        return self._keep(process, (instance, rank))

    def clean_instance(self, instance: str) -> None:
        """Remove what an instance that has ended leaves behind."""
        self.shut(f"{instance}.in")
        with self._lock:
            heartbeats = self._heartbeats.pop(instance, None)
        if heartbeats is not None:
            heartbeats.close()
        remove_sockets(self._directory, instance)

    def free_port(self) -> int:
        """A port that is free at this node's address."""
        return pick_free_port(self._host)

    def end(self, number: int, how: str) -> int | None:
        """`terminate`, `kill`, or `kill_group`, which waits. How the process ended, if it has."""
        process = self._child(number)
        getattr(process, how)()
        return process.poll()

    def give_way(self, number: int, how: str, at_most_s: float) -> None:
        """Change the priority of a process group: see sgl_elastic/processes.py."""
        self._child(number).give_way(how, at_most_s)

    def states(self) -> NodeStates:
        """How all children are, and when their ranks' loops last turned."""
        with self._lock:
            children = dict(self._children)
            beats = list(self._beats())
        processes: dict[int, ProcessState] = {
            number: (process.poll(), process.is_stopped()) for number, process in children.items()
        }
        return processes, beats

    def close(self) -> None:
        """End everything. Harmless a second time."""
        with self._lock:
            children, self._children = list(self._children.values()), {}
        for process in children:
            if process.poll() is None:
                process.kill()
        for process in children:
            process.wait()
        if self._joined is not None:
            self._joined.close()
        self._workdir.remove()

    @property
    def _tunnels(self) -> Tunnels:
        if self._joined is None:
            raise ElasticConfigError(
                f"{self._host} has no certificate of the server, so no tunnel leads there"
            )
        return self._joined

    def _keep(self, process: Process, rank: tuple[str, int] | None = None) -> tuple[int, int]:
        with self._lock:
            number = next(self._numbers)
            self._children[number] = process
            if rank is not None:
                self._ranks[number] = rank
        return number, process.pid

    def _child(self, number: int) -> Process:
        with self._lock:
            process = self._children.get(number)
        if process is None:
            raise ElasticInternalError(f"this node has no process {number}")
        return process

    def _beats(self) -> Iterator[BeatState]:
        now_ns = time.monotonic_ns()
        for number, (instance, rank) in self._ranks.items():
            heartbeats = self._table_of(instance)
            beat = heartbeats.read(rank_slot(rank)) if heartbeats is not None else None
            if beat is not None and self._children[number].poll() is None:
                yield instance, rank, beat.age_s(now_ns), beat.pid

    def _table_of(self, instance: str) -> HeartbeatTable | None:
        path = Path(self._directory, f"{instance}.beats")
        if instance not in self._heartbeats and path.exists():
            self._heartbeats[instance] = HeartbeatTable.open(path)
        return self._heartbeats.get(instance)


def _let_children_find_this_code() -> None:
    """Ray found it by the front's own search path, which no other process here has.

    An installed package is found by everybody.
    """
    root = str(Path(__file__).resolve().parent.parent.parent)
    if root == sysconfig.get_path("purelib"):
        return
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *([others] if others else [])])
