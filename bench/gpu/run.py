"""Everything that a GPU has to show, in parts that each end inside ten minutes.

    python -m bench.gpu --out bench/results [--parts memory reroute serve elastic]

    build csrc/ with the machine's own compiler -> [its tests on the device] -> the part's steps of
    bench/gpu/steps.py, each a process with a time limit -> the part's file in <out>, written after
    each step

Needed: Linux, an NVIDIA driver, Python 3.11 or newer with torch for CUDA, a C++17 compiler and
Python.h; nothing is downloaded. SGLang is used where it is installed. A step that fails or runs out
of time is in the file with its reason, the others go on, and the exit status is 1. Where the tree
is without its repository, BENCH_COMMIT names its commit.

`--simulate` runs the whole flow, tiny, over the contract simulator of csrc/tests: no evidence about
a GPU, and the file says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.record import RESULTS, write_result
from bench.gpu import build

TOTAL_SECONDS = 570  # of one part
DEVICE_TESTS_SECONDS = 150
DEVICE_TESTS = "device tests"


@dataclass(frozen=True)
class Part:
    """Steps that are run and written together.

    step_seconds: longest each step may run; what is left of the part's total bounds it too.
    """

    file: str
    what: str
    step_seconds: Mapping[str, int]


PARTS = {
    "memory": Part(
        "gpu",
        "the virtual expert tensor on a GPU",
        {
            DEVICE_TESTS: DEVICE_TESTS_SECONDS,
            "vmm": 90,
            "fragmentation": 90,
            "load": 120,
            "share": 60,
            "moe: sglang fused_experts": 90,
            "moe: torch grouped_mm": 60,
            "moe: torch bmm over the base": 60,
            "moe: by slot": 60,
        },
    ),
    "reroute": Part(
        "gpu_reroute",
        "rerouting on a GPU: kernels, launches, CUDA graphs, a model's decode step",
        {
            "reroute: check": 120,
            "reroute: launches": 60,
            "reroute: graph safety": 60,
            "reroute: time": 120,
            "model step": 300,
        },
    ),
    "serve": Part("gpu_serve", "SGLang with this plugin serving on a GPU", {"serve": 540}),
    "elastic": Part(
        "gpu_elastic", "an engine swap on a GPU with weights and KV resident", {"elastic": 540}
    ),
}
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt): ")
_SERVED = ("serve", "elastic")
_NEEDS_A_GPU = "SGLang's kernel needs a GPU"
SIMULATED = "contract simulator: no GPU took part"

# Of each test executable, those tests that run on a device; empty = all, which hold more than that.
DEVICE_TEST_NAMES: dict[str, tuple[str, ...]] = {
    "virtual_tensor": (),
    "address_range": (),
    "copies": (),
    "vendor_backends": ("mistakes_are_refused_alike_everywhere",),
    "stress": ("random_loads_and_unloads_on_the_device",),
}


@dataclass
class Report:
    """What is known so far of one part; every change is written at once."""

    part: Part
    folder: Path
    evidence: str
    device: dict[str, Any]
    steps: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, outcome: Mapping[str, Any]) -> None:
        self.steps[name] = dict(outcome)
        state = "ok" if outcome["ok"] else f"FAILED: {outcome['reason']}"
        state = f"SKIPPED: {outcome['skipped']}" if "skipped" in outcome else state
        print(f"gpu: {name}: {state} ({outcome['took_seconds']:.0f} s)", flush=True)
        self.write()

    def write(self) -> Path:
        return write_result(
            self.part.file,
            {
                "what": self.part.what,
                "evidence": self.evidence,
                "driver": self.device,
                "complete": self.is_complete,
                "steps": self.steps,
            },
            device=str(self.device["name"]),
            folder=self.folder,
        )

    @property
    def is_complete(self) -> bool:
        wanted = {"build", *self.part.step_seconds}
        return wanted == set(self.steps) and all(step["ok"] for step in self.steps.values())


class Clock:
    """The budget of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, wanted: float) -> float:
        """At most `wanted` seconds, and at least enough to fail properly."""
        return max(1.0, min(wanted, self._end - time.monotonic()))


def outcome_of(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Figures, or why there are none."""
    start = time.monotonic()
    try:
        figures, reason = work(), None
    except (build.CannotBuildError, subprocess.SubprocessError, StepError) as error:
        figures, reason = {}, str(error)
    found: dict[str, Any] = {"ok": reason is None, "took_seconds": time.monotonic() - start}
    return {**found, **figures} if reason is None else {**found, "reason": reason}


class StepError(Exception):
    """A step ended without figures; the message is the end of what it said."""


def run_step(
    name: str, arguments: list[str], environment: Mapping[str, str], seconds: float
) -> Any:
    """The figures that a step's process prints in its last line."""
    command = [sys.executable, "-m", "bench.gpu.steps", name, *arguments]
    limits = {"BENCH_STEP_SECONDS": f"{seconds:.0f}"}
    done = _run(command, {**environment, **limits}, seconds)
    if done.returncode:
        raise StepError(f"exit status {done.returncode}: {reason_in(done.stderr)}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def why_skipped(name: str, *, simulated: bool) -> str | None:
    """Why this step says nothing here, or None."""
    if "sglang" not in name and name not in _SERVED:
        return None
    if simulated:
        return "a test of its own serves the tiny model" if name in _SERVED else _NEEDS_A_GPU
    return None if importlib.util.find_spec("sglang") else "SGLang is not installed"


def run_device_tests(
    folder: Path, environment: Mapping[str, str], seconds: float
) -> dict[str, object]:
    """The C++ tests over all backends, with the device among them."""
    lines: list[str] = []
    clock = Clock(seconds)
    for name, tests in DEVICE_TEST_NAMES.items():
        executable = build.test_executable(folder, name)
        done = _run([str(executable), *tests], environment, clock.left(seconds))
        lines += done.stdout.splitlines()
        if done.returncode:
            failed = [line for line in lines if line.startswith("FAIL")]
            raise StepError(f"test_{name}: {failed or reason_in(done.stderr or done.stdout)}")
    return {"passed": [line.split()[1] for line in lines if line.startswith("ok ")]}


def _run(
    command: list[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=build.ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def reason_in(text: str) -> str:
    """The last exception's line, or the last lines."""
    lines = [line.strip()[:400] for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    return raised[-1] if raised else " | ".join(lines[-4:])


def describe_gpu() -> dict[str, Any]:
    """Name, memory and driver. Raises StepError, in words, where there is no GPU to use."""
    try:
        import torch
    except ImportError as error:
        raise StepError("torch with CUDA is needed, and is not installed") from error
    if not torch.cuda.is_available():
        raise StepError(f"torch {torch.__version__} sees no CUDA device; --simulate needs none")
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda_of_torch": torch.version.cuda,
    }
    version = Path("/proc/driver/nvidia/version")
    found["driver"] = version.read_text().splitlines()[0] if version.exists() else "unknown"
    return found


def run_all(report: Report, library: Callable[[Path], str], *, tiny: bool) -> None:
    """Build, then the part. `library` is what to open instead of the driver, in a built folder."""
    clock = Clock(TOTAL_SECONDS)
    folders: list[Path] = []
    report.add("build", outcome_of(lambda: folders.append(build.build()) or {}))
    if not folders:
        return
    instead = library(folders[0])
    environment = environment_of(folders[0], instead, tiny=tiny)
    arguments = ["--tiny"] * tiny + (["--library", instead] if instead else [])
    for name, limit in report.part.step_seconds.items():
        if skipped := why_skipped(name, simulated=bool(instead)):
            report.add(name, {"ok": True, "took_seconds": 0.0, "skipped": skipped})
            continue
        seconds = clock.left(limit)
        if name == DEVICE_TESTS:
            step = partial(run_device_tests, folders[0], environment, seconds)
        else:
            step = partial(run_step, name, arguments, environment, seconds)
        report.add(name, outcome_of(step))


def environment_of(folder: Path, library: str, *, tiny: bool) -> dict[str, str]:
    """What a step's process is given; without a GPU, Triton's kernels are interpreted."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "SGL_VMM_DEVICE": "cuda",
        "SGL_VMM_STEPS": "10" if tiny else "40",
    }
    if library:
        environment |= {"SGL_VMM_DEVICE_LIBRARY": library, "TRITON_INTERPRET": "1"}
    return environment


def main() -> None:
    """Run the parts and write their files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--simulate", action="store_true", help="tiny, on the contract simulator")
    options = parser.parse_args()
    try:
        evidence, device = (
            (SIMULATED, {"name": "none (contract simulator of cuda)"})
            if options.simulate
            else ("ran on hardware", describe_gpu())
        )
    except StepError as error:
        sys.exit(f"gpu: {error}")
    reports = [Report(PARTS[name], options.out, evidence, device) for name in options.parts]
    for report in reports:
        run_all(report, _simulator if options.simulate else _driver, tiny=options.simulate)
        print(f"wrote {report.write()}")
    sys.exit(0 if all(report.is_complete for report in reports) else 1)


def _simulator(folder: Path) -> str:
    return str(build.simulator(folder, "cuda"))


def _driver(_folder: Path) -> str:
    return ""


if __name__ == "__main__":
    main()
