"""Processes of tests: modules that must run in one of their own, and processes that are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from sgl_elastic.processes import is_stopped
from tests.servers import ROOT


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


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait for it: on a busy machine the process may do something else first."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not is_stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)
