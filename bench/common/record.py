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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
NO_DEVICE = "none (CPU reference platform)"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum of some runs, and how many: of one run all are its value."""
    several = values if len(values) > 1 else [*values, *values]
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    found = {"min": min(values), "q1": low, "median": median, "q3": high, "max": max(values)}
    return {"runs": len(values), **found}


def write_result(
    name: str,
    figures: Mapping[str, object],
    *,
    device: str = NO_DEVICE,
    folder: Path = RESULTS,
    packages: Sequence[str] = (),
) -> Path:
    """Write <folder>/<name>.json. `packages`: whose versions count beside those of every result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(
        json.dumps({"name": name, **_context(device, packages), **figures}, indent=2) + "\n"
    )
    return path


def _context(device: str, packages: Sequence[str]) -> dict[str, object]:
    return {
        "command": shlex.join(["python", "-m", *_module_and_arguments()]),
        "commit": commit(":/", ":!results"),  # results are no change of the code
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": {name: _version(name) for name in ("sglang", "torch", "sgl-esft", *packages)},
    }


def machine(device: str = NO_DEVICE) -> dict[str, object]:
    """This one, with the accelerator that the caller names."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "device": device,
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit(*paths: str) -> str:
    """HEAD; with `+changes` where the paths, git's, as seen from bench/, are not as they are there.

    BENCH_COMMIT is for a tree without its repository.
    """
    try:
        head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *paths)
    except OSError:
        head = changes = ""
    if not head:
        return os.environ.get("BENCH_COMMIT", "unknown")
    return head + ("+changes" if changes else "")


def _module_and_arguments() -> list[str]:
    """Of a folder of this machine only the name."""
    spec = sys.modules["__main__"].__spec__
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return [spec.name if spec else sys.argv[0], *arguments]


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
