"""Modules of tests that must run in a process of their own, as SGLang's processes do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

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
