"""A virtual environment with Ascend's Triton compiler; needs no NPU, no CANN and no torch.

requirements/triton-ascend.txt -> [ascend_env] -> build/ascend-venv, .stamp inside
In:  pinned wheels (72 MB; 250 MB unpacked), once.  Out: the path of its Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.requirements_files import FOLDER, read_pins

PINS = FOLDER / "triton-ascend.txt"
VENV = FOLDER.parent / "build" / "ascend-venv"
PYTHON_VERSION = "3.11"  # the newest that triton-ascend 3.2.0 has a wheel for


class AscendEnvironmentError(RuntimeError):
    """The environment cannot be made. Policy: give pip an index with the pins."""


def make(venv: Path = VENV) -> Path:
    """The environment's Python, made unless it is there with these pins. Prints what it does."""
    python = venv / "bin" / "python"
    with _locked(venv.with_suffix(".lock")):
        if not _stamp(venv).exists():
            print(f"ascend: virtual environment in {venv}", flush=True)
            _run(
                [choose_python(), "-m", "venv", "--clear", "--without-pip", str(venv)],
                "the virtual environment cannot be made",
            )
            print(f"ascend: {_what()} (72 MB, under a minute)", flush=True)
            _run(
                _install(python),
                f"{_what()} cannot be installed: the index that pip is configured with must "
                f"have every pin of requirements/{PINS.name}",
            )
            _stamp(venv).touch()
    return python


def choose_python() -> str:
    """An interpreter that the wheel fits. Raises AscendEnvironmentError."""
    if sys.version.startswith(f"{PYTHON_VERSION}."):
        return sys.executable
    found = shutil.which(f"python{PYTHON_VERSION}")
    if found is None:
        raise AscendEnvironmentError(
            f"{_what()} needs Python {PYTHON_VERSION}, this is {sys.version.split()[0]}: "
            f"put python{PYTHON_VERSION} on the PATH"
        )
    return found


def _what() -> str:
    return f"triton-ascend {read_pins(PINS.name)['triton-ascend']}"


def _install(python: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    command += ["--quiet", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:"]
    return [*command, "--requirement", str(PINS)]


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AscendEnvironmentError(f"{problem}\n{done.stderr}{done.stdout}")


def _stamp(venv: Path) -> Path:
    """Named after the pins and the folder: a moved environment has scripts that point nowhere."""
    text = f"{venv.resolve()}\n{PINS.read_text()}"
    return venv / f".made-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time makes the environment; the others wait and find it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(make())
