"""Memory workers as their parent sees them: which device has one, how it starts and how it ends.

    control.py --> [DeviceWorkers] --start--> `python -m sgl_elastic.memory.worker`, two clients
                                   --end--> SIGTERM, then SIGKILL

Where a worker runs is a launcher's to say: here, or on the device's node (nodes/cluster.py).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from sgl_elastic.errors import ElasticError, MemoryWorkerError, NodeLostError
from sgl_elastic.memory.client import DeviceClient
from sgl_elastic.memory.connection import HANG_S
from sgl_elastic.memory.messages import Usage
from sgl_elastic.processes import LocalProcess, Process
from sgl_elastic.types import MemoryShape

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_END_S = 2.0  # a worker that was told to end does so in milliseconds, or never


@dataclass(frozen=True)
class RunningWorker:
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


class DeviceWorkers:
    """The workers of all devices. `add_device`, `remove_device`: one thread at a time gets in.

    `budget_bytes` has all devices that may ever be added; the other options are `WorkerOptions`'.
    """

    def __init__(
        self, launcher: Launcher, budget_bytes: Mapping[int, int], options: WorkerOptions
    ) -> None:
        self._launcher = launcher
        self._budget_bytes = dict(budget_bytes)
        self._options = options
        self._shape: MemoryShape | None = None
        self._workers: dict[int, RunningWorker] = {}
        self._workers_lock = threading.Lock()  # starting and ending workers

    def shape(self) -> MemoryShape:
        """What the model's memory looks like. Raises MemoryWorkerError before `define`."""
        if self._shape is None:
            raise MemoryWorkerError("the model's memory shape is not known yet: define it first")
        return self._shape

    def define(self, shape: MemoryShape) -> None:
        """Tell all devices, later ones too, the regions. Another shape later is refused."""
        if shape.page_bytes != self._options.page_bytes:
            raise MemoryWorkerError(
                f"the shape has pages of {shape.page_bytes} bytes, the workers of "
                f"{self._options.page_bytes}: start them with the same"
            )
        for device_id in self.device_ids():
            self.client(device_id).define(shape)
        self._shape = shape

    def device_ids(self) -> tuple[int, ...]:
        """Devices that have a worker, ascending; dead ones too, until they are removed."""
        return tuple(sorted(self._workers))

    def budget_pages(self, device_id: int) -> int:
        """The most pages of a device, added or not. Raises MemoryWorkerError for an unknown one."""
        if device_id not in self._budget_bytes:
            raise MemoryWorkerError(
                f"device {device_id} has no memory budget; there are {sorted(self._budget_bytes)}"
            )
        return self._budget_bytes[device_id] // self._options.page_bytes

    def socket_path(self, device_id: int, seen_from: int | None = None) -> Path:
        """Where the device's worker listens, on the node of another device, or (None) here."""
        return self._launcher.socket_path(device_id, seen_from)

    def node_name(self, device_id: int) -> str:
        """Where a device is; "" on one machine."""
        return self._launcher.node_name(device_id)

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two devices are on different nodes: bytes go between them, pages do not."""
        return self._launcher.are_apart(one, other)

    def client(self, device_id: int) -> DeviceClient:
        """The device's verbs. Raises MemoryWorkerError without a worker, or with a dead one."""
        worker = self._workers.get(device_id)
        if worker is None:
            raise MemoryWorkerError(f"device {device_id} has no memory worker: add the device")
        if worker.process.poll() is not None:
            raise MemoryWorkerError(
                f"the memory worker of device {device_id} ended with {worker.process.returncode}: "
                "its memory is lost; remove the device, and see the log for the reason"
            )
        return worker.client

    def usage(self) -> Mapping[int, Usage]:
        """Usage of every device whose worker answers; never waits for a copy of whole regions."""
        found: dict[int, Usage] = {}
        for device_id, worker in sorted(dict(self._workers).items()):
            try:
                found[device_id] = worker.watch.usage()
            except ElasticError as error:
                logger.warning("no usage of device %d: %s", device_id, error)
        return MappingProxyType(found)

    def dead_workers(self) -> tuple[int, ...]:
        """Devices whose worker has ended although nobody removed it."""
        workers = sorted(dict(self._workers).items())
        return tuple(d for d, worker in workers if worker.process.poll() is not None)

    def add_device(self, device_id: int) -> bool:
        """Start the device's worker; False if it has one. Raises MemoryWorkerError."""
        with self._workers_lock:
            if device_id in self._workers:
                self.client(device_id)
                return False
            budget_bytes = self.budget_pages(device_id) * self._options.page_bytes
            self._workers[device_id] = _start(
                self._options, self._launcher, device_id, budget_bytes, self._shape
            )
            return True

    def remove_device(self, device_id: int) -> None:
        """End the device's worker, dead or alive; harmless without one. Its memory is gone then."""
        with self._workers_lock:
            worker = self._workers.pop(device_id, None)
            if worker is not None:
                _end(worker.process, _END_S)
                worker.client.close()
                worker.watch.close()
            self._launcher.clean(device_id)

    def close(self) -> None:
        """End all workers."""
        for device_id in self.device_ids():
            self.remove_device(device_id)


def _start(
    options: WorkerOptions,
    launcher: Launcher,
    device_id: int,
    budget_bytes: int,
    shape: MemoryShape | None,
) -> RunningWorker:
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


def _connected(
    process: Process,
    options: WorkerOptions,
    path: Path,
    device_id: int,
    shape: MemoryShape | None,
) -> RunningWorker:
    with ExitStack() as opened:
        client = opened.enter_context(_wait_for(process, options, path, device_id))
        watch = opened.enter_context(DeviceClient(path, options.timeout_s))
        if shape is not None:
            client.define(shape)
        opened.pop_all()
    return RunningWorker(process, client, watch)


def _no_worker(device_id: int, error: Exception) -> MemoryWorkerError:
    return MemoryWorkerError(f"the memory worker of device {device_id} cannot be started: {error}")


def _wait_for(process: Process, options: WorkerOptions, path: Path, device_id: int) -> DeviceClient:
    """A client of the worker that has just been started, once it listens."""
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < options.start_timeout_s:
        if path.exists():
            with suppress(MemoryWorkerError):  # it is there, but does not listen yet
                return DeviceClient(path, options.timeout_s)
        if time.monotonic() - began >= HANG_S and process.is_stopped():
            break
        time.sleep(_POLL_S)
    outcome = f"ended with {process.returncode}" if process.poll() is not None else "is not up"
    raise MemoryWorkerError(
        f"the memory worker of device {device_id} {outcome} after {time.monotonic() - began:.1f} s "
        f"(limit {options.start_timeout_s:g} s): its reason is in the log above"
    )


def _end(process: Process, timeout_s: float) -> None:
    """SIGTERM, then SIGKILL after `timeout_s`; returns when the process is gone."""
    process.terminate()
    try:
        process.wait(max(timeout_s, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
