"""Children hear no signals and die with their parent; the last step is taken, whatever waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgl_esft.health.faults import ProcessState
from sgl_esft.health.processes import descendants, state_of
from tests.support.processes import assert_gone
from tests.support.waiting import wait_until

PARENT = """
import multiprocessing, time
from sgl_esft.health import ending

def run(path):
    ending.leave_to_front()
    open(path, "w").write("x")
    time.sleep(60)

if __name__ == "__main__":
    import sys
    multiprocessing.get_context("spawn").Process(target=run, args=(sys.argv[1],)).start()
    time.sleep(60)
"""
LEAVING = """
import atexit, threading, time
from sgl_esft.health import ending

atexit.register(print, "registered")
threading.Thread(target=time.sleep, args=(60,)).start()
print("buffered", end=" ")
ending.leave_after(lambda: LEAVE)
"""
SHARING = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
from sgl_esft.health import ending

def share(path):
    memory = SharedMemory(create=True, size=4096)
    with open(path, "a") as file:
        file.write(memory.name + "\\n")
    time.sleep(60)

if __name__ == "__main__":
    ending.track_apart()
    multiprocessing.get_context("spawn").Process(target=share, args=(sys.argv[1],)).start()
    share(sys.argv[1])
"""
HANGING = """
import os, signal, time
from sgl_esft.health import process

process._CLEAN_UP_S = 0.5
process.hear_ends()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    time.sleep(60)
"""


def test_a_child_leaves_its_end_to_the_front(tmp_path: Path) -> None:
    script, ready = tmp_path / "parent.py", tmp_path / "ready"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(ready)], start_new_session=True)
    try:
        wait_until(ready.exists, 60)
        # The other one is multiprocessing's own, which hears no signals either.
        children = descendants(parent.pid)
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in children:
                os.kill(pid, number)
        time.sleep(0.2)
        assert {state_of(pid) for pid in children} == {ProcessState.ALIVE}
        parent.kill()
        parent.wait()
        assert_gone(children)
    finally:
        parent.kill()
        parent.wait()


def test_what_killed_processes_shared_is_removed(tmp_path: Path) -> None:
    """All at once, as a supervisor and its ranks are; then there is nobody to say so."""
    script, names = tmp_path / "sharing.py", tmp_path / "names"
    script.write_text(SHARING)
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, str(script), str(names)], start_new_session=True, stderr=log
        )
    try:
        wait_until(lambda: names.exists() and len(names.read_text().split()) == 2, 60)
        shared = [Path("/dev/shm") / name for name in names.read_text().split()]
        assert all(path.exists() for path in shared)
        assert len(descendants(parent.pid)) == 1, "who removes it is not of the family"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not any(path.exists() for path in shared), 10)
    assert (tmp_path / "log").read_text() == ""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    ("how", "status", "error"),
    [
        ("7", 7, ""),
        ("__import__('sys').exit(143)", 143, ""),
        ("__import__('sys').exit()", 0, ""),
        ("__import__('sys').exit('no port')", 1, "no port\n"),
    ],
)
def test_the_last_step(how: str, status: int, error: str) -> None:
    done = run(LEAVING.replace("LEAVE", how))
    assert (done.returncode, done.stdout, done.stderr) == (status, "buffered registered\n", error)


def test_a_start_that_is_ended_ends_in_time() -> None:
    assert run(HANGING).returncode == 143
