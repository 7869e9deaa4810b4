"""Tests that are coroutines, and the library that most of them ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.lifecycle.site import Site


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def site(root: Path) -> Site:
    return Site(root)
