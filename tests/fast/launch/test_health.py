"""SGLang's dumps before it ends are off, unless its operator has asked for them."""

from __future__ import annotations

import pytest

from sgl_esft.health import ending
from sgl_esft_launch import health

PYSPY, CORE = health._DUMPS


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({}, 0.0), ({PYSPY: "1"}, 30.0), ({CORE: "1"}, 90.0), ({PYSPY: "0"}, 0.0)],
)
def test_dumps_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], seconds: float
) -> None:
    monkeypatch.setattr(ending, "track_apart", lambda: None)
    for name in (*health._DUMPS, "ESFT_HEARTBEAT_TABLE", "ESFT_LOAD_FILE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    health.prepare().close()
    assert health.dump_s() == seconds
