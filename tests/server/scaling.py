"""What tests of elastic servers ask of `/v1/scale` besides scaling."""

from __future__ import annotations

import time

import requests

from tests.support.servers import Server

SCALE_S = 240.0  # a scale with nothing ready, on two cores that others use too


def wait_until_idle(server: Server) -> None:
    """Until no scale runs; one that renews copies of experts is one too."""
    deadline = time.monotonic() + SCALE_S
    while requests.get(f"{server.url}/v1/scale", timeout=30).json()["running"] is not None:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
