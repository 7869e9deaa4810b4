"""Three devices on two nodes of a Ray cluster: two on the first, one on the second.

SGLang's own form of several nodes could not have that. A local cluster of Ray, on one machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.elasticmoe.load import make_asks, steady
from sgl_esft import zoo
from tests.server.test_elastic import assert_all_equal, scale_under_load, wait_for_standbys
from tests.support.ray_cluster import ray_cluster
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.soak]

NAMES = tuple(zoo.adapter_paths())[:2]


def test_every_size_on_uneven_nodes(server_pool: ServerPool, tmp_path: Path) -> None:
    asks = make_asks(NAMES, 24, range(8, 25))
    static = asyncio.run(steady(server_pool.get(ServerSpec()).url, asks, 8))
    expected = {stream.ask: stream.output_ids for stream in static}
    server_pool.stop_all()
    args = ("--elastic", "--nodes", "ray", "--max-devices", "3", "--devices-per-node", "2")
    args += ("--standby-ranks", "6", "--device-memory", "64MiB", "--verify-copies")
    adapters = tuple((name, zoo.adapter_paths()[name]) for name in NAMES)
    with ray_cluster(2) as address:
        args += ("--ray-address", address)
        server = Server(ServerSpec(zoo.base_path(), adapters, args), tmp_path / "log")
        try:
            server.wait_until_ready()
            wait_for_standbys(server, {2, 3})
            sizes = [2, 3, 2, 3, 1]
            walk = asyncio.run(scale_under_load(server, asks, sizes, 100, reads_loads=False))
            assert [each["state"] for each in walk.operations] == ["succeeded"] * 5, walk.operations
            assert_all_equal(walk.streams, expected)
            dry = server.post("/v1/scale", {"dp_size": 3, "dry_run": True}).json()
            nodes = {each["device_id"]: each["node"][:6] for each in dry["devices"]}
            assert nodes == {0: "node 0", 1: "node 0", 2: "node 1"}
        finally:
            server.stop()
