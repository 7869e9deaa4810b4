"""A live server with copies of hot experts: the same answers, whatever is copied, lost or scaled.

What is right is what it answered on one device, before anything was copied. Its checkpoint is
deleted once it serves, so what comes later comes from memory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests

from bench.elasticmoe.load import Ask, differences, make_asks, scale, steady
from sgl_esft import zoo
from tests.server.scaling import SCALE_S, wait_until_idle
from tests.support.servers import Server, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.full]

LATER = "sum"  # loaded while there are copies
FIRST = tuple(name for name in zoo.adapter_paths() if name != LATER)[:2]
NUM_COPIES = 2

Expected = Mapping[Ask, tuple[int, ...]]


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return make_asks(FIRST, 24, range(8, 17))


@pytest.fixture(scope="module")
def later_asks() -> list[Ask]:
    return make_asks([LATER], 8, range(8, 17), seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("redundant")
    base = shutil.copytree(zoo.base_path(), folder / "base")
    adapters = {name: shutil.copytree(zoo.adapter_paths()[name], folder / name) for name in FIRST}
    args = ("--elastic", "--max-devices", "2", "--standby-ranks", "3", "--max-adapters", "4")
    args += ("--max-experts-per-adapter", "8", "--device-memory", "64MiB")
    args += ("--adapter-memory", "12MiB", "--redundant-experts", str(NUM_COPIES))
    args += ("--heat-every", "1", "--enable-metrics")
    found = Server(ServerSpec(base, tuple(adapters.items()), args), folder / "log")
    try:
        found.wait_until_ready()
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def expected(server: Server, asks: list[Ask], later_asks: list[Ask]) -> Expected:
    """Of one device, which computes everything; test_elastic.py has that equal a static server."""
    load(server)
    streams = asyncio.run(steady(server.url, [*asks, *later_asks], 8))
    assert not [stream.error for stream in streams if stream.error]
    call(server, "unload_lora_adapter", {"lora_name": LATER})
    return {stream.ask: stream.output_ids for stream in streams}


def load(server: Server) -> None:
    path = str(zoo.adapter_paths()[LATER])
    call(server, "load_lora_adapter", {"lora_name": LATER, "lora_path": path})


def call(server: Server, route: str, body: dict[str, str]) -> None:
    answer = requests.post(f"{server.url}/{route}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def redundancy(server: Server) -> dict[str, Any]:
    """While copies are renewed there are fewer: not then."""
    wait_until_idle(server)
    found: dict[str, Any] = requests.get(f"{server.url}/v1/instances", timeout=30).json()
    return found["redundant_experts"]  # type: ignore[no-any-return]


def num_copies(server: Server) -> list[int]:
    return [each["copies"] for each in redundancy(server)["devices"]]


def wrong(server: Server, asks: list[Ask], expected: Expected) -> list[Any]:
    return differences(asyncio.run(steady(server.url, asks, 8)), expected)


def scaled(server: Server, size: int) -> None:
    """After a renewal of copies where one is under way: it is a scale too."""
    wait_until_idle(server)
    operation = asyncio.run(scale(server.url, {"dp_size": size}))
    assert operation["state"] == "succeeded", (operation, server.log())


def num_layers(server: Server) -> int:
    return len(requests.get(f"{server.url}/v1/heat", timeout=30).json()["layers"])


def test_one_device_has_nobody_to_copy_to(
    server: Server, asks: list[Ask], expected: Expected
) -> None:
    assert wrong(server, asks, expected) == []
    assert num_copies(server) == [0]


def test_two_devices_share_the_hot_experts_and_answer_alike(
    server: Server, asks: list[Ask], expected: Expected
) -> None:
    scaled(server, 2)
    assert sum(num_copies(server)) == NUM_COPIES * num_layers(server)
    found = redundancy(server)
    assert found["imbalance"] < found["imbalance_without"]
    metrics = requests.get(f"{server.url}/metrics", timeout=30).text
    for device_id, count in enumerate(num_copies(server)):
        assert f'sgl_elastic:expert_copies{{device="{device_id}"}} {count}.0' in metrics
    assert wrong(server, asks, expected) == []


def test_an_adapter_loaded_now_is_copied_too(
    server: Server, asks: list[Ask], later_asks: list[Ask], expected: Expected
) -> None:
    load(server)
    assert wrong(server, [*asks, *later_asks], expected) == []
    scaled(server, 2)  # renews, by what was asked since
    assert sum(num_copies(server)) == NUM_COPIES * num_layers(server)
    assert wrong(server, [*asks, *later_asks], expected) == []


def test_copies_of_a_lost_instance_are_forgotten_and_chosen_again(
    server: Server, asks: list[Ask], later_asks: list[Ask], expected: Expected
) -> None:
    serving = requests.get(f"{server.url}/v1/instances", timeout=30).json()["instances"][0]
    os.kill(serving["pid"], signal.SIGKILL)
    assert wrong(server, [*asks, *later_asks], expected) == []
    deadline = time.monotonic() + SCALE_S
    while sum(num_copies(server)) == 0 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert sum(num_copies(server)) == NUM_COPIES * num_layers(server)
    assert wrong(server, [*asks, *later_asks], expected) == []


def test_down_to_one_device_and_up_again(
    server: Server, asks: list[Ask], later_asks: list[Ask], expected: Expected
) -> None:
    scaled(server, 1)
    assert num_copies(server) == [0]
    assert wrong(server, [*asks, *later_asks], expected) == []
    scaled(server, 2)
    assert sum(num_copies(server)) == NUM_COPIES * num_layers(server)
    assert wrong(server, [*asks, *later_asks], expected) == []
