"""Memory, file descriptors and threads of a server's processes, and its expert pages, over time.

url -> the launcher's process and all below it --[Watch], a sample every PERIOD_S--> Sample
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psutil

PERIOD_S = 2.0


@dataclass(frozen=True)
class Process:
    """What one process holds."""

    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Sample:
    """All processes by id, and the bytes behind the experts."""

    time_s: float
    processes: dict[int, Process]
    mapped_bytes: int

    def total(self, quantity: str) -> int:
        """Of all processes: rss_bytes, num_fds, num_threads; or mapped_bytes."""
        if quantity == "mapped_bytes":
            return self.mapped_bytes
        return sum(getattr(process, quantity) for process in self.processes.values())


QUANTITIES = ("rss_bytes", "num_fds", "num_threads", "mapped_bytes")


class Sampler:
    """Calls `sample` in a thread, every so often, for as long as its context is open."""

    def __init__(self, period_s: float, name: str) -> None:
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.sample()

    def sample(self) -> None:
        """Of the subclass."""
        raise NotImplementedError


class Watch(Sampler):
    """What a server's processes hold."""

    def __init__(self, url: str, period_s: float = PERIOD_S) -> None:
        super().__init__(period_s, "watch")
        self.samples: list[Sample] = []
        self._url = url
        self._launcher: psutil.Process | None = None

    def sample(self) -> None:
        self._launcher = self._launcher or launcher_of(self._url)
        processes = [self._launcher, *self._launcher.children(recursive=True)]
        held = {each.pid: _process(each) for each in processes if each.is_running()}
        self.samples.append(Sample(time.monotonic(), held, mapped_bytes(self._url)))


def launcher_of(url: str) -> psutil.Process:
    """The process whose command line names the port. Raises ValueError where there is none."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        line: Sequence[str] = process.info["cmdline"] or ()
        if "sgl_esft.launch_server" in line and port in line:
            return process
    raise ValueError(f"no process of this machine serves {url}")


def cpu_seconds(url: str) -> float:
    """Processor time of the launcher's process and all below it so far."""
    launcher = launcher_of(url)
    total = 0.0
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _process(process: psutil.Process) -> Process:
    with process.oneshot():
        rss_bytes = process.memory_info().rss
        return Process(rss_bytes, process.num_fds(), process.num_threads())


def mapped_bytes(url: str) -> int:
    """Memory behind the experts of all devices, as the server counts it."""
    with urllib.request.urlopen(f"{url}/v1/memory", timeout=30) as response:
        report: Any = json.load(response)
    return sum(layer["mapped_bytes"] for device in report["devices"] for layer in device["layers"])
