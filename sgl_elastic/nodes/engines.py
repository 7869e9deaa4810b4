"""Instances whose ranks are on several nodes: a supervisor for each rank, on its device's node.

    manager.py --[SpreadEngines.start]--> agents --> `python -m sgl_elastic.instance.process`
               <--[Supervisors], one process to it       SGLang: --nnodes N --node-rank r
    agents --beats--> [SpreadEngines.note_beats] --> DIRECTORY/INSTANCE.beats, as of local ranks

SGLang wants the same number of ranks on each of its nodes. So each rank is a node of its own to
it, and any number of devices on any nodes will do. Ranks meet at the address of rank 0's node.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sgl_elastic.errors import ElasticError, EngineFailedError, NodeLostError
from sgl_elastic.instance import supervise
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.nodes.cluster import Cluster
from sgl_elastic.nodes.remote import BeatState, Node
from sgl_elastic.processes import Process
from sgl_esft.health.heartbeat import Beat, HeartbeatTable, rank_slot

_TOKENIZER, _DETOKENIZER = "tokenizer.sock", "detokenizer.sock"
# What this process was told, or has decided, that ranks on other nodes must know too.
_PASSED_ON = ("ESFT_", "SGL", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "OMP_", "GLOO_")
_SECRETS = ("_KEY", "_TOKEN")  # no rank needs them, and they would be seen in Ray


class Supervisors:
    """The processes of one instance as one `Process`: it has ended when one of them has."""

    def __init__(self, members: Sequence[Process]) -> None:
        self._members = tuple(members)

    @property
    def pid(self) -> int:
        return self._members[0].pid

    @property
    def returncode(self) -> int | None:
        return next((m.returncode for m in self._members if m.returncode is not None), None)

    def poll(self) -> int | None:
        for member in self._members:
            member.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        for member in self._members:
            member.wait(timeout)
        return self.poll() or 0

    def terminate(self) -> None:
        for member in self._members:
            member.terminate()

    def kill(self) -> None:
        for member in self._members:
            member.kill()

    def kill_group(self) -> None:
        for member in self._members:
            member.kill_group()

    def is_stopped(self) -> bool:
        return any(member.is_stopped() for member in self._members)

    def give_way(self, how: str, at_most_s: float = 0.0) -> None:
        for member in self._members:
            member.give_way(how, at_most_s)


class SpreadEngines:
    """How instances are started on a cluster, and what they leave there. Safe to use from any
    thread.

    `directory` has the front's sockets, and gets the heartbeat tables that /readyz reads.
    """

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._lock = threading.Lock()
        self._heartbeats: dict[str, HeartbeatTable] = {}  # until they are cleaned up
        self._nodes: dict[str, frozenset[Node]] = {}
        cluster.on_beats(self.note_beats)

    def settings(self, settings: EngineSettings) -> EngineSettings:
        """The same, for instances on the cluster; its outputs lead to the front's processes."""
        for name, address in (
            (_TOKENIZER, settings.tokenizer_ipc),
            (_DETOKENIZER, settings.detokenizer_ipc),
        ):
            for node in self._cluster.nodes:
                self._cluster.expose(name, Path(address.removeprefix("ipc://")), node)
        return replace(settings, start=self.start, clean=self.clean)

    def start(
        self,
        settings: EngineSettings,
        name: str,
        device_ids: tuple[int, ...],
        more_argv: tuple[str, ...],
        /,
    ) -> Process:
        """A supervisor for each rank. Raises EngineFailedError, and then none runs."""
        nodes = [self._cluster.node_of(device_id) for device_id in device_ids]
        with self._lock:
            self._heartbeats[name] = HeartbeatTable.open(self._directory / f"{name}.beats")
            self._nodes[name] = frozenset(nodes)
        members: list[Process] = []
        try:
            self._cluster.expose(f"{name}.in", self._directory / f"{name}.in", nodes[0])
            meeting = self._meeting(nodes)
            for rank, node in enumerate(nodes):
                argv = (*more_argv, *meeting, *(("--node-rank", str(rank)) if meeting else ()))
                own = _settings_at(settings, node)
                spec = supervise.spec_of(own, name, device_ids, argv).to_json()
                environment = {**_passed_on(os.environ), **settings.environment(len(device_ids))}
                started = node.call("start_supervisor", name, rank, spec, environment)
                members.append(node.process(started))
        except ElasticError as error:
            for member in members:
                member.kill_group()
            self.clean(name)
            raise EngineFailedError(f"instance {name} cannot start: {error}") from error
        return Supervisors(members)

    def clean(self, instance: str) -> None:
        """Remove what an instance has left behind; harmless a second time."""
        self._cluster.withdraw(f"{instance}.in")
        with self._lock:
            nodes = self._nodes.pop(instance, frozenset())
            heartbeats = self._heartbeats.pop(instance, None)
        if heartbeats is not None:
            heartbeats.close()
        supervise.remove_sockets(self._directory, instance)
        for node in nodes:
            with contextlib.suppress(NodeLostError):
                node.call("clean_instance", instance)

    def note_beats(self, beats: Sequence[BeatState]) -> None:
        """When ranks' loops last turned, by this machine's clock: each has one of its own."""
        now_ns = time.monotonic_ns()
        with self._lock:
            for instance, rank, age_s, pid in beats:
                heartbeats = self._heartbeats.get(instance)
                if heartbeats is not None:
                    heartbeats.put(rank_slot(rank), Beat(now_ns - int(age_s * 1e9), pid))

    def _meeting(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """SGLang's flags for ranks on several nodes; none for one rank."""
        if len(nodes) == 1:
            return ()
        host = nodes[0].address[0]
        address = f"[{host}]" if ":" in host else host
        port = nodes[0].call("free_port")
        return ("--nnodes", str(len(nodes)), "--dist-init-addr", f"{address}:{port}")


def _settings_at(settings: EngineSettings, node: Node) -> EngineSettings:
    """All sockets as they are found on the node."""
    return replace(
        settings,
        directory=node.directory,
        tokenizer_ipc=f"ipc://{node.directory / _TOKENIZER}",
        detokenizer_ipc=f"ipc://{node.directory / _DETOKENIZER}",
    )


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PASSED_ON) and not name.endswith(_SECRETS)
    }
