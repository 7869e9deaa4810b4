"""Memory workers as their parent sees them: how one is started, and how it ends.

control.py --[start]--> `python -m sgl_elastic.memory.worker` --> Worker (process, two clients)
           --[end]--> SIGTERM, then SIGKILL
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from sgl_elastic.errors import ElasticError, MemoryWorkerError
from sgl_elastic.memory.client import HANG_S, DeviceClient
from sgl_elastic.types import MemoryShape

_POLL_S = 0.02
_END_S = 2.0  # a worker that was told to end does so in milliseconds, or never


@dataclass(frozen=True)
class Worker:
    """A running worker. `watch` is a connection of its own: long copies do not keep it waiting."""

    process: subprocess.Popen[bytes]
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


def start(
    options: WorkerOptions,
    path: Path,
    device_id: int,
    budget_bytes: int,
    shape: MemoryShape | None,
) -> Worker:
    """The worker of a device, listening at `path`. Raises MemoryWorkerError; nothing runs then."""
    path.unlink(missing_ok=True)  # of a worker that was killed
    command = [sys.executable, "-m", "sgl_elastic.memory.worker"]
    command += ["--socket", str(path), "--device-id", str(device_id)]
    command += ["--backend", options.backend, "--page-bytes", str(options.page_bytes)]
    command += ["--budget-bytes", str(budget_bytes), "--library", options.library]
    command += ["--die-with-parent", str(os.getpid())]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise _no_worker(device_id, error) from error
    try:
        return _connected(process, options, path, device_id, shape)
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
    process: subprocess.Popen[bytes],
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


def _no_worker(device_id: int, error: OSError) -> MemoryWorkerError:
    return MemoryWorkerError(f"the memory worker of device {device_id} cannot be started: {error}")


def _wait_for(
    process: subprocess.Popen[bytes], options: WorkerOptions, path: Path, device_id: int
) -> DeviceClient:
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


def _may_come_up(process: subprocess.Popen[bytes], since_s: float, limit_s: float) -> bool:
    if process.poll() is not None or since_s >= limit_s:
        return False
    return since_s < HANG_S or not _is_stopped(process)


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child is stopped, as by SIGSTOP; False when it has just ended."""
    with suppress(ChildProcessError):
        seen = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return seen is not None
    return False


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM, then SIGKILL after `timeout_s`; returns when the process is gone."""
    process.terminate()
    try:
        process.wait(max(timeout_s, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
