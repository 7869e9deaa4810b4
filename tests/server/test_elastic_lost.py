"""A device is lost under load: its rank, its memory worker, or both. The others go on.

One server of two devices with standbys for each one of them and for both. What is right is what the
same server answered before the first loss. After each loss the device is taken back by a scale.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import pytest

from bench.elasticmoe.load import Stream
from sgl_esft import zoo
from tests.server.elastic_faults import HANG_S, SOON_S, Elastic, recoveries
from tests.server.fault_cells import check_processes, is_idle
from tests.support.servers import ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.alone]

ARGS = ("--elastic", "--max-devices", "2", "--dp-size", "2", "--standby-ranks", "4")
SPEC = ServerSpec(args=(*ARGS, "--device-memory", "64MiB", "--hang-timeout", str(HANG_S)))
DEVICES = (0, 1)
STANDBYS = ((0,), (1,), DEVICES)
KINDS = ("rank", "worker", "both")
RECOVERY_S = 60.0  # of the whole operation, which is over long after requests go on


@dataclass(frozen=True)
class Loss:
    """What is killed on which device, how long after the load has begun."""

    kind: str
    device_id: int
    delay_s: float


def losses(count: int, seed: int) -> list[Loss]:
    """Each kind equally often, in an order of chance."""
    rng = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(count)]
    rng.shuffle(kinds)
    return [Loss(kind, rng.choice(DEVICES), rng.random()) for kind in kinds]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    elastic = Elastic(tmp_path_factory.mktemp("lost") / "log", SPEC)
    try:
        elastic.learn()
        yield elastic
    finally:
        elastic.server.stop()


def stand_by(elastic: Elastic) -> None:
    """Both devices serve, and standbys of all sizes are there."""
    elastic.wait_for(lambda: is_idle(elastic), RECOVERY_S)
    elastic.be_of_size(len(DEVICES))
    for device_ids in STANDBYS:
        elastic.wait_for_standby(*device_ids)
    elastic.wait_for(lambda: is_idle(elastic), RECOVERY_S)


def carry_out(elastic: Elastic, loss: Loss) -> None:
    """One loss under load, then all that must hold."""
    stand_by(elastic)
    before = elastic.mapped_slots()
    num_fds = elastic.wait_for(lambda: fds_of(elastic), SOON_S)
    known = recoveries(elastic)
    with elastic.load() as streams:
        time.sleep(loss.delay_s)
        killed_s = kill(elastic, loss)
        elastic.wait_for(lambda: recoveries(elastic) != known and is_idle(elastic), RECOVERY_S)
    left = [d for d in DEVICES if d != loss.device_id or loss.kind == "rank"]
    assert elastic.placement()["device_ids"] == left
    silence_s = longest_silence_s(streams, killed_s)
    print(f"{loss}: {len(streams)} answers, no token for {silence_s:.2f} s")  # noqa: T201
    assert silence_s < SOON_S
    with elastic.load():
        elastic.be_of_size(len(DEVICES))
    stand_by(elastic)
    assert elastic.mapped_slots() == before
    check_processes(elastic)
    elastic.wait_for(lambda: fds_of(elastic) <= num_fds, SOON_S)


def kill(elastic: Elastic, loss: Loss) -> float:
    """When."""
    name, _ = elastic.instances()
    pids = []
    if loss.kind != "worker":
        pids.append(elastic.rank(name, DEVICES.index(loss.device_id)))
    if loss.kind != "rank":
        pids.append(elastic.worker(loss.device_id))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def longest_silence_s(streams: Sequence[Stream], since_s: float) -> float:
    """How long no stream got a token, after this moment or across it."""
    times = sorted(at for stream in streams for at in stream.token_s)
    return max(b - a for a, b in itertools.pairwise(times) if b > since_s)


def fds_of(elastic: Elastic) -> int:
    return psutil.Process(elastic.server.process.pid).num_fds()


def test_both_ranks_answer_for_adapters_from_the_start(elastic: Elastic) -> None:
    """Before any scale: each question to the ranks has as many answers as there are ranks."""
    for _ in range(2):
        assert elastic.server.unload("sum").status_code == 200
        loaded = elastic.server.load("sum", zoo.adapter_paths()["sum"])
        assert loaded.status_code == 200, loaded.text


@pytest.mark.parametrize("loss", losses(len(KINDS), seed=3), ids=lambda loss: loss.kind)
def test_a_device_is_lost(elastic: Elastic, loss: Loss) -> None:
    carry_out(elastic, loss)


@pytest.mark.soak
def test_twenty_devices_are_lost(elastic: Elastic) -> None:
    for loss in losses(20, seed=20):
        carry_out(elastic, loss)
