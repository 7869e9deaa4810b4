"""Processes of a live elastic server are killed and stopped under load; no stream notices.

One server for the whole file, and one steady load for each fault. What is right is what the same
server answered before the first fault. The tests depend on their order: each leaves the server as
the next one needs it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.elastic_load import Ask, Stream, differences, make_asks, scale, steady
from sgl_esft import zoo
from tests.servers import Server, ServerSpec

pytestmark = pytest.mark.server

HANG_S = 5.0
SOON_S = 5.0  # a standby takes over in about half a second; the machine may be busy
STANDBY_S = 240.0
ARGS = ("--elastic", "--max-devices", "2", "--standby-ranks", "4", "--device-memory", "64MiB")

Expected = Mapping[Ask, tuple[int, ...]]


class Elastic:
    """The server, what it should answer, and its processes."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.asks = make_asks(list(zoo.adapter_paths()), 24, range(16, 48))
        self.expected: Expected = {}

    def learn(self) -> None:
        streams = asyncio.run(steady(self.server.url, self.asks, 6))
        assert not [stream.error for stream in streams if stream.error]
        self.expected = {stream.ask: stream.output_ids for stream in streams}

    def instances(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """The one that serves, and all by their names."""
        found = requests.get(f"{self.server.url}/v1/instances", timeout=30).json()
        return found["serving"]["instance_id"], {i["instance_id"]: i for i in found["instances"]}

    def parked(self, *device_ids: int) -> str | None:
        _, all_ = self.instances()
        names = [
            name
            for name, each in all_.items()
            if each["state"] == "parked" and each["device_ids"] == list(device_ids)
        ]
        return names[0] if names else None

    def wait_for_standby(self, *device_ids: int) -> str:
        return str(self.wait_for(lambda: self.parked(*device_ids), STANDBY_S))

    def wait_for(self, find: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = find()
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"not in {timeout_s:g} s: {self.instances()}\n{self.server.log()}")

    def wait_for_end(self, pids: set[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < deadline, f"{left} outlive the front"
            time.sleep(0.05)

    def wait_for_another(self, former: str, timeout_s: float) -> float:
        """Seconds until another instance serves than `former`."""
        began = time.monotonic()
        self.wait_for(lambda: self.instances()[0] != former, timeout_s)
        return time.monotonic() - began

    def supervisor(self, name: str) -> int:
        return int(self.instances()[1][name]["pid"])

    def rank(self, name: str, number: int = 0) -> int:
        ranks = [pid for pid in children(self.supervisor(name)) if "schedul" in comm(pid)]
        return sorted(ranks)[number]

    def worker(self, device_id: int) -> int | None:
        """The process of a device's memory worker."""
        for pid in children(self.server.process.pid):
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if "sgl_elastic.memory.worker" in line and f"--device-id {device_id} " in line:
                return pid
        return None

    def scaled(self, size: int) -> dict[str, Any]:
        return asyncio.run(scale(self.server.url, {"dp_size": size}))

    @contextmanager
    def load(self) -> Iterator[None]:
        """Requests all the time; at the end each must have got its answer, and the right one."""
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        streams: list[Stream] = []

        def run() -> None:
            streams.extend(loop.run_until_complete(steady(self.server.url, self.asks, 4, stop)))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            time.sleep(1.0)
            yield
            time.sleep(1.0)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
        assert [stream.error for stream in streams if stream.error] == []
        assert differences(streams, self.expected) == []
        assert len(streams) >= 4


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def children(pid: int) -> list[int]:
    """Those of all its threads: standbys are started from one that is not the first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    folder = tmp_path_factory.mktemp("faults")
    server = Server(ServerSpec(args=(*ARGS, "--hang-timeout", str(HANG_S))), folder / "log")
    try:
        server.wait_until_ready()
        elastic = Elastic(server)
        elastic.learn()
        yield elastic
    finally:
        server.stop()


def test_a_rank_is_killed(elastic: Elastic) -> None:
    elastic.wait_for_standby(0)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.rank(name), signal.SIGKILL)
        assert elastic.wait_for_another(name, SOON_S) < SOON_S
    assert name not in elastic.instances()[1]


def test_a_memory_worker_dies_during_a_scale(elastic: Elastic) -> None:
    """It is rolled back, and the next one succeeds on a new worker."""
    before = set(elastic.instances()[1])
    source = elastic.worker(0)
    assert source is not None
    os.kill(source, signal.SIGSTOP)  # so that copies from there are in progress
    try:
        began = elastic.server.post("/v1/scale", {"dp_size": 2}).json()
        target = elastic.wait_for(lambda: elastic.worker(1), 20)
        os.kill(target, signal.SIGKILL)
    finally:
        os.kill(source, signal.SIGCONT)
    operation = elastic.wait_for(lambda: ended(elastic, began["id"]), 60)
    assert operation["state"] == "rolled_back"
    assert operation["error"]["type"] == "MemoryWorkerError"
    assert operation["undo_errors"] == []
    assert elastic.worker(1) is None
    assert before <= set(elastic.instances()[1])
    with elastic.load():
        pass


def ended(elastic: Elastic, operation_id: str) -> dict[str, Any] | None:
    url = f"{elastic.server.url}/v1/scale/{operation_id}"
    operation: dict[str, Any] = requests.get(url, timeout=30).json()
    return None if operation["state"] in ("pending", "running") else operation


def test_a_supervisor_is_killed(elastic: Elastic) -> None:
    elastic.wait_for_standby(0)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.supervisor(name), signal.SIGKILL)
        assert elastic.wait_for_another(name, SOON_S) < SOON_S


def test_a_standby_hangs_when_it_is_needed(elastic: Elastic) -> None:
    """Another one is started, and the scale succeeds."""
    standby = elastic.wait_for_standby(0, 1)
    with elastic.load():
        os.kill(elastic.rank(standby, 1), signal.SIGSTOP)
        operation = elastic.scaled(2)
    assert operation["state"] == "succeeded", operation
    assert standby not in elastic.instances()[1]


def test_one_of_two_ranks_is_stopped(elastic: Elastic) -> None:
    elastic.wait_for_standby(0, 1)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.rank(name, 1), signal.SIGSTOP)
        assert elastic.wait_for_another(name, HANG_S * 2 + SOON_S) > HANG_S / 2
    assert name not in elastic.instances()[1]


def test_the_old_instance_hangs_during_a_scale(elastic: Elastic) -> None:
    """It cannot freeze; the scale goes on to the new one, with the tokens that came by."""
    if len(elastic.instances()[1][elastic.instances()[0]]["device_ids"]) > 1:
        assert elastic.scaled(1)["state"] == "succeeded"
    elastic.wait_for_standby(0, 1)
    name, _ = elastic.instances()
    before = recoveries(elastic)
    with elastic.load():
        os.kill(elastic.rank(name, 0), signal.SIGSTOP)
        operation = elastic.scaled(2)
    assert operation["state"] == "succeeded", operation
    assert elastic.instances()[0] != name
    assert recoveries(elastic) == before, "the scale did it"


def recoveries(elastic: Elastic) -> list[str]:
    found = requests.get(f"{elastic.server.url}/v1/scale", timeout=30).json()["operations"]
    return [each["id"] for each in found if each["id"].startswith("recovery-")]


@pytest.mark.soak
def test_any_process_at_any_moment_of_a_scale(elastic: Elastic) -> None:
    """Seeded: who, which signal, when. No stream breaks, and the server scales afterwards."""
    rng = random.Random(7)
    for round_ in range(12):
        size = len(elastic.instances()[1][elastic.instances()[0]]["device_ids"])
        target = 3 - size
        elastic.wait_for_standby(*range(target))
        elastic.wait_for_standby(*range(size))
        who, sig = rng.choice(["rank", "supervisor", "standby"]), rng.choice(["KILL", "STOP"])
        delay_s = rng.uniform(0, 0.8)
        with elastic.load():
            name = elastic.instances()[0]
            if who == "standby":
                name = elastic.wait_for_standby(*range(target))
            pid = elastic.supervisor(name) if who == "supervisor" else elastic.rank(name)
            timer = threading.Timer(delay_s, kill, (pid, getattr(signal, f"SIG{sig}")))
            timer.start()
            operation = elastic.scaled(target)
            timer.join()
        assert operation["state"] in ("succeeded", "rolled_back", "degraded"), (round_, operation)
        elastic.wait_for(lambda: is_idle(elastic), 120)


def kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the scale may have been faster, and ended it
        os.kill(pid, number)


def is_idle(elastic: Elastic) -> bool:
    body = requests.get(f"{elastic.server.url}/v1/scale", timeout=30).json()
    name, all_ = elastic.instances()
    return body["running"] is None and all_[name]["state"] == "active"


def test_nothing_outlives_the_front(elastic: Elastic) -> None:
    """The last of all: afterwards there is no server."""
    pids = descendants(elastic.server.process.pid)
    assert len(pids) > 6
    elastic.server.process.kill()
    elastic.server.process.wait()
    elastic.wait_for_end(pids, 10)


def descendants(pid: int) -> set[int]:
    found = {pid}
    for child in children(pid):
        found |= descendants(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
