"""The C++ tests and the simulators of csrc/, built with the environment's own CMake and Ninja.

csrc/ -> [csrc_build] -> build/csrc-tests, build/csrc-sanitized -> test_cpp, simulators

Incremental: Ninja compiles what has changed, which is nothing the second time.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.servers import ROOT

CSRC = ROOT / "csrc"
BIN = Path(sys.executable).parent  # not resolved: the virtual environment's, not the system's
VENDORS = ("cuda", "acl")


@cache
def build_tests(*targets: str, sanitize: bool = False) -> Path:
    """The folder with the test executables and simulators, up to date: all, or these."""
    folder = ROOT / "build" / ("csrc-sanitized" if sanitize else "csrc-tests")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two pytest processes may want it at once
        if not (folder / "build.ninja").is_file():
            configure(folder, sanitize)
        run([str(BIN / "ninja"), "-C", str(folder), *targets])
    return folder / "tests"


def configure(folder: Path, sanitize: bool) -> None:
    """CMake runs again by itself when a CMakeLists.txt has changed."""
    options = {
        "CMAKE_MAKE_PROGRAM": BIN / "ninja",
        "SGL_VMM_PYTHON": "OFF",
        "SGL_VMM_TESTS": "ON",
        "SGL_VMM_SANITIZE": "ON" if sanitize else "OFF",
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run([str(BIN / "cmake"), "-S", str(CSRC), "-B", str(folder), "-G", "Ninja", *definitions])


def run(command: list[str]) -> None:
    """Run a build step, and show what the compiler said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")


def simulator_paths() -> dict[str, Path]:
    """Vendor -> its contract simulator's library."""
    folder = build_tests()
    return {vendor: folder / f"libsgl_vmm_{vendor}_simulator.so" for vendor in VENDORS}
