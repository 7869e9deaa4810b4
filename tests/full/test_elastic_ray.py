"""An elastic server whose devices are on the nodes of a Ray cluster: two nodes, one device each.

A local cluster of Ray: real agents, tunnels and engines, on one machine and one clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from bench.elasticmoe.load import Ask, Stream, make_asks, scale, steady
from sgl_esft import zoo
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot
from tests.server.test_elastic import (
    assert_all_equal,
    scale_under_load,
    wait_for_standbys,
)
from tests.support.processes import assert_gone, command_line, family
from tests.support.ray_cluster import ray_cluster
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone]

ADAPTERS = tuple(zoo.adapter_paths())[:2]
Expected = Mapping[Ask, tuple[int, ...]]


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return make_asks(ADAPTERS, 24, range(8, 25))


@pytest.fixture(scope="module")
def expected(server_pool: ServerPool, asks: list[Ask]) -> Expected:
    static = server_pool.get(ServerSpec())
    streams = asyncio.run(steady(static.url, asks, 8))
    assert not [stream.error for stream in streams if stream.error]
    found = {stream.ask: stream.output_ids for stream in streams}
    server_pool.stop_all()
    return found


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, expected: Expected) -> Iterator[Server]:
    adapters = tuple((name, zoo.adapter_paths()[name]) for name in ADAPTERS)
    with ray_cluster(2) as address:
        args = ("--elastic", "--nodes", "ray", "--ray-address", address, "--max-devices", "2")
        args += ("--dp-size", "1", "--standby-ranks", "3", "--device-memory", "64MiB")
        spec = ServerSpec(zoo.base_path(), adapters, args)
        server = Server(spec, tmp_path_factory.mktemp("spread") / "log")
        try:
            server.wait_until_ready()
            yield server
        finally:
            pids = family(server.process.pid) | of_nodes()
            server.stop()  # the front is killed: what runs on nodes is Ray's to end
            assert_gone(pids)


def test_answers_are_a_static_servers_on_one_node_and_on_two(
    spread: Server, asks: list[Ask], expected: Expected
) -> None:
    assert_all_equal(asyncio.run(steady(spread.url, asks[:6], 3)), expected)
    wait_for_standbys(spread, {2})
    sizes = [2, 1, 2, 1]
    walk = asyncio.run(scale_under_load(spread, asks, sizes, 100, reads_loads=False))
    assert [operation["state"] for operation in walk.operations] == ["succeeded"] * 4, (
        walk.operations
    )
    assert_all_equal(walk.streams, expected)
    gaps = [seconds for stream in walk.streams for _, seconds in stream.gaps_s]
    assert max(gaps) < 10, "a stream stood still"


def test_ranks_beat_on_their_nodes_and_the_front_is_ready(spread: Server) -> None:
    assert asyncio.run(scale(spread.url, {"dp_size": 2}))["state"] == "succeeded"
    answer = requests.get(f"{spread.url}/readyz", timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = requests.get(f"{spread.url}/v1/instances", timeout=30).json()
    assert found["serving"]["placement"]["device_ids"] == [0, 1]


def test_a_rank_that_dies_on_another_node_is_replaced(
    spread: Server, asks: list[Ask], expected: Expected
) -> None:
    """At two devices: its connection to the front ends through the tunnel, and all of it ends."""
    assert asyncio.run(scale(spread.url, {"dp_size": 2}))["state"] == "succeeded"
    streams, lost = asyncio.run(kill_amid(spread, asks))
    assert_all_equal(streams, expected)
    assert serving(spread) not in ("", lost)
    assert asyncio.run(scale(spread.url, {"dp_size": 1}))["state"] == "succeeded"
    assert_all_equal(asyncio.run(steady(spread.url, asks[:6], 3)), expected)


def test_a_lost_node_that_does_not_serve_is_missed_only_by_scales(
    spread: Server, asks: list[Ask], expected: Expected
) -> None:
    """What is lost stays lost, also for the test below."""
    assert asyncio.run(scale(spread.url, {"dp_size": 1}))["state"] == "succeeded"
    here = ancestors(rank_pid(serving(spread), 0))
    [agent] = [pid for pid in agents() if pid not in here]
    os.kill(agent, signal.SIGKILL)
    operation = asyncio.run(scale(spread.url, {"dp_size": 2}))
    assert operation["state"] == "rolled_back", operation
    assert "node 1" in operation["error"]["message"]
    assert_all_equal(asyncio.run(steady(spread.url, asks[:6], 3)), expected)
    assert requests.get(f"{spread.url}/readyz", timeout=30).status_code == 200


def test_a_lost_node_that_serves_ends_the_server(spread: Server) -> None:
    """Better no server than one that never answers."""
    here = ancestors(rank_pid(serving(spread), 0))
    [agent] = [pid for pid in agents() if pid in here]
    os.kill(agent, signal.SIGKILL)
    assert spread.process.wait(90) != 0


def agents() -> list[int]:
    """Ray names a process after its actor, and after the method that runs."""
    known = {pid: "".join(command_line(pid)[:1]) for pid in family(os.getpid())}
    return [pid for pid, name in known.items() if name.startswith("ray::NodeAgent")]


def ancestors(pid: int) -> set[int]:
    return {pid, *(parent.pid for parent in psutil.Process(pid).parents())}


async def kill_amid(server: Server, asks: list[Ask]) -> tuple[list[Stream], str]:
    """Rank 1 is killed while streams run; who served then."""
    load = asyncio.create_task(steady(server.url, asks, 6))
    await asyncio.sleep(0.5)
    lost = serving(server)
    os.kill(rank_pid(lost, 1), signal.SIGKILL)
    return await load, lost


def rank_pid(instance: str, rank: int) -> int:
    """A rank's process id, as it writes it on the heartbeats of its node; no other server's."""
    own = family(os.getpid())
    for path in Path(tempfile.gettempdir()).glob(f"sgl-elastic-*/{instance}.beats"):
        with contextlib.closing(HeartbeatTable.open(path)) as heartbeats:
            beat = heartbeats.read(rank_slot(rank))
        if beat is not None and beat.pid in own:
            return beat.pid
    raise AssertionError(f"rank {rank} of {instance} does not beat")


def of_nodes() -> set[int]:
    """Memory workers and supervisors, which are no children of the front."""
    modules = {"sgl_elastic.memory.worker", "sgl_elastic.instance.process"}
    return {pid for pid in family(os.getpid()) if modules & set(command_line(pid))}


def serving(server: Server) -> str:
    found = requests.get(f"{server.url}/v1/instances", timeout=30).json()
    return str(found["serving"]["instance_id"])
