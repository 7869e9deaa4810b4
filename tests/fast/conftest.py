"""What every unit test needs."""

from __future__ import annotations

import pytest

from sgl_esft.weave import expert_tensor


@pytest.fixture(autouse=True)
def _own_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has one arena a device, a test has none of another test's."""
    monkeypatch.setattr(expert_tensor, "_arenas", {})
