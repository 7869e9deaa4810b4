"""What every unit test needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_esft.weave import expert_tensor


@pytest.fixture(autouse=True)
def _own_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one arena a device, a test has none of another test's."""
    monkeypatch.setattr(expert_tensor, "_arenas", {})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on shared cores: OpenMP's threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
