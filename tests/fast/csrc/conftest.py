"""What the tests of the native code share: the vendors' contract simulators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.csrc.csrc_build import simulator_paths


@pytest.fixture(scope="session")
def simulators() -> dict[str, Path]:
    """Vendor -> library, for `sgl_vmm.open_backend(vendor, library=str(path))`."""
    return simulator_paths()
