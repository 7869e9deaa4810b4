"""The library that most tests ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.lifecycle.site import Site


@pytest.fixture
def site(root: Path) -> Site:
    return Site(root)
