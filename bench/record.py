"""What every result file says beside its figures: command, commit, machine, versions, time."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum of some runs."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"min": min(values), "q1": low, "median": median, "q3": high, "max": max(values)}


def write_result(name: str, figures: Mapping[str, object]) -> Path:
    """Write bench/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"name": name, **_context(), **figures}, indent=2) + "\n")
    return path


def _context() -> dict[str, object]:
    return {
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain") else ""),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "device": "none (CPU reference platform)",
            "python": platform.python_version(),
        },
        "versions": {package: version(package) for package in ("sglang", "torch", "sgl-esft")},
    }


def _module_and_arguments() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name if spec else sys.argv[0], *sys.argv[1:]]


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
