"""A virtual environment with Ascend's Triton compiler; needs no NPU, no CANN and no torch.

requirements/triton-ascend.txt -> [ascend_env] -> build/ascend-venv, .stamp inside
In:  pinned wheels (75 MB; 270 MB unpacked), once.  Out: the path of its Python.
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
        if not _has_stamp(venv):
            print(f"ascend: virtual environment in {venv}", flush=True)
            _run([choose_python(), "-m", "venv", "--clear", str(venv)], "python's venv module")
            print(f"ascend: {_what()} (75 MB, under a minute)", flush=True)
            _run(_install(python), _what())
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
    command = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    return [*command, "--requirement", str(PINS)]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AscendEnvironmentError(
            f"{what} cannot be installed, the index that pip is configured with must have "
            f"every pin of requirements/{PINS.name}:\n{done.stderr}{done.stdout}"
        )


def _stamp(venv: Path) -> Path:
    """Named after the pins and the folder: a moved environment has scripts that point nowhere."""
    text = f"{venv.resolve()}\n{PINS.read_text()}"
    return venv / f".made-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _has_stamp(venv: Path) -> bool:
    return _stamp(venv).exists()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time makes the environment; the others wait and find it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(make())
