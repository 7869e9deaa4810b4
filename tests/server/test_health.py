"""Real servers are drained, their processes killed and stopped; each test ends its own server."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import requests

from sgl_esft.health.phases import EXIT_CUT, EXIT_FAILED
from tests.server.ending import ELASTIC, Mortal, Stream, mortal
from tests.support.processes import command_line
from tests.support.servers import Server, ServerSpec
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.alone]

SOON_S = 5.0
LONG = 480  # tokens, nearly all that the demo's context has room for: a second or two


def refused(server: Mortal) -> requests.Response:
    return server.server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})


def test_a_rank_is_stopped_goes_on_and_is_killed(tmp_path: Path) -> None:
    with mortal(tmp_path) as server:
        ready = server.get("/readyz").json()
        assert ready["ready"]
        assert [rank["rank"] for rank in ready["ranks"]] == [0]
        time.sleep(2.5)
        server.wait_until_ready()  # an idle rank gives signs of life
        (rank,) = server.named("scheduler")
        os.kill(rank, signal.SIGSTOP)
        assert wait_until(lambda: not server.is_ready(), SOON_S) > 0.5
        assert "rank 0" in server.get("/readyz").json()["reason"]
        assert server.get("/healthz").status_code == 200
        os.kill(rank, signal.SIGCONT)
        server.wait_until_ready()
        stream = Stream(server.server.url, LONG)
        stream.wait_for_tokens()
        server.wait_until_ready()  # a busy rank does
        os.kill(rank, signal.SIGKILL)
        assert server.ends_with(15.0) == EXIT_FAILED
        stream.end()
        assert stream.error == "EngineLostError"
        assert f"process {rank}" in stream.last["error"]["message"]


@pytest.mark.full
def test_the_detokenizer_is_stopped_for_good(tmp_path: Path) -> None:
    with mortal(tmp_path) as server:
        stream = Stream(server.server.url, LONG)
        stream.wait_for_tokens()
        (detokenizer,) = server.named("detokenizer")
        os.kill(detokenizer, signal.SIGSTOP)
        wait_until(lambda: not server.is_ready(), SOON_S)
        assert server.ends_with(20.0) == EXIT_FAILED
        stream.end()
        assert stream.error == "EngineLostError"


def test_a_drain_answers_everything_that_runs(tmp_path: Path) -> None:
    """By REST, then one signal to the whole group, as a preStop hook and a service manager do."""
    with mortal(tmp_path) as server:
        stream = Stream(server.server.url, LONG)
        stream.wait_for_tokens()
        answer = server.server.post("/v1/drain", {"timeout_s": 60})
        assert (answer.status_code, answer.json()["in_flight"]) == (202, 1)
        os.killpg(server.pid, signal.SIGTERM)
        ready = server.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is draining")
        answer = refused(server)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "DrainingError")
        assert int(answer.headers["retry-after"]) > 0
        assert [server.get(route).status_code for route in ("/healthz", "/ready")] == [200, 503]
        assert server.ends_with(60.0) == 0
        stream.end()
        assert stream.is_done
        assert stream.last["meta_info"]["completion_tokens"] == LONG


@pytest.mark.full
def test_a_second_signal_forces(tmp_path: Path) -> None:
    with mortal(tmp_path) as server:
        Stream(server.server.url, LONG).wait_for_tokens()
        os.kill(server.named("scheduler")[0], signal.SIGSTOP)  # so that there is something to do
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: not server.is_ready(), SOON_S)
        os.kill(server.pid, signal.SIGINT)
        assert server.ends_with(SOON_S) == 130


@pytest.mark.full
def test_a_signal_while_it_starts(tmp_path: Path) -> None:
    server = Server(ServerSpec(), tmp_path / "log")
    try:
        found = Mortal(server)
        wait_until(lambda: "2/3" in server.log() and len(found.named("spawn_main")) > 1, 120.0)
        os.killpg(server.process.pid, signal.SIGTERM)
        assert found.ends_with(15.0) == 143
    finally:
        server.stop()


@pytest.mark.full
def test_elastic_ends_without_its_detokenizer(tmp_path: Path) -> None:
    """How it recovers ranks, and is not ready meanwhile: test_elastic_faults.py."""
    with mortal(tmp_path, *ELASTIC) as server:
        stream = Stream(server.server.url, LONG)
        stream.wait_for_tokens()
        (detokenizer,) = server.named("detokenizer")
        os.kill(detokenizer, signal.SIGKILL)
        assert server.ends_with(15.0) == EXIT_FAILED
        stream.end()
        assert stream.error == "EngineLostError"


@pytest.mark.full
def test_elastic_drains_and_cuts_what_takes_too_long(tmp_path: Path) -> None:
    with mortal(tmp_path, *ELASTIC, "--drain-timeout", "2") as server:
        folder = folder_of(server)
        stream = Stream(server.server.url, LONG)
        stream.wait_for_tokens()
        began = time.monotonic()
        os.kill(rank_of(server, serving(server)), signal.SIGSTOP)
        os.killpg(server.pid, signal.SIGINT)
        wait_until(lambda: refused(server).status_code == 503, SOON_S)
        assert server.ends_with(15.0) == EXIT_CUT
        assert time.monotonic() - began > 1.5
        stream.end()
        assert stream.error == "DrainTimeoutError"
        assert not folder.exists()


def serving(server: Mortal) -> str:
    return str(server.get("/v1/instances").json()["serving"]["instance_id"])


def rank_of(server: Mortal, instance: str) -> int:
    """The one rank of an instance."""
    found = server.get("/v1/instances").json()["instances"]
    supervisor = next(each["pid"] for each in found if each["instance_id"] == instance)
    shown = subprocess.run(
        ["pgrep", "-P", str(supervisor), "-f", "scheduler"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(shown.stdout.split()[0])


def folder_of(server: Mortal) -> Path:
    """Where an elastic server has its sockets; it is there now."""
    (worker,) = server.named("sgl_elastic.memory.worker")
    words = " ".join(command_line(worker)).split()
    folder = Path(words[words.index("--socket") + 1]).parent
    assert folder.exists()
    return folder
