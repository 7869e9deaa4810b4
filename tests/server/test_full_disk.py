"""A server whose log goes to a full disk: it starts, serves, changes its adapters and ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_esft import zoo
from tests.server.ending import ELASTIC, Mortal, Stream
from tests.support.servers import Server, ServerSpec

pytestmark = pytest.mark.server

FULL_DISK = Path("/dev/full")  # each write is ENOSPC
ENDS_S = 45.0


@pytest.fixture(params=[(), ELASTIC], ids=["plain", "elastic"])
def wordless(request: pytest.FixtureRequest) -> Iterator[Mortal]:
    """SGLang's own lines too, which are printed by all processes."""
    args = ("--log-level", "info", *request.param)
    server = Server(ServerSpec(args=args), FULL_DISK)
    server.log = lambda *_: "its log is lost"  # type: ignore[method-assign]
    try:
        server.wait_until_ready()
        found = Mortal(server)
        found.wait_until_ready()
        yield found
    finally:
        server.stop()


@pytest.mark.full
def test_no_line_is_worth_a_process(wordless: Mortal) -> None:
    server = wordless.server
    assert server.load("late", zoo.adapter_paths()["caesar"]).ok
    assert server.unload("late").ok
    stream = Stream(server.url, 32)
    stream.end()
    assert stream.is_done
    server.process.send_signal(signal.SIGTERM)
    assert wordless.ends_with(ENDS_S) == 0
