"""Native code for a CPU: finds and loads the library of csrc/reroute and csrc/int8.

    load() -> package sgl_reroute -> libsgl_reroute.so -> torch's CPU key -> op.reroute
    int8_linear() -> the same library -> a linear layer with int8 weights, or None

The library is built with csrc/ (`make setup`) and registers itself with torch when it is loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
Int8Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [T, in], w [out, in] int8, scale [out] float32) -> float32 [T, out]: (x @ w.T) * scale.

Contiguous CPU tensors; x of any floating dtype is taken as float32, so bfloat16 is exact. Sums are
float32, and a token's result does not depend on the other tokens. Raises ValueError for others.
"""


def load() -> RerouteFunction:
    """Make `op.reroute` run native code on CPU tensors, and return it.

    Raises KernelUnavailableError when the library is not installed, or was built for another torch.
    """
    load_library()
    return reroute


@functools.cache
def int8_linear() -> Int8Linear | None:
    """None on a processor without AVX-512: torch's `_weight_int8pack_mm` runs on any.

    That takes about twice as long for one token, somewhat less for three to five, and as long from
    six on. Raises KernelUnavailableError as `load` does.
    """
    load_library()
    if not torch.ops.sgl_esft.int8_linear_is_supported():
        return None
    found: Int8Linear = torch.ops.sgl_esft.int8_linear.default
    return found


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
