"""Memory workers as their parent sees them: how one is started, and how it ends.

control.py --[start]--> `python -m sgl_elastic.memory.worker` --> Worker (process, two clients)
           --[end]--> SIGTERM, then SIGKILL

Where it runs is a launcher's to say: here, or on the device's node (nodes/cluster.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sgl_elastic.errors import ElasticError, MemoryWorkerError, NodeLostError
from sgl_elastic.memory.client import HANG_S, DeviceClient
from sgl_elastic.processes import LocalProcess, Process
from sgl_elastic.types import MemoryShape

_POLL_S = 0.02
_END_S = 2.0  # a worker that was told to end does so in milliseconds, or never


@dataclass(frozen=True)
class Worker:
    """A running worker. `watch` is a connection of its own: long copies do not keep it waiting."""

    process: Process
    client: DeviceClient
    watch: DeviceClient


@dataclass(frozen=True)
class WorkerOptions:
    """The same for all workers. `timeout_s` bounds calls, `start_timeout_s` a worker's start."""

    backend: str
    library: str
    page_bytes: int
    timeout_s: float
    start_timeout_s: float


class Launcher(Protocol):
    """Where the workers of devices run, and how their sockets are found."""

    def start(self, device_id: int, argv: Sequence[str]) -> Process:
        """A worker with these arguments. Raises OSError, NodeLostError."""

    def socket_path(self, device_id: int, seen_from: int | None = None) -> Path:
        """Its socket, as found on the node of the device `seen_from`; None: as found here."""

    def node_name(self, device_id: int) -> str:
        """For people; "" where there is only one."""

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two devices are on different nodes, so that no page goes between them."""

    def clean(self, device_id: int) -> None:
        """Remove what a killed worker leaves behind."""


@dataclass(frozen=True)
class Here:
    """All workers are children of this process, with sockets in one folder."""

    directory: Path

    def start(self, device_id: int, argv: Sequence[str]) -> Process:
        path = self.socket_path(device_id)
        path.unlink(missing_ok=True)  # of a worker that was killed
        return LocalProcess(command(path, argv), stdin=subprocess.DEVNULL)

    def socket_path(self, device_id: int, seen_from: int | None = None) -> Path:
        return self.directory / socket_name(device_id)

    def node_name(self, device_id: int) -> str:
        return ""

    def are_apart(self, one: int, other: int) -> bool:
        return False

    def clean(self, device_id: int) -> None:
        self.socket_path(device_id).unlink(missing_ok=True)


def socket_name(device_id: int) -> str:
    """Of a device's worker, on every node."""
    return f"device-{device_id}.sock"


def command(path: Path, argv: Sequence[str]) -> list[str]:
    """The command line of a worker that ends with this process."""
    module = [sys.executable, "-m", "sgl_elastic.memory.worker"]
    return [*module, "--socket", str(path), *argv, "--die-with-parent", str(os.getpid())]


def start(
    options: WorkerOptions,
    launcher: Launcher,
    device_id: int,
    budget_bytes: int,
    shape: MemoryShape | None,
) -> Worker:
    """The worker of a device. Raises MemoryWorkerError; nothing runs then."""
    argv = ["--device-id", str(device_id), "--budget-bytes", str(budget_bytes)]
    argv += ["--backend", options.backend, "--page-bytes", str(options.page_bytes)]
    argv += ["--library", options.library]
    try:
        process = launcher.start(device_id, argv)
    except (OSError, NodeLostError) as error:
        raise _no_worker(device_id, error) from error
    try:
        return _connected(process, options, launcher.socket_path(device_id), device_id, shape)
    except ElasticError:
        _end(process, 0.0)
        raise
    except OSError as error:  # out of descriptors, most likely
        _end(process, 0.0)
        raise _no_worker(device_id, error) from error


def end(worker: Worker) -> None:
    """End it, dead or alive; returns when the process is gone."""
    _end(worker.process, _END_S)
    worker.client.close()
    worker.watch.close()


def _connected(
    process: Process,
    options: WorkerOptions,
    path: Path,
    device_id: int,
    shape: MemoryShape | None,
) -> Worker:
    with ExitStack() as opened:
        client = opened.enter_context(_wait_for(process, options, path, device_id))
        watch = opened.enter_context(DeviceClient(path, options.timeout_s))
        if shape is not None:
            client.define(shape)
        opened.pop_all()
    return Worker(process, client, watch)


def _no_worker(device_id: int, error: Exception) -> MemoryWorkerError:
    return MemoryWorkerError(f"the memory worker of device {device_id} cannot be started: {error}")


def _wait_for(process: Process, options: WorkerOptions, path: Path, device_id: int) -> DeviceClient:
    """A client of the worker that has just been started, once it listens."""
    began = time.monotonic()
    while _may_come_up(process, time.monotonic() - began, options.start_timeout_s):
        if path.exists():
            with suppress(MemoryWorkerError):  # it is there, but does not listen yet
                return DeviceClient(path, options.timeout_s)
        time.sleep(_POLL_S)
    outcome = f"ended with {process.returncode}" if process.poll() is not None else "is not up"
    raise MemoryWorkerError(
        f"the memory worker of device {device_id} {outcome} after {time.monotonic() - began:.1f} s "
        f"(limit {options.start_timeout_s:g} s): its reason is in the log above"
    )


def _may_come_up(process: Process, since_s: float, limit_s: float) -> bool:
    if process.poll() is not None or since_s >= limit_s:
        return False
    return since_s < HANG_S or not process.is_stopped()


def _end(process: Process, timeout_s: float) -> None:
    """SIGTERM, then SIGKILL after `timeout_s`; returns when the process is gone."""
    process.terminate()
    try:
        process.wait(max(timeout_s, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
