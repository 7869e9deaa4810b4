"""Who is looked after, and for how long a stopped process is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sgl_esft.health import processes
from sgl_esft.health.faults import STOPPED_S, ProcessState
from sgl_esft.health.heartbeat import DETOKENIZER, HeartbeatTable, rank_slot
from sgl_esft.health.readiness import Loop
from sgl_esft.health.watch import PERIOD_S, Watch
from tests.fast.health.fakes import Engine
from tests.support.waiting import wait_until

SECOND = 10**9


class World:
    """A clock, and states of processes; rank n is process n + 1, the detokenizer process 9."""

    def __init__(self, *, replaces_ranks: bool = False) -> None:
        self.now_ns = 100 * SECOND
        self.states: dict[int, ProcessState] = {}
        self.heartbeats = HeartbeatTable.create()
        self.engine = Engine(self.heartbeats, replaces_ranks)
        self.faults: list[str] = []
        self.watch = Watch(
            self.engine,
            lambda: Loop("the detokenizer", self.heartbeats.read(DETOKENIZER)),
            self.faults.append,
            20.0,
            state_of=lambda pid: self.states.get(pid, ProcessState.ALIVE),
            clock_ns=lambda: self.now_ns,
        )
        self.beat(rank_slot(0), 1)
        self.beat(rank_slot(1), 2)
        self.beat(DETOKENIZER, 9)

    def beat(self, index: int, pid: int) -> None:
        self.heartbeats.slot(index, lambda: self.now_ns).beat()
        self.heartbeats._words[2 * index + 1] = pid

    def look_for(self, seconds: float, *, beating: bool = True) -> str | None:
        for _ in range(round(seconds / PERIOD_S)):
            self.now_ns += int(PERIOD_S * SECOND)
            if beating:
                self.beat(rank_slot(0), 1)
                self.beat(DETOKENIZER, 9)
            fault = self.watch.look()
            if fault:
                return fault
        return None


def test_all_is_well() -> None:
    assert World().look_for(15.0) is None


@pytest.mark.parametrize(("pid", "name"), [(2, "rank 1"), (9, "the detokenizer")])
def test_a_dead_process_is_seen_at_once(pid: int, name: str) -> None:
    world = World()
    world.states[pid] = ProcessState.ENDED
    fault = world.look_for(PERIOD_S)
    assert fault.startswith(name)


def test_a_rank_that_does_not_turn_is_lost_after_the_time() -> None:
    world = World()
    assert world.look_for(19.5) is None
    assert "rank 1" in str(world.look_for(1.0))


def test_a_stopped_process_may_go_on() -> None:
    world = World()
    for _ in range(3):
        world.states[9] = ProcessState.STOPPED
        assert world.look_for(STOPPED_S - 1) is None
        world.states[9] = ProcessState.ALIVE
        world.beat(rank_slot(1), 2)
        assert world.look_for(1.0) is None
    world.states[9] = ProcessState.STOPPED
    assert "stopped" in str(world.look_for(STOPPED_S + 1))


def test_ranks_that_others_replace_are_theirs() -> None:
    world = World(replaces_ranks=True)
    world.states[1] = ProcessState.ENDED
    assert world.look_for(30.0) is None
    world.states[9] = ProcessState.ENDED
    assert "detokenizer" in str(world.look_for(1.0))


def test_children_without_a_loop_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.engine, "children", lambda: [("scheduler_0", 1), ("router", 7)])
    assert world.look_for(1.0) is None
    world.states[7] = ProcessState.ENDED
    assert str(world.look_for(1.0)) == "router (process 7) has died"


def test_a_watch_that_was_stopped_itself_begins_anew() -> None:
    """As when the whole process group was stopped, and goes on."""
    world = World()
    world.states[9] = ProcessState.STOPPED
    assert world.look_for(2.0) is None
    world.now_ns += 3600 * SECOND
    assert world.watch.look() is None
    assert "stopped" in str(world.look_for(STOPPED_S + 1))


def test_the_thread_says_it_once() -> None:
    world = World()
    world.states[2] = ProcessState.ENDED
    world.watch.start()
    time.sleep(3 * PERIOD_S)
    world.watch.stop()
    assert len(world.faults) == 1


def test_the_thread_goes_on_after_a_round_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.states[2] = ProcessState.ENDED
    rounds = iter([OSError("no /proc"), OSError("no /proc"), None])

    def children() -> list[tuple[str, int]]:
        if (error := next(rounds, None)) is not None:
            raise error
        return []

    monkeypatch.setattr(world.engine, "children", children)
    world.watch.start()
    wait_until(lambda: world.faults)
    world.watch.stop()
    assert len(world.faults) == 1
    (logged,) = (each for each in caplog.records if "a round of the watch failed" in each.message)
    assert "no /proc" in str(logged.exc_info)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process
    process.kill()
    process.wait()


def test_states_and_ends_of_real_processes(child: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: processes.descendants(child.pid))
    (grandchild,) = processes.descendants(child.pid)
    assert {child.pid, grandchild} <= set(processes.descendants(os.getpid()))
    assert processes.state_of(child.pid) is ProcessState.ALIVE
    os.kill(grandchild, signal.SIGSTOP)
    wait_until(lambda: processes.state_of(grandchild) is ProcessState.STOPPED)
    os.kill(grandchild, signal.SIGKILL)
    # Its status is not asked for before it counts as ended.
    wait_until(lambda: not processes.is_there(child.pid))
    child.wait(20)
    assert processes.state_of(grandchild) is ProcessState.ENDED
    assert processes.state_of(child.pid) is ProcessState.ENDED
