"""Memory workers that die: what is refused, what is forgotten, what a rolled-back scale leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sgl_elastic.errors import MemoryLostError, MemoryWorkerError, StepFailedError
from sgl_elastic.memory.control import Hmm
from sgl_elastic.types import Step
from tests.fast.elastic.memory.test_control import OLD, SCALE_UP, content, in_use
from tests.fast.elastic.memory_workers import ADAPTERS, fill, hmm_of


@pytest.fixture
def hmm(tmp_path: Path) -> Iterator[Hmm]:
    with hmm_of(tmp_path, add=False) as found:
        found.set_adapters(ADAPTERS)
        found.map_placement(OLD)
        fill(found, 0, content(range(8)))
        yield found


def kill(hmm: Hmm, device_id: int) -> None:
    process = hmm._workers[device_id].process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_nothing_is_lost_at_first(hmm: Hmm) -> None:
    hmm.require((0,))
    hmm.require(())


def test_a_device_that_serves_and_is_lost_is_named(hmm: Hmm) -> None:
    kill(hmm, 0)
    for _ in range(2):
        with pytest.raises(MemoryLostError, match=r"devices \[0\] have died"):
            hmm.require((0, 1))
    assert hmm.dead_workers() == (0,), "it is not forgotten"


def test_a_device_that_does_not_serve_is_forgotten_and_may_join_again(hmm: Hmm) -> None:
    hmm.add_device(1)
    kill(hmm, 1)
    with pytest.raises(MemoryWorkerError, match="its memory is lost"):
        hmm.add_device(1)
    hmm.require((0,))
    assert hmm.device_ids() == (0,)
    for step in SCALE_UP:
        hmm.execute(step)
    assert hmm.device_ids() == (0, 1)


def execute_all(hmm: Hmm, steps: Sequence[Step]) -> None:
    for step in steps:
        hmm.execute(step)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("done", [2, 5])
def test_a_worker_that_dies_during_a_scale(hmm: Hmm, victim: int, done: int) -> None:
    """Whichever step fails then, undoing leaves nothing behind on the other device."""
    before = in_use(hmm)[0]
    for step in SCALE_UP[:done]:
        hmm.execute(step)
    kill(hmm, victim)
    with pytest.raises(StepFailedError):
        execute_all(hmm, SCALE_UP[done:])
    for step in reversed(SCALE_UP):
        hmm.undo(step)
    assert hmm.device_ids() == (0,)
    if victim == 1:
        assert in_use(hmm)[0] == before
