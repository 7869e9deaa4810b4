"""What one request does to an engine stays with it: its error, and nobody else's tokens."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_esft import zoo
from tests.support.poison_plugin import UNFIT, install
from tests.support.servers import ROOT, Server, ServerSpec

pytestmark = pytest.mark.server

LAUNCHER = (sys.executable, "-m", "sgl_esft.launch_server")
OVERFLOWS = "overflows"
UNFIT_ENDS = "the engine cannot take this request (OverflowError): it was ended alone"
GREEDY = {"temperature": 0}
RANDOM = {"temperature": 1.0}
CUT = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
GRAMMAR = {"temperature": 0, "regex": "[a-z]{4,8}"}
QUICK = ((GREEDY, False), (CUT, True), (GRAMMAR, True))  # of `make test`
NOT_FINITE = "LogitsNotFiniteError: the model's logits for this request are not finite"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from started(tmp_path_factory.mktemp("contained"))


def started(folder: Path, *args: str) -> Iterator[Server]:
    """A server of that layout that has the poison and the adapter that overflows, until closed."""
    path = os.pathsep.join(map(str, (install(folder), ROOT)))
    program = ("env", f"PYTHONPATH={path}", *LAUNCHER)
    server = Server(ServerSpec(args=args, program=program), folder / "log")
    try:
        server.wait_until_ready()
        response = server.load(OVERFLOWS, overflowing(folder / OVERFLOWS))
        assert response.status_code == 200, response.text
        yield server
    finally:
        server.stop()


def overflowing(folder: Path) -> Path:
    """An adapter whose weights are finite, and whose products are not."""
    shutil.copytree(zoo.adapter_paths()["reverse"], folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for weight in weights.values():
            weight.copy_(torch.finfo(weight.dtype).max * weight.sign())
        save_file(weights, file)
    return folder


def greedy(server: Server) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"text": "coffee -> ", "adapter": "reverse", "sampling_params": parameters}
    return server.post("/generate", body).json()["output_ids"]


def ended_by(server: Server, body: dict[str, Any]) -> str:
    """What a request's error says, while another's greedy answer is as it is alone."""
    alone = greedy(server)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(greedy, server)
        answer = server.post("/generate", body)
        assert beside.result() == alone
    assert greedy(server) == alone
    if not body.get("stream"):
        assert answer.status_code == 500, answer.text
        return str(answer.json()["error"]["message"])
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    assert not last["output_ids"]
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    return str(reason["message"])


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_cannot_be_taken_in(server: Server, stream: bool) -> None:
    assert UNFIT_ENDS in ended_by(server, {"input_ids": UNFIT, "stream": stream})


@pytest.mark.parametrize(
    ("sampling", "stream"),
    [
        pytest.param(
            sampling, stream, marks=() if (sampling, stream) in QUICK else pytest.mark.full
        )
        for sampling in (GREEDY, RANDOM, CUT, GRAMMAR)
        for stream in (False, True)
    ],
)
def test_logits_that_are_not_finite(server: Server, sampling: Any, stream: bool) -> None:
    body = {"text": "engine -> ", "adapter": OVERFLOWS, "stream": stream}
    parameters = {**sampling, "max_new_tokens": 8}
    message = ended_by(server, {**body, "sampling_params": parameters, "return_logprob": True})
    assert message.startswith(NOT_FINITE)
    assert f"the weights of adapter '{OVERFLOWS}' overflow" in message
