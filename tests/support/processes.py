"""Processes of tests, which must run alone or are stopped; and what the kernel says of ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sgl_elastic.processes import is_stopped
from sgl_esft.health.processes import descendants, is_there
from tests.support.servers import ROOT
from tests.support.waiting import wait_until


def run_module(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON object the module prints, run on the CPU platform with nothing else configured."""
    prefixes = ("SGL_", "SGLANG_", "ESFT_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    platform = {"SGLANG_PLATFORM": "sgl_esft_cpu", "ESFT_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT,
        env={**kept, **platform, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def first_outgoing_port() -> int:
    """From here on the kernel numbers outgoing connections, and gives ports to who asks for any."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait for it: on a busy machine the process may do something else first."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid))


def family(pid: int) -> set[int]:
    """A process and all below it."""
    return {pid, *descendants(pid)}


def assert_gone(pids: Iterable[int]) -> None:
    """None of these processes outlives who started it."""
    wait_until(lambda: not any(map(is_there, pids)), 10.0)


def command_line(pid: int) -> list[str]:
    """Its words, or the title that a process gave itself; none when it is gone."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def open_files(pid: int) -> Iterator[str]:
    """Of a process, by what its descriptors point to."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(fd.readlink())
