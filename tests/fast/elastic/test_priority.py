"""Priorities are set on every thread of a process group, and taken back, where that is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_elastic import processes
from sgl_elastic.processes import LocalProcess, giving_way

THREADS = (
    "import threading, time\n"
    "for _ in range(3): threading.Thread(target=time.sleep, args=(60,)).start()\n"
    "print('up', flush=True)\ntime.sleep(60)"
)


@pytest.fixture
def group() -> Iterator[LocalProcess]:
    """The leader of a process group with four threads."""
    command = [sys.executable, "-c", THREADS]
    with LocalProcess(command, start_new_session=True, stdout=subprocess.PIPE) as leader:
        assert leader.stdout.readline() == b"up\n"
        yield leader
        leader.kill()


def priorities(pid: int) -> list[tuple[int, int]]:
    """(policy, nice value) of each thread."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    return [(os.sched_getscheduler(t), os.getpriority(os.PRIO_PROCESS, t)) for t in threads]


def test_all_threads_give_way_and_come_back(group: LocalProcess) -> None:
    if not processes.may_take_back():
        pytest.skip("this user may not raise priorities: the next test is for it")
    own = (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
    with giving_way(group, "background"):
        assert priorities(group.pid) == [(os.SCHED_OTHER, processes.BACKGROUND_NICE)] * 4
    assert priorities(group.pid) == [own] * 4
    with giving_way(group, "when_idle", at_most_s=60):
        assert priorities(group.pid) == [(os.SCHED_IDLE, processes.BACKGROUND_NICE)] * 4
    assert priorities(group.pid) == [own] * 4
    assert priorities(os.getpid())[0] == own


def test_a_machine_without_idle_time_gives_a_small_share(group: LocalProcess) -> None:
    if not processes.may_take_back():
        pytest.skip("this user may not raise priorities")
    with giving_way(group, "when_idle", at_most_s=0.05):
        time.sleep(0.5)
        assert priorities(group.pid) == [(os.SCHED_OTHER, processes.BACKGROUND_NICE)] * 4
    with giving_way(group, "when_idle", at_most_s=0.05):
        group.give_way("foreground")
        time.sleep(0.5)
        assert priorities(group.pid)[0] == priorities(os.getpid())[0], "it hurries, and stays so"


def test_without_the_right_to_come_back_nothing_is_lowered(
    group: LocalProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "may_take_back", lambda: False)
    before = priorities(group.pid)
    group.give_way("background")
    assert priorities(group.pid) == before
    group.kill()
    group.wait()
    monkeypatch.undo()
    group.give_way("background")  # a group that is gone is no error
    group.give_way("foreground")
