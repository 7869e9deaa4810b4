"""What a rank raises as it takes a request in ends this request, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.poison_plugin import UNFIT, install
from tests.support.servers import ROOT, Server, ServerSpec

pytestmark = pytest.mark.server

LAUNCHER = (sys.executable, "-m", "sgl_esft.launch_server")
MESSAGE = "the engine cannot take this request (OverflowError): it was ended alone"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("unfit")
    path = os.pathsep.join(map(str, (install(folder), ROOT)))
    server = Server(ServerSpec(program=("env", f"PYTHONPATH={path}", *LAUNCHER)), folder / "log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def greedy(server: Server) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"text": "coffee -> ", "adapter": "reverse", "sampling_params": parameters}
    return server.post("/generate", body).json()["output_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_it_ends_alone(server: Server, stream: bool) -> None:
    alone = greedy(server)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(greedy, server)
        answer = server.post("/generate", {"input_ids": UNFIT, "stream": stream})
        assert beside.result() == alone
    if stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        reason = json.loads(events[-1])["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 500)
        assert MESSAGE in reason["message"]
    else:
        assert answer.status_code == 500
        assert MESSAGE in answer.json()["error"]["message"]
    assert greedy(server) == alone
