"""Instances on two nodes, by two real agents in this process: what supervisors are told, what is
seen of them, and what they leave. The supervisors are `sleep`; no SGLang, no Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from sgl_elastic import wire
from sgl_elastic.errors import (
    ElasticConfigError,
    ElasticInternalError,
    EngineFailedError,
    MemoryWorkerError,
    NodeLostError,
)
from sgl_elastic.instance import supervise
from sgl_elastic.instance.engine_config import EngineConfig
from sgl_elastic.instance.process import InstanceSpec
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.nodes import agent as agents
from sgl_elastic.nodes.agent import NodeAgent
from sgl_elastic.nodes.certificates import Authority, own_identity
from sgl_elastic.nodes.cluster import Cluster
from sgl_elastic.nodes.engines import SpreadEngines
from sgl_elastic.nodes.remote import Node
from sgl_elastic.nodes.tunnel import Tunnels
from sgl_elastic.processes import LocalProcess, giving_way, is_stopped
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot
from tests.support.processes import stop_process
from tests.support.waiting import wait_until

HOST = "127.0.0.1"


class Direct:
    """`Agent` of remote.py without Ray between."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self.is_lost = False
        self.is_old = False  # of a version without certificates
        self.said: list[Any] = []  # all that Ray would carry

    def call(self, method: str, arguments: Sequence[Any], timeout_s: float) -> Any:
        if self.is_lost:
            raise NodeLostError("its agent has ended")
        if self.is_old and method == "join":
            raise ElasticInternalError("an agent failed at join: it has no such method")
        answer = getattr(self.agent, method)(*arguments)
        self.said += [method, *arguments, answer]
        return answer

    def end(self) -> None:
        self.agent.close()


@dataclass
class Scene:
    cluster: Cluster
    engines: SpreadEngines
    settings: EngineSettings
    agents: list[Direct]
    started: ExitStack
    told: list[tuple[InstanceSpec, dict[str, str]]] = field(default_factory=list)

    def start(self, name: str, *device_ids: int) -> Any:
        process = supervise.start_instance(self.settings, name, device_ids, ("--more", "x"))
        self.started.callback(process.kill_group)
        return process


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Devices 0 and 1 are on node 0, device 2 on node 1."""
    directory = tmp_path / "front"
    wire.make_private(directory)
    with ExitStack() as stack:
        authority = Authority()
        direct = [Direct(NodeAgent(HOST)) for _ in range(2)]
        for each in direct:
            stack.callback(each.end)
        nodes = [Node(f"node {i}", HOST, each, authority) for i, each in enumerate(direct)]
        tunnels = Tunnels(own_identity(authority, HOST), HOST)
        cluster = Cluster(nodes, 2, tunnels, directory)
        stack.callback(cluster.close)
        engines = SpreadEngines(cluster, directory)
        argv = ("--model-path", "base")
        settings = EngineSettings(directory, argv, "ipc://t", "ipc://d", "host", 4096, 64, 32)
        scene = Scene(cluster, engines, engines.settings(settings), direct, stack)

        def sleep(spec: InstanceSpec, environment: dict[str, str]) -> LocalProcess:
            scene.told.append((spec, environment))
            return LocalProcess(["sleep", "60"], start_new_session=True)

        monkeypatch.setattr(agents, "start", sleep)
        yield scene


def value_of(spec: InstanceSpec, flag: str) -> str:
    return spec.sglang_argv[spec.sglang_argv.index(flag) + 1]


def test_each_rank_is_a_node_of_its_own_to_sglang(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESFT_CONFIG", "{}")
    monkeypatch.setenv("ESFT_KEY", "secret")
    scene.start("i1", 2, 0, 1)
    specs = [spec for spec, _ in scene.told]
    homes = [scene.cluster.node_of(device_id).directory for device_id in (2, 0, 1)]
    for rank, (spec, home) in enumerate(zip(specs, homes, strict=True)):
        engine = EngineConfig.from_json(spec.engine)
        assert (engine.instance, engine.device_ids) == ("i1", (2, 0, 1))
        assert engine.directory == str(home)
        assert value_of(spec, "--node-rank") == str(rank)
        assert value_of(spec, "--nnodes") == value_of(spec, "--tp-size") == "3"
        assert spec.input_ipc == f"ipc://{home}/i1.in"
        assert spec.tokenizer_ipc == f"ipc://{home}/tokenizer.sock"
    assert len({value_of(spec, "--dist-init-addr") for spec in specs}) == 1
    assert value_of(specs[0], "--dist-init-addr").startswith("127.0.0.1:")
    assert all(env["ESFT_CONFIG"] == "{}" and "ESFT_KEY" not in env for _, env in scene.told)
    scene.told.clear()
    scene.start("i2", 2)
    assert "--nnodes" not in scene.told[0][0].sglang_argv, "one rank meets nobody"


def test_requests_and_outputs_find_their_way(scene: Scene) -> None:
    scene.start("i1", 2, 0)
    input_path = scene.settings.directory / "i1.in"
    with wire.listen(input_path) as front:
        node = scene.cluster.node_of(2)
        with wire.connect(node.directory / "i1.in", MemoryWorkerError, 5.0) as sock:
            sock.sendall(b"up")
            inner, _ = front.accept()
            with inner:
                inner.sendall(b"down")
                assert inner.recv(10) == b"up"
                assert sock.recv(10) == b"down"
    assert {p.name for p in node.directory.iterdir()} >= {"tokenizer.sock", "detokenizer.sock"}
    assert not (scene.cluster.node_of(0).directory / "i1.in").exists()  # rank 0 alone needs it


def test_an_instance_has_ended_when_one_supervisor_has(scene: Scene) -> None:
    process = scene.start("i1", 0, 2)
    assert process.poll() is None
    pids = [member.pid for member in process._members]
    stop_process(pids[1])
    wait_until(process.is_stopped)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: process.poll() == -signal.SIGKILL)
    assert Path(f"/proc/{pids[0]}").exists()
    process.kill_group()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert process.wait(1.0) == -signal.SIGKILL


def test_priorities_are_harmless(scene: Scene) -> None:
    process = scene.start("i1", 0, 2)
    with giving_way(process, "when_idle", 5.0), giving_way(process, "background"):
        process.give_way("foreground")
    assert not is_stopped(process.pid)
    process.terminate()
    assert process.wait(5.0) == -signal.SIGTERM
    process.kill()


def test_beats_come_to_the_fronts_table(scene: Scene) -> None:
    scene.start("i1", 0, 2)
    there = HeartbeatTable.open(scene.cluster.node_of(2).directory / "i1.beats")
    there.slot(rank_slot(1)).beat()
    here = HeartbeatTable.open(scene.settings.directory / "i1.beats")
    wait_until(lambda: here.read(rank_slot(1)) is not None)
    beat = here.read(rank_slot(1))
    assert (beat.pid, beat.age_s(time.monotonic_ns()) < 2.0) == (os.getpid(), True)
    assert here.read(rank_slot(0)) is None
    for heartbeats in (there, here):
        heartbeats.close()


def test_what_has_ended_leaves_nothing(scene: Scene) -> None:
    before = [files(each.directory) for each in (*scene.cluster.nodes, scene.settings)]
    process = scene.start("i1", 0, 2)
    process.kill_group()
    supervise.clean(scene.settings, "i1")
    supervise.clean(scene.settings, "i1")
    assert [files(each.directory) for each in (*scene.cluster.nodes, scene.settings)] == before
    time.sleep(0.3)  # a look at the nodes brings no heartbeats back
    assert files(scene.settings.directory) == before[2]


def test_a_node_that_is_lost_while_an_instance_starts(scene: Scene) -> None:
    scene.agents[1].is_lost = True
    with pytest.raises(EngineFailedError, match="node 1 is lost"):
        scene.start("i1", 0, 2)
    wait_until(lambda: scene.agents[0].agent.states()[0] != {})
    ended = [status for status, _ in scene.agents[0].agent.states()[0].values()]
    assert ended == [-signal.SIGKILL]
    assert not (scene.settings.directory / "i1.beats").exists()


def test_a_node_that_is_lost_takes_its_supervisors_along(scene: Scene) -> None:
    process = scene.start("i1", 0, 2)
    scene.agents[1].is_lost = True
    wait_until(lambda: process.poll() is not None)
    process.kill_group()
    supervise.clean(scene.settings, "i1")


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_no_private_key_goes_through_ray(scene: Scene) -> None:
    """What is carried there cannot be used to come in: there is no key for the certificates."""
    scene.start("i1", 0, 2)
    for each in scene.agents:
        private = each.agent._key._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()
        carried = repr(each.said)
        assert carried.count("BEGIN CERTIFICATE") == 2  # its own, and the authority's
        assert carried.count("BEGIN PUBLIC KEY") == 1
        assert "PRIVATE KEY" not in carried
        assert not [line for line in private.splitlines()[1:-1] if line in carried]
        assert str(each.agent._key._key.private_numbers().private_value) not in carried


def test_a_node_without_a_certificate_is_refused_by_name() -> None:
    authority = Authority()
    with closing_agent() as old:
        old.is_old = True
        with pytest.raises(NodeLostError, match=r"node 7 has no certificate, so it is refused"):
            Node("node 7", HOST, old, authority)
        with pytest.raises(ElasticConfigError, match=r"127\.0\.0\.1 has no certificate"):
            old.agent.lead("device-0.sock", HOST, 1)
    with closing_agent() as twice:
        Node("node 7", HOST, twice, authority)
        with pytest.raises(NodeLostError, match=r"node 7 has no certificate.* joined a server"):
            Node("node 7", HOST, twice, authority)


@contextmanager
def closing_agent() -> Iterator[Direct]:
    agent = Direct(NodeAgent(HOST))
    try:
        yield agent
    finally:
        agent.end()
