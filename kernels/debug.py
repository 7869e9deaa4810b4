"""Debug builds: SGL_ESFT_DEBUG_KERNELS=1 makes kernels check the values that they read."""

from __future__ import annotations

import functools
import os

VARIABLE = "SGL_ESFT_DEBUG_KERNELS"


@functools.cache
def is_debug() -> bool:
    """Whether this process runs a debug build; read once."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
