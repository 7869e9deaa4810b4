"""A request that kills every rank that runs it ends two of them and itself, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pytest
import requests

from tests.server.elastic_faults import Elastic, recoveries
from tests.support.poison_plugin import POISON, install
from tests.support.servers import ROOT, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.full]

LAUNCHER = (sys.executable, "-m", "sgl_esft.launch_server")


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    folder = tmp_path_factory.mktemp("poison")
    path = os.pathsep.join(map(str, (install(folder), ROOT)))
    args = ("--elastic", "--max-devices", "1", "--device-memory", "64MiB", "--enable-metrics")
    spec = ServerSpec(args=args, program=("env", f"PYTHONPATH={path}", *LAUNCHER))
    elastic = Elastic(folder / "log", spec)
    try:
        elastic.learn()
        yield elastic
    finally:
        elastic.server.stop()


def ask(elastic: Elastic, **more: object) -> requests.Response:
    return elastic.server.post("/generate", {"input_ids": POISON, **more})


@pytest.mark.parametrize("stream", [False, True])
def test_it_ends_itself_and_the_others_go_on(elastic: Elastic, stream: bool) -> None:
    elastic.wait_for_standby(0)
    before = set(recoveries(elastic))
    with elastic.load():
        answer = ask(elastic, stream=stream)
    if stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        reason = json.loads(events[-1])["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 500)
        message = reason["message"]
    else:
        assert answer.status_code == 500
        message = answer.text
    assert "SuspectRequestError: 2 engine instances ended" in message
    elastic.wait_for(elastic.is_ready, 5)
    assert len(set(recoveries(elastic)) - before) == 2
    counted = requests.get(f"{elastic.server.url}/metrics", timeout=30).text
    assert f'sgl_elastic:faults_total{{kind="request"}} {1 + stream}.0' in counted
