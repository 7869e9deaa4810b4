"""A live server goes to targets that nobody predicted: none is parked, all are copies of a spare.

One server without standbys. What is right is what it answers before its first scale.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import requests

from bench.elasticmoe.load import Ask, Stream, differences, make_asks, scale, steady
from sgl_esft import zoo
from tests.support.processes import assert_gone, command_line, family
from tests.support.servers import Server, ServerSpec
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.alone]

DEVICES = ("--max-devices", "4", "--device-memory", "64MiB", "--standby-ranks", "0")
# Sizes up and down, subsets that no planner would choose, victims by name.
TARGETS: tuple[Mapping[str, Any], ...] = (
    {"dp_size": 4},
    {"dp_size": 2, "device_ids": [1, 3]},
    {"dp_size": 1, "leave": [1]},
    {"dp_size": 3, "device_ids": [0, 2, 3]},
)
HELD_S = 0.5
QUICKER = 3  # than the server's start, which is longer than that of one instance


@dataclass(frozen=True)
class Started:
    """A server, how long its start took, and what it answers."""

    server: Server
    start_s: float
    expected: Mapping[Ask, tuple[int, ...]]

    def listed(self) -> dict[str, Any]:
        found: dict[str, Any] = requests.get(f"{self.server.url}/v1/instances", timeout=30).json()
        return found

    def spare(self) -> dict[str, Any]:
        (spare,) = self.listed()["spares"]
        return dict(spare)

    def serving(self) -> psutil.Process:
        """The supervisor of the instance that serves."""
        return psutil.Process(self.listed()["instances"][0]["pid"])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    adapters = tuple(zoo.adapter_paths().items())[:2]
    began = time.monotonic()
    spec = ServerSpec(zoo.base_path(), adapters, ("--elastic", *DEVICES))
    server = Server(spec, tmp_path_factory.mktemp("spares") / "log")
    try:
        server.wait_until_ready()
        start_s = time.monotonic() - began
        asks = make_asks([name for name, _ in adapters], 24, range(8, 25))
        streams = asyncio.run(steady(server.url, asks, 4))
        yield Started(server, start_s, {each.ask: each.output_ids for each in streams})
    finally:
        pids = family(server.process.pid)
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(60)
        server.stop()
        assert_gone(pids)


async def scale_under_load(
    started: Started, target: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Stream]]:
    stop = asyncio.Event()
    load = asyncio.create_task(steady(started.server.url, list(started.expected), 3, stop))
    await asyncio.sleep(0.5)
    operation = await scale(started.server.url, target)
    await asyncio.sleep(0.5)
    stop.set()
    return operation, await load


def check(started: Started, target: Mapping[str, Any]) -> float:
    """Scale under load; seconds until the new instance served."""
    operation, streams = asyncio.run(scale_under_load(started, target))
    assert operation["state"] == "succeeded", operation
    placement = started.listed()["serving"]["placement"]
    assert len(placement["device_ids"]) == target["dp_size"]
    assert set(target.get("device_ids", placement["device_ids"])) == set(placement["device_ids"])
    assert not set(target.get("leave", ())) & set(placement["device_ids"])
    assert not [stream.error for stream in streams if stream.error]
    assert not differences(streams, started.expected)
    assert operation["gap_s"] < HELD_S
    names = [phase["name"] for phase in operation["phases"]]
    until_it_served = operation["phases"][: names.index("switch") + 1]
    return sum(float(phase["seconds"]) for phase in until_it_served)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_target_starts_from_a_spare(started: Started, target: Mapping[str, Any]) -> None:
    spare = started.spare()
    assert spare["state"] == "ready"
    assert 0 < spare["pss_bytes"] < spare["rss_bytes"]
    seconds = check(started, target)
    assert started.serving().ppid() == spare["pid"], "the same one, it is not used up"
    title = " ".join(command_line(started.serving().pid))
    assert "sgl_elastic.instance.process" in title
    print(f"{target}: {seconds:.2f} s, start {started.start_s:.2f} s")  # noqa: T201
    assert seconds * QUICKER < started.start_s


@pytest.mark.full
def test_a_spare_that_is_killed_harms_nothing_and_is_replaced(started: Started) -> None:
    former = started.spare()
    num_devices = len(started.listed()["serving"]["placement"]["device_ids"])
    other, then = (2, 1) if num_devices == 1 else (1, 2)
    os.kill(former["pid"], signal.SIGKILL)
    check(started, {"dp_size": other})
    wait_until(lambda: [s for s in started.listed()["spares"] if s["state"] == "ready"], 120.0)
    check(started, {"dp_size": then})
    assert started.serving().ppid() == started.spare()["pid"] != former["pid"]
