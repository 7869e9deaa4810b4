"""With a copy of every expert on another device, a lost device is made good from memory alone.

Whether the checkpoint's and the adapters' weights are opened is what the kernel says, of whichever
process; and requests go on all the while, with the answers of before.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from sgl_elastic.types import READS
from sgl_esft import zoo
from tests.server.elastic_faults import HANG_S, Elastic, ended, is_idle, recoveries
from tests.support.opened_files import OpenedFiles
from tests.support.servers import ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.full]

NUM_EXPERTS = 16  # of the demo model: as many copies leave each expert on both devices
ARGS = ("--elastic", "--max-devices", "2", "--dp-size", "2", "--standby-ranks", "4")
ARGS += ("--max-adapters", "6", "--max-experts-per-adapter", "8", "--device-memory", "96MiB")
ARGS += ("--adapter-memory", "24MiB", "--hang-timeout", str(HANG_S))
ARGS += ("--redundant-experts", str(NUM_EXPERTS), "--heat-every", "1")
DEVICES = (0, 1)
STANDBYS = ((0,), (1,), DEVICES)
RECOVERY_S = 60.0


@dataclass(frozen=True)
class Watched:
    """A server, and what is opened of its model's folders."""

    elastic: Elastic
    opened: OpenedFiles

    def weights(self) -> list[str]:
        """Files with weights that were opened since the last call."""
        return [name for name in self.opened.names() if name.endswith(".safetensors")]

    def copies(self) -> list[dict[str, Any]]:
        found = requests.get(f"{self.elastic.server.url}/v1/instances", timeout=30).json()
        devices: list[dict[str, Any]] = found["redundant_experts"]["devices"]
        return devices

    def has_all_twice(self) -> bool:
        return [each["experts_only_here"] for each in self.copies()] == [0] * len(DEVICES)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("lost-copies")
    base = shutil.copytree(zoo.base_path(), folder / "base")
    paths = {
        name: shutil.copytree(path, folder / name) for name, path in zoo.adapter_paths().items()
    }
    with OpenedFiles([base, *paths.values()]) as opened:
        elastic = Elastic(folder / "log", ServerSpec(base, tuple(paths.items()), ARGS))
        try:
            elastic.learn()
            yield Watched(elastic, opened)
        finally:
            elastic.server.stop()


def be_ready(watched: Watched) -> None:
    """Two devices that both have all experts, and standbys that have opened what they open."""
    elastic = watched.elastic
    elastic.be_of_size(len(DEVICES))
    for device_ids in STANDBYS:
        elastic.wait_for_standby(*device_ids)
    elastic.wait_for(lambda: is_idle(elastic) and watched.has_all_twice(), RECOVERY_S)


def kinds_of(elastic: Elastic, operation_id: str) -> set[str]:
    operation = ended(elastic, operation_id)
    assert operation is not None
    return {step["kind"] for step in operation["steps"]}


def test_the_weights_were_opened_when_the_server_started(watched: Watched) -> None:
    """So that a reading is seen where there is one."""
    assert {"model.safetensors"} <= set(watched.weights())


@pytest.mark.parametrize("device_id", DEVICES)
def test_a_loss_reads_nothing_from_disk(watched: Watched, device_id: int) -> None:
    """Its rank and its worker may be missed one after the other: that is two recoveries then."""
    be_ready(watched)
    elastic = watched.elastic
    name, _ = elastic.instances()
    pids = [elastic.rank(name, DEVICES.index(device_id)), elastic.worker(device_id)]
    left = [device for device in DEVICES if device != device_id]
    known = recoveries(elastic)
    watched.weights()
    with elastic.load():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        elastic.wait_for(
            lambda: elastic.placement()["device_ids"] == left and is_idle(elastic), RECOVERY_S
        )
    assert watched.weights() == []
    new = set(recoveries(elastic)) - set(known)
    assert new
    assert not READS & set().union(*(kinds_of(elastic, each) for each in new))
