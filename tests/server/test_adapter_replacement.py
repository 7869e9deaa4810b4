"""An adapter replaced while it answers; more adapters than host memory holds. Real servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_esft import zoo
from tests.support.families import MergedDemo
from tests.support.servers import Server, ServerPool, ServerSpec
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.full]

NAME, OLD, NEW = "changing", "caesar", "reverse"
PROMPT = zoo.held_out(OLD, 1)[0].prompt
NUM_SHORT, NUM_LONG = 24, 200

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def merged(server_pool: ServerPool, merged_demo: MergedDemo) -> dict[tuple[str, int], Tokens]:
    """(version, number of tokens) -> what the merged model answers."""
    server = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    answers = {}
    for version in (OLD, NEW):
        server.use_weights(merged_demo.get(version))
        for num_tokens in (NUM_SHORT, NUM_LONG):
            (answers[version, num_tokens],) = server.token_ids([PROMPT], [None], num_tokens)
    server.use_weights(zoo.base_path())
    assert answers[OLD, NUM_SHORT] != answers[NEW, NUM_SHORT]
    return answers


@pytest.fixture(scope="module")
def server(server_pool: ServerPool, merged: object) -> Server:
    """Three slots, and host memory for four of the adapters."""
    sizes = sorted(
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in zoo.adapter_paths().values()
    )
    args = ("--max-adapters", "3", "--max-experts-per-adapter", "8")
    args += ("--adapter-host-memory", f"{sum(sizes[-4:])}B", "--enable-metrics")
    return server_pool.get(ServerSpec(zoo.base_path(), (), args))


@pytest.fixture
def changing(server: Server) -> Iterator[Server]:
    """The adapter is loaded in its old version."""
    assert server.load(NAME, zoo.adapter_paths()[OLD]).status_code == 200
    yield server
    assert server.unload(NAME).status_code == 200


def replace(server: Server, version: str) -> dict[str, Any]:
    response = requests.patch(
        f"{server.url}/v1/adapters/{NAME}?wait=true",
        json={"path": str(zoo.adapter_paths()[version])},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def described(server: Server, name: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{server.url}/v1/adapters/{name}", timeout=30).json()
    return found


class Stream:
    """A long answer that is on its way."""

    def __init__(self, server: Server) -> None:
        self.token_ids: Tokens = ()
        self.has_begun = threading.Event()
        self._server = server
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = {
            "text": PROMPT,
            "lora_path": NAME,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_LONG, "ignore_eos": True},
        }
        url = f"{self._server.url}/generate"
        with requests.post(url, json=body, stream=True, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    self.token_ids = tuple(json.loads(line[6:])["output_ids"])
                    self.has_begun.set()

    def finish(self) -> Tokens:
        self._thread.join(timeout=120)
        assert not self._thread.is_alive()
        return self.token_ids


def test_a_replacement_lets_the_old_version_finish(
    changing: Server, merged: dict[tuple[str, int], Tokens]
) -> None:
    before = described(changing, NAME)
    assert changing.token_ids([PROMPT], [NAME], NUM_SHORT) == [merged[OLD, NUM_SHORT]]
    stream = Stream(changing)
    assert stream.has_begun.wait(60)
    after = replace(changing, NEW)
    assert after["digest"] != before["digest"]
    assert [old["digest"] for old in after["draining_versions"]] == [before["digest"]]
    # The prompt is in the prefix cache, from the old version.
    short = changing.token_ids([PROMPT] * 2, [NAME] * 2, NUM_SHORT)
    assert short == [merged[NEW, NUM_SHORT]] * 2
    assert len(stream.token_ids) < NUM_LONG, "the stream ended before it was overtaken"
    assert stream.finish() == merged[OLD, NUM_LONG]
    assert changing.token_ids([PROMPT], [NAME], NUM_LONG) == [merged[NEW, NUM_LONG]]
    wait_until_drained(changing)


def test_replacing_back_and_forth_never_mixes(
    changing: Server, merged: dict[tuple[str, int], Tokens]
) -> None:
    for version in (NEW, OLD, NEW, OLD):
        replace(changing, version)
        answers = changing.token_ids([PROMPT] * 2, [NAME] * 2, NUM_SHORT)
        assert answers == [merged[version, NUM_SHORT]] * 2
    wait_until_drained(changing)


def test_a_replacement_that_fails_changes_nothing(
    changing: Server, merged: dict[tuple[str, int], Tokens], tmp_path: Path
) -> None:
    before = described(changing, NAME)
    response = requests.patch(
        f"{changing.url}/v1/adapters/{NAME}?wait=true", json={"path": str(tmp_path)}, timeout=60
    )
    assert response.status_code == 400, response.text
    assert described(changing, NAME)["digest"] == before["digest"]
    assert changing.token_ids([PROMPT], [NAME], NUM_SHORT) == [merged[OLD, NUM_SHORT]]


def test_adapters_leave_host_memory_and_come_back(
    server: Server, merged: dict[tuple[str, int], Tokens]
) -> None:
    for name, folder in zoo.adapter_paths().items():
        assert server.load(name, folder).status_code == 200
    listing = requests.get(f"{server.url}/v1/adapters", timeout=30).json()
    assert listing["host"]["used_bytes"] <= listing["host"]["budget_bytes"]
    assert len(server.adapter_names()) < len(zoo.adapter_paths())
    for _ in range(2):
        for name in zoo.adapter_paths():
            answers = server.token_ids([PROMPT], [name], NUM_SHORT)
            if name in (OLD, NEW):
                assert answers == [merged[name, NUM_SHORT]]
    for name in zoo.adapter_paths():
        assert server.unload(name).status_code == 200


def wait_until_drained(server: Server) -> None:
    wait_until(lambda: not described(server, NAME)["draining_versions"], 30)
