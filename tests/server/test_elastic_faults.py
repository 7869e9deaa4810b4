"""Processes of a live elastic server are killed and stopped under load; no stream notices.

One server for the whole file, and one steady load for each fault. What is right is what the same
server answered before the first fault. Each test scales to the size that it needs. Any process at
any phase: test_fault_matrix.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.elastic_faults import (
    CHANGED,
    HANG_S,
    SOON_S,
    Elastic,
    ended,
    recoveries,
)
from tests.server.fault_cells import WORKER_HANG_S
from tests.support.processes import assert_gone, family

pytestmark = [pytest.mark.server, pytest.mark.alone]


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    elastic = Elastic(tmp_path_factory.mktemp("faults") / "log")
    try:
        elastic.learn()
        yield elastic
    finally:
        elastic.server.stop()


def test_a_rank_is_killed(elastic: Elastic) -> None:
    elastic.be_of_size(1)
    elastic.wait_for_standby(0)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.rank(name), signal.SIGKILL)
        assert elastic.wait_for_another(name, SOON_S) < SOON_S
        elastic.wait_for(elastic.is_ready, SOON_S)
    assert name not in elastic.instances()[1]


def test_a_memory_worker_dies_during_a_scale(elastic: Elastic) -> None:
    """It is rolled back, and the next one succeeds on a new worker."""
    elastic.be_of_size(1)
    before = set(elastic.instances()[1])
    source = elastic.worker(0)
    os.kill(source, signal.SIGSTOP)  # so that copies from there are in progress
    try:
        began = elastic.server.post("/v1/scale", {"dp_size": 2}).json()
        target = elastic.wait_for(lambda: elastic.worker(1), 20)
        os.kill(target, signal.SIGKILL)
    finally:
        os.kill(source, signal.SIGCONT)
    operation = elastic.wait_for(lambda: ended(elastic, began["id"]), 60)
    assert operation["state"] == "rolled_back"
    assert operation["error"]["type"] == "MemoryWorkerError"
    assert operation["undo_errors"] == []
    assert elastic.worker(1) is None
    assert before <= set(elastic.instances()[1])
    with elastic.load():
        pass


@pytest.mark.full
def test_a_supervisor_is_killed(elastic: Elastic) -> None:
    elastic.be_of_size(1)
    elastic.wait_for_standby(0)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.supervisor(name), signal.SIGKILL)
        assert elastic.wait_for_another(name, SOON_S) < SOON_S


@pytest.mark.full
def test_a_standby_hangs_when_it_is_needed(elastic: Elastic) -> None:
    """Another one is started, and the scale succeeds."""
    elastic.be_of_size(1)
    standby = elastic.wait_for_standby(0, 1)
    with elastic.load():
        os.kill(elastic.rank(standby, 1), signal.SIGSTOP)
        operation = elastic.scaled(2)
    assert operation["state"] == "succeeded", operation
    assert standby not in elastic.instances()[1]


def test_one_of_two_ranks_is_stopped(elastic: Elastic) -> None:
    elastic.be_of_size(2)
    elastic.wait_for_standby(0, 1)
    name, _ = elastic.instances()
    with elastic.load():
        os.kill(elastic.rank(name, 1), signal.SIGSTOP)
        began = time.monotonic()
        elastic.wait_for(lambda: not elastic.is_ready(), SOON_S)
        elastic.wait_for_another(name, HANG_S * 2 + SOON_S)
        assert time.monotonic() - began > HANG_S / 2
        elastic.wait_for(elastic.is_ready, SOON_S)
    assert name not in elastic.instances()[1]


@pytest.mark.full
def test_the_old_instance_hangs_during_a_scale(elastic: Elastic) -> None:
    """It cannot freeze; the scale goes on to the new one, with the tokens that came by."""
    elastic.be_of_size(1)
    elastic.wait_for_standby(0, 1)
    name, _ = elastic.instances()
    before = recoveries(elastic)
    with elastic.load():
        os.kill(elastic.rank(name, 0), signal.SIGSTOP)
        operation = elastic.scaled(2)
    assert operation["state"] == "succeeded", operation
    assert elastic.instances()[0] != name
    assert recoveries(elastic) == before, "the scale did it"


@pytest.mark.full
def test_a_memory_worker_hangs_while_kv_shrinks(elastic: Elastic) -> None:
    """Nobody knows whether the pages are gone: the rank gets them again before the next scale."""
    elastic.be_of_size(2)
    elastic.wait_for_standby(0)
    before, num_slots = elastic.placement(), elastic.num_kv_slots(0)
    worker = elastic.worker(0)
    with elastic.load():
        os.kill(worker, signal.SIGSTOP)
        try:
            operation = elastic.scaled(1)
        finally:
            os.kill(worker, signal.SIGCONT)
    assert operation["state"] == "rolled_back"
    assert operation["error"]["type"] == "MemoryWorkerError"
    assert [step["kind"] for step in operation["steps"] if step["state"] == "failed"] == [
        "shrink_kv"
    ]
    assert operation["finished_s"] - operation["created_s"] < WORKER_HANG_S + SOON_S
    assert elastic.placement() == before
    with elastic.load():
        assert elastic.scaled(2)["state"] == "succeeded", "it gives back what is pending, no more"
        assert elastic.num_kv_slots(0) == num_slots
        assert elastic.scaled(1)["state"] == "succeeded"
    assert elastic.num_kv_slots(0) < num_slots


@pytest.mark.full
@pytest.mark.parametrize("change", ["unload", "load"])
def test_a_rank_is_killed_in_an_adapters_change(elastic: Elastic, change: str) -> None:
    """It has told its memory worker; its table of adapters still says, or does not yet say, so.

    The change is finished by the rank that replaces it, and no page is lost.
    """
    elastic.be_of_size(1)
    elastic.wait_for_standby(0)
    with_it = elastic.expert_slots(0)
    if change == "load":
        assert elastic.unload().ok
    name, _ = elastic.instances()
    worker = elastic.worker(0)
    with ThreadPoolExecutor(1) as pool:
        os.kill(worker, signal.SIGSTOP)
        answer = pool.submit(elastic.unload if change == "unload" else elastic.load_again)
        time.sleep(1.0)  # its files are read; it asks the worker for pages, or gives them back
        os.kill(elastic.rank(name), signal.SIGKILL)
        os.kill(worker, signal.SIGCONT)
        assert elastic.wait_for_another(name, SOON_S) < SOON_S
        assert answer.result(30).ok, answer.result().text
    assert (CHANGED in elastic.server.adapter_names()) == (change == "load")
    if change == "unload":
        assert elastic.expert_slots(0) != with_it
        assert elastic.load_again().ok
    assert elastic.expert_slots(0) == with_it
    with elastic.load():
        pass


def test_nothing_outlives_the_front(elastic: Elastic) -> None:
    """The last of all: afterwards there is no server."""
    pids = family(elastic.server.process.pid)
    assert len(pids) > 6
    elastic.server.process.kill()
    elastic.server.process.wait()
    assert_gone(pids)
