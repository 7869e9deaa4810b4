"""Everything that a GPU has to show, in parts that fit the device's memory and a call's minutes.

    python -m bench.gpu --out bench/results [--minutes 9.5] [--parts check memory ... | --call 1]

    build csrc/ with the machine's own compiler -> what fits (plan.py) -> [its tests on the device]
    -> the part's steps of bench/gpu/steps.py, each a process with a time limit -> the part's file
    in <out>, written after each step

Needed: Linux, an NVIDIA driver, Python 3.11 or newer with torch for CUDA, a C++17 compiler and
Python.h; nothing is downloaded. SGLang is used where it is installed, or from the bundle
(scripts/gpu_bundle.py). A step that fails, is skipped or runs out of time is in the file with its
reason and makes it INCOMPLETE, the others go on, and the exit status is 1. Where the tree is
without its repository, BENCH_COMMIT names its commit.

`--resume` keeps the steps that the files in <out> have figures of and runs the others, where one
call is too short for all. Each step has the commit that it was run at.

`--simulate` runs the whole flow, tiny, over the contract simulator of csrc/tests: no evidence about
a GPU, and the file says so. What only a GPU can run is missing there, so it is INCOMPLETE too.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.record import RESULTS, commit, write_result
from bench.gpu import build, parts, plan
from bench.gpu.parts import BUILD, DEVICE_TESTS, PARTS, Part
from bench.gpu.plan import Limits
from sgl_esft import support

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt): ")
_SERVED = ("serve: equality", "tiers: equality", "quantised: equality", "serve", "elastic")
_NEEDS_A_GPU = "SGLang's kernel needs a GPU"
SIMULATED = "contract simulator: no GPU took part"
COMPLETE, INCOMPLETE = "complete", "INCOMPLETE"
_VERSIONED = ("triton", "sglang-kernel", "transformers", "numpy")
MANIFEST_VARIABLE = "ESFT_GPU_BUNDLE"  # path of the bundle's manifest, set by lent_hour.sh

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

    def resume(self) -> None:
        """Take the steps with figures from the file that an earlier run wrote, if there is one."""
        file = self.folder / f"{self.part.file}.json"
        if file.exists():
            found = json.loads(file.read_text())
            of = {"device": found["driver"]["name"]}  # results before H200's do not say it by step
            steps = {name: {**of, **each} for name, each in found["steps"].items()}
            self.steps = {name: each for name, each in steps.items() if each["ok"]}

    @property
    def to_run(self) -> dict[str, Limits]:
        """Steps without figures."""
        done = {name for name, each in self.steps.items() if each["ok"]}
        return {name: each for name, each in self.part.steps.items() if name not in done}

    def add(self, name: str, outcome: Mapping[str, Any]) -> None:
        of = {"commit": commit(":/", ":!results"), "device": str(self.device["name"])}
        self.steps[name] = {**of, **outcome}
        state = "ok" if outcome["ok"] else f"FAILED: {outcome['reason']}"
        state = f"NOT RUN: {outcome['reason']}" if outcome.get("not_run") else state
        print(f"gpu: {name}: {state} ({outcome['took_seconds']:.0f} s)", flush=True)
        self.write()

    def leave_out(self, name: str, reason: str) -> None:
        """A step that is not begun, which leaves the result incomplete."""
        self.add(name, {"ok": False, "not_run": True, "took_seconds": 0.0, "reason": reason})

    def write(self) -> Path:
        return write_result(
            self.part.file,
            {
                "what": self.part.what,
                "evidence": self.evidence,
                "status": INCOMPLETE if self.missing else COMPLETE,
                "missing": self.missing,
                "driver": self.device,
                "bundle": bundle(),
                "steps": self.steps,
            },
            device=str(self.device["name"]),
            folder=self.folder,
            packages=_VERSIONED,
        )

    @property
    def missing(self) -> dict[str, str]:
        """Steps without figures, each with its reason."""
        found = {}
        for name in (BUILD, *self.part.steps):
            step = self.steps.get(name, {"ok": False, "reason": "not yet run"})
            if not step["ok"]:
                found[name] = str(step["reason"])
        return found

    @property
    def is_complete(self) -> bool:
        return not self.missing


def bundle() -> dict[str, Any] | None:
    """What the bundle says of itself: its SGLang, its kernels, what is unproved; None without."""
    path = os.environ.get(MANIFEST_VARIABLE)
    found: dict[str, Any] | None = json.loads(Path(path).read_text()) if path else None
    return found


class Clock:
    """The budget of a call."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, wanted: float) -> float:
        """At most `wanted` seconds, and at least enough to fail properly."""
        return max(1.0, min(wanted, self.seconds))

    @property
    def seconds(self) -> float:
        """That are left; below zero after the end."""
        return self._end - time.monotonic()


def outcome_of(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Figures, or why there are none; a step that has figures and `failed` keeps both."""
    start = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        figures.update(work())
        reason = figures.pop("failed", None)
    except (build.CannotBuildError, subprocess.SubprocessError, StepError) as error:
        reason = str(error)
    found: dict[str, Any] = {"ok": reason is None, "took_seconds": time.monotonic() - start}
    return {**found, **figures} if reason is None else {**found, **figures, "reason": reason}


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


def run_all(
    report: Report, clock: Clock, later: list[Limits], library: Callable[[Path], str], *, tiny: bool
) -> None:
    """Build, then the part. `library` is what to open instead of the driver, in a built folder.

    later: of parts that follow in this call, whose least seconds are kept for them.
    """
    folders: list[Path] = []
    report.add(BUILD, outcome_of(lambda: folders.append(build.build()) or {}))
    steps = report.to_run
    if not folders:
        for name in steps:
            report.leave_out(name, "csrc/ was not built")
        return
    kept = sum(each.least for each in later)
    chosen = plan.choose(steps, clock.seconds - kept)
    environment = environment_of(folders[0], library(folders[0]), tiny=tiny)
    waiting = list(chosen.run)
    for name in steps:
        reason = chosen.not_run.get(name) or why_skipped(name, simulated=tiny)
        waiting = [each for each in waiting if each != name]
        if reason:
            report.leave_out(name, reason)
            continue
        after = [*(chosen.run[each] for each in waiting), *later]
        seconds = max(1.0, plan.allot(clock.seconds, chosen.run[name], after))
        report.add(name, outcome_of(partial(_step, name, folders[0], environment, tiny, seconds)))


def _step(
    name: str, folder: Path, environment: Mapping[str, str], tiny: bool, seconds: float
) -> Mapping[str, Any]:
    if name == DEVICE_TESTS:
        return run_device_tests(folder, environment, seconds)
    library = environment.get("SGL_VMM_DEVICE_LIBRARY", "")
    arguments = ["--tiny"] * tiny + (["--library", library] if library else [])
    figures: Mapping[str, Any] = run_step(name, arguments, environment, seconds)
    return figures


def environment_of(folder: Path, library: str, *, tiny: bool) -> dict[str, str]:
    """What a step's process is given; without a GPU, Triton's kernels are interpreted."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "SGL_VMM_DEVICE": "cuda",
        "SGL_VMM_STEPS": "10" if tiny else "40",
        support.TRY_VARIABLE: "tiers,quantised",  # refused until a step of this bench has shown it
    }
    if library:
        environment |= {"SGL_VMM_DEVICE_LIBRARY": library, "TRITON_INTERPRET": "1"}
    return environment


def main() -> None:
    """Run the parts and write their files."""
    options = _options()
    if options.plan:
        for number, names in enumerate(parts.calls(), 1):
            print(f"call {number}: {' '.join(names)}")
        return
    try:
        evidence, device = (
            (SIMULATED, {"name": "none (contract simulator of cuda)"})
            if options.simulate
            else ("ran on hardware", describe_gpu())
        )
    except StepError as error:
        sys.exit(f"gpu: {error}")
    if options.layers:
        os.environ["BENCH_LAYERS"] = options.layers
    names = parts.calls()[options.call - 1] if options.call else options.parts
    reports = [Report(PARTS[name], options.out, evidence, device) for name in names]
    for report in reports if options.resume else ():
        report.resume()
    run_call(reports, Clock(60 * options.minutes), simulate=options.simulate)
    for report in reports:
        print(f"wrote {report.write()}: {COMPLETE if report.is_complete else INCOMPLETE}")
        for step, reason in report.missing.items():
            print(f"  missing: {step}: {reason}")
    sys.exit(0 if all(report.is_complete for report in reports) else 1)


def run_call(reports: list[Report], clock: Clock, *, simulate: bool) -> None:
    """Part after part. Where the check fails, no server is started."""
    is_usable = True
    for number, report in enumerate(reports):
        if not is_usable and set(report.part.steps) <= set(_SERVED):
            for name in (BUILD, *report.to_run):
                report.leave_out(name, "the self-check failed")
            continue
        later = [each for other in reports[number + 1 :] for each in other.to_run.values()]
        # Parts that do not fit give way, last ones first, and keep nothing of this one's time.
        later = list(_fitting(later, clock.seconds - plan.least_seconds(report.to_run)))
        run_all(report, clock, later, _simulator if simulate else _driver, tiny=simulate)
        is_usable &= report.part is not PARTS["check"] or report.is_complete


def _fitting(later: list[Limits], seconds: float) -> Iterator[Limits]:
    for each in later:
        if each.least <= seconds:
            seconds -= each.least
            yield each


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    numbers = range(1, len(parts.calls()) + 1)
    parser.add_argument("--call", type=int, choices=numbers, help="the parts of one call of --plan")
    parser.add_argument("--minutes", type=float, default=plan.CALL_MINUTES, help="of this call")
    parser.add_argument("--plan", action="store_true", help="print which parts share a call")
    parser.add_argument("--resume", action="store_true", help="only steps without figures in --out")
    parser.add_argument("--layers", help="of the model behind servers; default: all that fit")
    parser.add_argument("--simulate", action="store_true", help="tiny, on the contract simulator")
    return parser.parse_args()


def _simulator(folder: Path) -> str:
    return str(build.simulator(folder, "cuda"))


def _driver(_folder: Path) -> str:
    return ""


if __name__ == "__main__":
    main()
