"""Rerouting on a CPU: finds and loads the native code of csrc/reroute.

    load() -> package sgl_reroute -> libsgl_reroute.so -> torch's CPU key -> op.reroute
    (the same library has csrc/int8: int8_linear.py)

The library is built with csrc/ (`make setup`) and registers itself with torch when it is loaded.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from sgl_esft_kernels.errors import KernelUnavailableError
from sgl_esft_kernels.op import RerouteFunction, reroute

PACKAGE = "sgl_reroute"
VERSION_FILE = "torch_version.txt"  # written by csrc/CMakeLists.txt
REMEDY = (
    "build csrc/ where torch is installed: `make setup`, or "
    "`pip install --no-build-isolation --no-deps --force-reinstall ./csrc`"
)


def load() -> RerouteFunction:
    """Make `op.reroute` run native code on CPU tensors, and return it.

    Raises KernelUnavailableError when the library is not installed, or was built for another torch.
    """
    load_library()
    return reroute


@functools.cache
def load_library() -> None:
    """Once a process: torch refuses to register an operator's implementation twice."""
    path = library_path()
    check_version(path.parent)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelUnavailableError(f"{path} cannot be loaded ({error}): {REMEDY}") from error


def library_path() -> Path:
    """Raises KernelUnavailableError when csrc/ is not installed or was built without torch."""
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("*sgl_reroute.so"):
            return path
    raise KernelUnavailableError(f"the native reroute is not installed: {REMEDY}")


def check_version(folder: Path) -> None:
    """Raises KernelUnavailableError unless the library in `folder` was built for this torch.

    Asked before it is loaded: with another torch's tensors it could read what is not there.
    """
    built_for, running = (folder / VERSION_FILE).read_text(), version("torch")
    if built_for != running:
        raise KernelUnavailableError(
            f"the native reroute was built for torch {built_for}, this is {running}: {REMEDY}"
        )
