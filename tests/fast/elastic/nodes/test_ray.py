"""Memory workers on the three nodes of a real Ray cluster, and what happens when a node is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_elastic import processes
from sgl_elastic.coordinator.planning import Planner
from sgl_elastic.coordinator.steps import ENGINE_STEPS
from sgl_elastic.errors import (
    ElasticConfigError,
    MemoryLostError,
    MemoryWorkerError,
    NodeLostError,
    PeerCopyError,
)
from sgl_elastic.memory.control import Hmm
from sgl_elastic.memory.slots import expert_slots, trunk_slots
from sgl_elastic.nodes import ray_agents, remote
from sgl_elastic.nodes.cluster import Cluster
from sgl_elastic.nodes.ray_agents import Place, choose
from sgl_elastic.plan.placement import place
from sgl_elastic.processes import giving_way
from sgl_elastic.types import Placement, Plan, ScaleRequest, Step, StepKind
from tests.fast.elastic.memory_workers import (
    ADAPTERS,
    BUDGET,
    PAGE,
    SHAPE,
    digests,
    expected_digests,
    fill,
)
from tests.support.processes import stop_process
from tests.support.ray_cluster import ray_cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KV_LIMIT, MIN_KV = 40, 20


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster(3) as found:
        yield found


@pytest.fixture
def cluster(address: str, tmp_path: Path) -> Iterator[Cluster]:
    found = ray_agents.start(tmp_path / "front", address=address, num_devices=3, devices_per_node=1)
    yield found
    found.close()


@pytest.fixture
def hmm(cluster: Cluster, tmp_path: Path) -> Iterator[Hmm]:
    """Device 0 of the three has everything."""
    hmm = Hmm(
        tmp_path / "front",
        dict.fromkeys(range(3), BUDGET),
        page_bytes=PAGE,
        timeout_s=10.0,
        copy_timeout_s=20.0,
        verify_copies=True,
        launcher=cluster,
    )
    hmm.define(SHAPE)
    hmm.set_adapters(ADAPTERS)
    hmm.map_placement(first_placement())
    fill(hmm, 0, content(range(8)))
    yield hmm
    hmm.close()


def first_placement() -> Placement:
    budgets = {0: BUDGET // PAGE}
    return place(SHAPE, (0,), None, budgets, ADAPTERS, KV_LIMIT, min_kv_tokens=MIN_KV)


def content(experts: object) -> dict[str, object]:
    return {**trunk_slots(SHAPE), **expert_slots(SHAPE, ADAPTERS, experts)}


def carry_out(hmm: Hmm, plan: Plan) -> None:
    """All steps; what a rank would do to its KV is done on the worker."""
    for step in (*plan.before, *plan.after):
        if step.kind in ENGINE_STEPS:
            kv = {"kv.0": [(0, step.num_tokens + 1)], "kv.1": [(0, step.num_tokens + 1)]}
            rest = {name: [(step.num_tokens + 1, 100 - step.num_tokens)] for name in kv}
            hmm.client(step.device_id).map_slots(kv)
            hmm.client(step.device_id).unmap_slots(rest)
        else:
            hmm.execute(step)
    hmm.commit()


def test_scales_by_the_real_planner_from_one_node_to_three_and_back(
    hmm: Hmm, cluster: Cluster
) -> None:
    planner = Planner(hmm, 3, KV_LIMIT, MIN_KV, node_of=hmm.node_name)
    serving = first_placement()
    for size in (2, 3, 1):
        plan = planner.make_plan(ScaleRequest(size), serving)
        described = {d["device_id"]: d["node"] for d in planner.describe(plan)["devices"]}
        assert all(node.startswith(f"node {d} ") for d, node in described.items())
        carry_out(hmm, plan)
        serving = plan.new
        assert hmm.device_ids() == serving.device_ids == tuple(range(size))
        for device_id in serving.device_ids:
            wanted = content(serving.experts_of(device_id))
            assert digests(hmm, device_id, wanted) == expected_digests(wanted)
    assert cluster.are_apart(0, 2)
    assert len({node.directory for node in cluster.nodes}) == 3


def test_a_killed_worker_is_a_named_error_and_can_be_replaced(hmm: Hmm) -> None:
    hmm.execute(Step(StepKind.ADD_DEVICE, 1))
    os.kill(hmm.client(1).info.pid, signal.SIGKILL)
    wait_until(lambda: hmm.dead_workers() == (1,), 3.0)
    with pytest.raises(MemoryWorkerError, match="device 1 ended with -9"):
        hmm.client(1)
    with pytest.raises(MemoryLostError, match=r"\[1\]"):
        hmm.require((0, 1))
    hmm.require((0,))
    hmm.execute(Step(StepKind.ADD_DEVICE, 1))
    hmm.execute(Step(StepKind.MAP_TRUNK, 1))
    hmm.execute(Step(StepKind.COPY_TRUNK, 1, source_id=0))
    assert digests(hmm, 1, {"trunk": [(0, 1)]}) == expected_digests({"trunk": [(0, 1)]})


def test_a_killed_agent_is_a_named_error(hmm: Hmm, cluster: Cluster) -> None:
    hmm.execute(Step(StepKind.ADD_DEVICE, 1))
    worker = hmm.client(1).info.pid
    began = time.monotonic()
    os.kill(parent_of(worker), signal.SIGKILL)
    with pytest.raises(MemoryWorkerError):
        hmm.client(1).define(SHAPE)
    wait_until(lambda: hmm.dead_workers() == (1,), 10.0)
    assert time.monotonic() - began < 10.0
    assert "node 1" in cluster.nodes[1].lost
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), 5.0)  # it ends with its agent
    with pytest.raises(MemoryLostError):
        hmm.require((0, 1))
    hmm.require((0,))
    with pytest.raises(MemoryWorkerError, match=r"node 1 .* is lost"):
        hmm.execute(Step(StepKind.ADD_DEVICE, 1))
    hmm.execute(Step(StepKind.ADD_DEVICE, 2))  # the others go on
    assert hmm.client(2).hello().device_id == 2


def test_an_agent_that_hangs_is_lost_in_time(
    hmm: Hmm, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 1.0)
    hmm.execute(Step(StepKind.ADD_DEVICE, 2))
    worker = hmm.client(2).info.pid
    stop_process(parent_of(worker))
    began = time.monotonic()
    wait_until(lambda: bool(cluster.nodes[2].lost), 25.0)
    with pytest.raises(NodeLostError, match="has not answered"):
        cluster.nodes[2].call("states")
    assert time.monotonic() - began < 25.0
    assert hmm.dead_workers() == (2,)
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), 60.0)  # Ray ends the agent


def test_a_copy_from_a_node_that_is_lost_meanwhile(hmm: Hmm) -> None:
    hmm.execute(Step(StepKind.ADD_DEVICE, 1))
    hmm.execute(Step(StepKind.MAP_TRUNK, 1))
    source = hmm.client(0).info.pid
    stop_process(source)
    threading.Timer(0.5, os.kill, (parent_of(source), signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises((PeerCopyError, MemoryWorkerError)):
        hmm.execute(Step(StepKind.COPY_TRUNK, 1, source_id=0))
    assert time.monotonic() - began < 10.0


def test_close_leaves_nothing_behind(address: str, tmp_path: Path) -> None:
    found = ray_agents.start(tmp_path / "front", address=address, num_devices=2, devices_per_node=2)
    assert len(found.nodes) == 1
    hmm = Hmm(tmp_path / "front", {0: BUDGET, 1: BUDGET}, page_bytes=PAGE, launcher=found)
    hmm.define(SHAPE)
    pids = []
    for device_id in (0, 1):
        hmm.execute(Step(StepKind.ADD_DEVICE, device_id))
        pids.append(hmm.client(device_id).info.pid)
    agent = parent_of(pids[0])
    assert not found.are_apart(0, 1)
    found.close()  # its workers, too, although nobody removed them
    found.close()
    hmm.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*pids, agent)), 10.0)
    assert [node.directory for node in found.nodes if node.directory.exists()] == []
    assert list((tmp_path / "front").iterdir()) == []


def test_a_remote_process_has_the_face_of_a_local_one(hmm: Hmm, cluster: Cluster) -> None:
    process = hmm._workers[0].process
    with giving_way(process, "background"), giving_way(process, "when_idle", 5.0):
        assert process.poll() is None
    stop_process(process.pid)
    wait_until(process.is_stopped, 3.0)
    process.kill()
    assert process.wait(5.0) == process.returncode == -signal.SIGKILL
    process.kill_group()
    process.terminate()
    assert not processes.is_stopped(process.pid)
    with pytest.raises(ElasticConfigError, match="device 7 is on no node"):
        cluster.node_of(7)


def test_too_few_nodes_and_no_cluster(address: str, tmp_path: Path) -> None:
    with pytest.raises(ElasticConfigError, match="--devices-per-node"):
        ray_agents.start(tmp_path, address=address, num_devices=9, devices_per_node=2)


def test_nodes_come_in_order_this_machine_first() -> None:
    places = [Place("c", "10.0.0.2"), Place("b", "10.0.0.1"), Place("a", "10.0.0.3")]
    assert [p.node_id for p in choose(places, "10.0.0.3", 3, 1)] == ["a", "b", "c"]
    assert [p.node_id for p in choose(places, "10.0.0.2", 2, 1)] == ["c", "b"]
    with pytest.raises(ElasticConfigError, match="3 nodes"):
        choose(places, "10.0.0.2", 4, 8)


def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ElasticConfigError, match=r"pip install sgl-esft\[ray\]"):
        ray_agents.start(tmp_path, address="", num_devices=1, devices_per_node=1)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
