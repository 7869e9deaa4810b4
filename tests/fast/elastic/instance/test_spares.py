"""Spares: which one is copied (pure), and real processes and copies without SGLang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_elastic.errors import ElasticConfigError, EngineFailedError
from sgl_elastic.instance import supervise
from sgl_elastic.instance.spares import Spare, SparePool, Spares, SpareState
from sgl_elastic.instance.supervise import EngineSettings
from sgl_elastic.processes import UNKNOWN_STATUS, LocalProcess
from tests.support.processes import is_there, open_files, stop_process
from tests.support.servers import ROOT
from tests.support.waiting import wait_until

LIGHT = "tests.support.light_spare"
FOREVER, SHORT = {"LIGHT_SECONDS": "60"}, {"LIGHT_SECONDS": "0"}
STARTING, READY = SpareState.STARTING, SpareState.READY


def test_the_oldest_that_is_ready_is_copied() -> None:
    table = Spares(3).add(7).add(8)
    assert table.num_missing == 1
    assert table.choose() == 7, "none is ready: the one that will be first"
    table = table.note_ready(8)
    assert table.choose() == 8
    table = table.note_ready(7)
    assert table.choose() == 7
    assert table.drop(7).choose() == 8
    assert table.drop(7).drop(8).choose() is None
    assert table.drop(7).note_ready(7) == table.drop(7), "it was dropped while it imported"


def test_a_number_that_makes_no_sense() -> None:
    assert Spares(0).num_missing == 0
    with pytest.raises(ElasticConfigError, match="-1"):
        Spares(-1)


events = st.lists(st.tuples(st.sampled_from(["add", "ready", "drop"]), st.integers(1, 5)))


@given(st.integers(0, 4), events)
def test_ready_ones_go_first_and_none_is_forgotten(
    wanted: int, happened: list[tuple[str, int]]
) -> None:
    table, states = Spares(wanted), dict[int, SpareState]()
    for what, pid in happened:
        if what == "add" and pid not in states:
            table, states[pid] = table.add(pid), STARTING
        elif what == "ready":
            table = table.note_ready(pid)
            states |= {pid: READY} if pid in states else {}
        elif what == "drop":
            table = table.drop(pid)
            states.pop(pid, None)
        assert dict(table.members) == states
        assert table.num_missing == max(wanted - len(states), 0)
        chosen = table.choose()
        assert (chosen is None) == (not states)
        assert chosen is None or states[chosen] is READY or READY not in states.values()


class Scene:
    """A pool of light spares, and instances of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.lost = threading.Semaphore(0)
        self.instead: list[LocalProcess] = []  # of instances that did not come from a spare
        self.pools: list[SparePool] = []
        monkeypatch.chdir(ROOT)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        self.ways: list[str] = []  # in which processes were told to give way; they do not
        monkeypatch.setattr(
            LocalProcess, "give_way", lambda _, how, at_most_s=0.0: self.ways.append(how)
        )
        monkeypatch.setattr(supervise, "start", self.start_instead)

    def pool(self, num_spares: int = 1, **environment: str) -> SparePool:
        start = partial(Spare, module=LIGHT)
        pool = SparePool(num_spares, lambda _: environment, self.lost.release, start)
        self.pools.append(pool)
        return pool

    def start_instead(self, spec: Any, environment: object) -> LocalProcess:
        self.instead.append(LocalProcess(["sleep", "60"], start_new_session=True))
        return self.instead[-1]

    def instance(self, pool: SparePool, name: str, environment: dict[str, str]) -> Any:
        settings = EngineSettings(
            self.directory, (), "t", "d", "host", 4096, 9, 9, environment=lambda _: environment
        )
        return pool.start_instance(settings, name, (0, 2), ())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path, monkeypatch)
    # What an instance tells goes to the path of its requests' address.
    monkeypatch.setattr(
        EngineSettings, "input_ipc", lambda self, name: f"{self.directory}/{name}.told"
    )
    yield scene
    pids = [each.pid for pool in scene.pools for each in pool.seen()]
    for pool in scene.pools:
        pool.close()
        pool.close()
    for process in scene.instead:
        process.kill_group()
    assert not any(map(is_there, pids)), "a spare outlives its pool"


def told_by(scene: Scene, name: str) -> dict[str, Any]:
    path = scene.directory / f"{name}.told"
    wait_until(path.exists, 30.0)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_an_instance_is_a_copy_with_what_it_was_given_and_nothing_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = scene.pool(LIGHT_SPARE="numpy")  # its OpenBLAS would have threads
    pool.fill(lambda: False)
    assert [each.state for each in pool.seen()] == [READY]
    monkeypatch.setenv("SINCE_THEN", "1")
    instance = scene.instance(pool, "i7", {**FOREVER, "OMP_NUM_THREADS": "3"})
    told = told_by(scene, "i7")
    assert told["environment"] == {**os.environ, **FOREVER, "OMP_NUM_THREADS": "3"}
    assert told["stdin"] == ""
    assert told["group"] == instance.pid == os.getpgid(instance.pid)
    assert told["title"].endswith("-m sgl_elastic.instance.process i7")
    assert told["threads"] == ["MainThread", "parent-watch"]
    assert scene.instead == []
    instance.kill_group()
    assert instance.returncode == -signal.SIGKILL
    assert not is_there(instance.pid), "nobody has asked how it ended"


def test_a_spare_is_not_used_up_and_its_memory_is_shared(scene: Scene) -> None:
    pool = scene.pool()
    pool.begin()
    instances = [scene.instance(pool, f"i{n}", FOREVER) for n in range(3)]
    (spare,) = pool.seen()
    assert all(told_by(scene, f"i{n}") for n in range(3))
    assert 0 < spare.pss_bytes < spare.rss_bytes, "its copies have the same pages"
    for instance in instances:
        instance.kill_group()


def test_how_an_instance_has_ended_is_known(scene: Scene) -> None:
    pool = scene.pool()
    instance = scene.instance(scene.pool(0), "none", FOREVER)
    assert scene.instead == [instance], "there is no spare"
    pool.begin()
    instance = scene.instance(pool, "i1", SHORT)
    assert instance.wait(30.0) == 3 == instance.poll() == instance.returncode
    instance.kill()
    instance.terminate()
    running = scene.instance(pool, "i2", FOREVER)
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.05)
    stop_process(running.pid)
    assert running.is_stopped()
    running.kill_group()


def test_an_ended_instance_leaves_nothing_open_however_long_it_is_kept(scene: Scene) -> None:
    """Two threads wait for it, and one of them sees its end first."""
    pool = scene.pool()
    pool.fill(lambda: False)
    known = open_pidfds()
    kept = scene.instance(pool, "i1", FOREVER)
    assert open_pidfds() == known + 1
    waiting = threading.Thread(target=kept.wait, args=(30.0,))
    waiting.start()
    wait_until(lambda: open_pidfds() == known + 2)
    kept.kill_group()
    waiting.join()
    assert kept.wait(0.0) == -signal.SIGKILL
    assert open_pidfds() == known


def open_pidfds() -> int:
    return sum("pidfd" in target for target in open_files(os.getpid()))


def test_a_spare_that_dies_is_replaced_and_its_copies_go_on(scene: Scene) -> None:
    pool = scene.pool()
    pool.fill(lambda: False)
    (first,) = pool.seen()
    instance = scene.instance(pool, "i1", FOREVER)
    os.kill(first.pid, signal.SIGKILL)
    assert scene.lost.acquire(timeout=10.0)
    assert pool.seen() == ()
    assert instance.poll() is None
    pool.fill(lambda: True)
    assert pool.seen() == (), "not now: a scale runs"
    scene.ways.clear()
    pool.fill(lambda: False)
    assert scene.ways == ["when_idle", "foreground"]
    (second,) = pool.seen()
    assert second.pid != first.pid
    instance.kill_group()
    assert instance.returncode == UNKNOWN_STATUS


@pytest.mark.parametrize("fault", ["fails", "threads", "threads later", "stopped"])
def test_a_spare_of_no_use_stops_no_instance(
    scene: Scene, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts as it would without spares, and the spare is gone."""
    pool = scene.pool(LIGHT_SPARE=fault)
    if fault in ("fails", "threads"):
        with pytest.raises(EngineFailedError, match="closed the connection"):
            pool.fill(lambda: False)
        pool.begin()
    else:
        pool.fill(lambda: False)
    if fault == "threads later":
        assert pool.seen()
    if fault == "stopped":
        monkeypatch.setattr("sgl_elastic.instance.spares.TIMEOUT_S", 0.2)
        stop_process(pool.seen()[0].pid)
    instance = scene.instance(pool, "i1", FOREVER)
    assert scene.instead == [instance]
    assert pool.seen() == ()
    assert scene.lost.acquire(timeout=10.0), "so that another one is started"


def test_a_closed_pool_starts_nothing(scene: Scene) -> None:
    pool = scene.pool(LIGHT_SPARE="imports long")
    pool.begin()
    closing = threading.Timer(0.5, pool.close)
    closing.start()
    with pytest.raises(EngineFailedError, match="the server ends"):
        scene.instance(pool, "i1", FOREVER)
    pool.begin()
    assert pool.seen() == ()
    assert scene.instead == []


FRONT = """
import sys, time
from functools import partial
from pathlib import Path
from sgl_elastic.instance.spares import Spare, SparePool
from sgl_elastic.instance.supervise import EngineSettings
pool = SparePool(1, lambda _: {{"LIGHT_SPARE": "{how}"}}, start=partial(Spare, module="{light}"))
pool.begin()
pids = [each.pid for each in pool.seen()]
if not "{how}":
    settings = EngineSettings(
        Path("{folder}"), (), "t", "d", "host", 4096, 9, 9,
        environment=lambda _: {{"LIGHT_SECONDS": "60"}},
    )
    pids.append(pool.start_instance(settings, "i1", (0,), ()).pid)
print(*pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["", "imports long"])
def test_none_outlives_the_front(how: str, tmp_path: Path) -> None:
    """Killed, so that it can end nothing; also while its spare imports."""
    source = FRONT.format(how=how, light=LIGHT, folder=tmp_path)
    front = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, cwd=ROOT)
    with front:
        pids = [int(word) for word in front.stdout.readline().split()]  # type: ignore[union-attr]
        assert len(pids) == (1 if how else 2)
        if how:
            time.sleep(2.0)
        front.kill()
    wait_until(lambda: not any(map(is_there, pids)), 10.0)
