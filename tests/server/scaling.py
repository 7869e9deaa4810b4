"""What tests of elastic servers ask of `/v1/scale` besides scaling."""

from __future__ import annotations

import requests

from tests.support.servers import Server
from tests.support.waiting import wait_until

SCALE_S = 240.0  # a scale with nothing ready, on two cores that others use too


def wait_until_idle(server: Server) -> None:
    """Until no scale runs; one that renews copies of experts is one too."""

    def is_idle() -> bool:
        running = requests.get(f"{server.url}/v1/scale", timeout=30).json()["running"]
        return running is None

    wait_until(is_idle, SCALE_S, every_s=0.1, why=server.log)
