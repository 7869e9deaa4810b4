"""A live elastic server whose processes are killed and stopped, and what tests ask of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import requests

from bench.elasticmoe.load import Ask, Stream, differences, make_asks, scale, steady
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.messages import ExpertSlots, Usage
from sgl_esft import zoo
from tests.support.processes import command_line
from tests.support.servers import Server, ServerSpec

HANG_S = 5.0
SOON_S = 5.0  # a standby takes over in about half a second; the machine may be busy
STANDBY_S = 240.0
ARGS = ("--elastic", "--max-devices", "2", "--standby-ranks", "4", "--device-memory", "64MiB")
SPEC = ServerSpec(args=(*ARGS, "--hang-timeout", str(HANG_S)))

CHANGED = "sum"  # the adapter that is unloaded and loaded again

Expected = Mapping[Ask, tuple[int, ...]]


class Elastic:
    """The server, what it should answer, and its processes."""

    def __init__(self, log_path: Path, spec: ServerSpec = SPEC) -> None:
        self.server = _started(spec, log_path)
        self.asks = make_asks(list(zoo.adapter_paths()), 24, range(16, 48))
        self.expected: Expected = {}

    def is_ready(self) -> bool:
        return requests.get(f"{self.server.url}/readyz", timeout=30).status_code == 200

    def placement(self) -> dict[str, Any]:
        """That of the instance that serves."""
        found = requests.get(f"{self.server.url}/v1/instances", timeout=30).json()
        placement: dict[str, Any] = found["serving"]["placement"]
        return placement

    def size(self) -> int:
        return len(self.placement()["device_ids"])

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

    def wait_for_another(self, former: str, timeout_s: float) -> float:
        """Seconds until another instance serves than `former`."""
        began = time.monotonic()
        self.wait_for(lambda: self.instances()[0] != former, timeout_s)
        return time.monotonic() - began

    def supervisor(self, name: str) -> int:
        return int(self.instances()[1][name]["pid"])

    def rank(self, name: str, number: int = 0) -> int:
        below = psutil.Process(self.supervisor(name)).children()
        return sorted(each.pid for each in below if "schedul" in each.name())[number]

    def worker(self, device_id: int) -> int | None:
        """The process of a device's memory worker."""
        found = self.children_named("sgl_elastic.memory.worker", f"--device-id {device_id} ")
        return found[0] if found else None

    def expert_slots(self, device_id: int) -> ExpertSlots:
        """What the memory worker says has pages, and valid content."""
        with self._client(device_id) as client:
            return client.expert_slots()

    def mapped_slots(self) -> Counter[str]:
        """By kind of region, the slots that have pages, on all serving devices together."""
        total: Counter[str] = Counter()
        for usage in self.usages():
            total.update(usage.mapped_slots)
        return total

    def usages(self) -> list[Usage]:
        """What the memory workers of the serving devices say."""
        found = []
        for device_id in self.placement()["device_ids"]:
            with self._client(device_id) as client:
                found.append(client.usage())
        return found

    def num_kv_slots(self, device_id: int) -> int:
        """How many slots of all KV regions the memory worker says have pages."""
        with self._client(device_id) as client:
            return client.usage().mapped_slots["kv"]

    def _client(self, device_id: int) -> DeviceClient:
        worker = self.worker(device_id)
        assert worker is not None
        words = command_line(worker)
        return DeviceClient(Path(words[words.index("--socket") + 1]), timeout_s=10.0)

    def unload(self) -> requests.Response:
        return self.server.unload(CHANGED)

    def load_again(self) -> requests.Response:
        return self.server.load(CHANGED, zoo.adapter_paths()[CHANGED])

    def children_named(self, *words: str) -> list[int]:
        """The front's own children, those with all these words in their command lines."""
        below = [each.pid for each in psutil.Process(self.server.process.pid).children()]
        lines = {pid: " ".join(command_line(pid)) for pid in below}
        return [pid for pid, line in lines.items() if all(word in line for word in words)]

    def scaled(self, size: int) -> dict[str, Any]:
        return asyncio.run(scale(self.server.url, {"dp_size": size}))

    def be_of_size(self, size: int) -> None:
        """Scale there unless it is: what the test before left does not matter."""
        if self.size() != size:
            assert self.scaled(size)["state"] == "succeeded"

    @contextmanager
    def load(self) -> Iterator[list[Stream]]:
        """Requests all the time; at the end each must have got its answer, and the right one.

        The list has them then.
        """
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        streams: list[Stream] = []

        def run() -> None:
            streams.extend(loop.run_until_complete(steady(self.server.url, self.asks, 4, stop)))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            time.sleep(1.0)
            yield streams
            time.sleep(1.0)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
        assert [stream.error for stream in streams if stream.error] == []
        assert differences(streams, self.expected) == []
        assert len(streams) >= 4


def _started(spec: ServerSpec, log_path: Path) -> Server:
    server = Server(spec, log_path)
    try:
        server.wait_until_ready()
    except RuntimeError:
        server.stop()
        raise
    return server


def ended(elastic: Elastic, operation_id: str) -> dict[str, Any] | None:
    url = f"{elastic.server.url}/v1/scale/{operation_id}"
    operation: dict[str, Any] = requests.get(url, timeout=30).json()
    return None if operation["state"] in ("pending", "running") else operation


def recoveries(elastic: Elastic) -> list[str]:
    found = requests.get(f"{elastic.server.url}/v1/scale", timeout=30).json()["operations"]
    return [each["id"] for each in found if each["id"].startswith("recovery-")]


def kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # the scale may have been faster, and ended it
        os.kill(pid, number)


def is_idle(elastic: Elastic) -> bool:
    body = requests.get(f"{elastic.server.url}/v1/scale", timeout=30).json()
    name, all_ = elastic.instances()
    return body["running"] is None and all_[name]["state"] == "active"
