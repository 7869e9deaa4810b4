"""Loops write, other processes read, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sgl_esft import env
from sgl_esft.errors import InvariantError
from sgl_esft.health import heartbeat
from sgl_esft.health.heartbeat import DETOKENIZER, MAX_RANKS, HeartbeatTable, rank_slot


def test_a_slot_says_nothing_before_the_first_beat() -> None:
    heartbeats = HeartbeatTable.create()
    slot = heartbeats.slot(rank_slot(3))
    assert heartbeats.read(rank_slot(3)) is None
    slot.beat()
    found = heartbeats.read(rank_slot(3))
    assert found.pid == os.getpid()
    assert found.age_s(time.monotonic_ns()) < 5
    assert heartbeats.read(rank_slot(2)) is None


def test_every_slot_is_its_own() -> None:
    heartbeats = HeartbeatTable.create()
    indices = [DETOKENIZER, *map(rank_slot, range(MAX_RANKS))]
    for index in indices:
        heartbeats.slot(index, lambda index=index: index + 1).beat()
    assert [heartbeats.read(index).at_ns for index in indices] == [i + 1 for i in indices]  # type: ignore[union-attr]


def test_ages_are_never_negative() -> None:
    heartbeats = HeartbeatTable.create()
    heartbeats.slot(rank_slot(0), lambda: 5_000_000_000).beat()
    found = heartbeats.read(rank_slot(0))
    assert [found.age_s(now_ns) for now_ns in (4 * 10**9, 5 * 10**9, 65 * 10**8)] == [0, 0, 1.5]


CHILD = """
import sys
from pathlib import Path
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot
HeartbeatTable.open(Path(sys.argv[1])).slot(rank_slot(1)).beat()
"""


@pytest.mark.parametrize("is_file", [False, True])
def test_another_process_writes(is_file: bool, tmp_path: Path) -> None:
    heartbeats = HeartbeatTable.open(tmp_path / "i1.beats") if is_file else HeartbeatTable.create()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(heartbeats.path)])
    assert child.wait(60) == 0
    found = heartbeats.read(rank_slot(1))
    assert found.pid == child.pid
    assert found.age_s(time.monotonic_ns()) < 60  # one clock for all processes


def test_a_board_without_a_name_leaves_nothing() -> None:
    heartbeats = HeartbeatTable.create()
    path = heartbeats.path
    assert path.exists()
    heartbeats.close()
    assert not path.exists()


class Socket:
    """Has something after some polls."""

    def __init__(self, num_polls: int) -> None:
        self.polls: list[int] = []
        self._num_polls = num_polls
        self.kind = "pull"

    def poll(self, timeout_ms: int) -> bool:
        self.polls.append(timeout_ms)
        return len(self.polls) > self._num_polls

    def recv(self, flags: int = 0) -> bytes:
        return b"x"

    def recv_pyobj(self, flags: int = 0) -> Any:
        return "y"


def test_a_socket_beats_while_it_waits() -> None:
    ticks = iter(range(1, 100))
    heartbeats, socket = HeartbeatTable.create(), Socket(3)
    beating = heartbeat.BeatingSocket(socket, heartbeats.slot(DETOKENIZER, lambda: next(ticks)))
    assert beating.recv() == b"x"
    assert heartbeats.read(DETOKENIZER).at_ns == 1 + 1 + 3  # type: ignore[union-attr]
    assert max(socket.polls) <= 1000  # a loop that waits beats at least every second
    assert beating.recv_pyobj() == "y"
    assert beating.kind == "pull"
    before = len(socket.polls)
    beating.recv(1)  # without waiting
    assert len(socket.polls) == before


def test_a_loop_without_a_board_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.HEARTBEAT_TABLE, raising=False)
    with pytest.raises(InvariantError, match=env.HEARTBEAT_TABLE):
        heartbeat.slot_of(DETOKENIZER)


def test_a_beat_costs_next_to_nothing() -> None:
    slot = HeartbeatTable.create().slot(rank_slot(0))

    def seconds_of_a_thousand() -> float:
        began = time.perf_counter()
        for _ in range(1000):
            slot.beat()
        return time.perf_counter() - began

    assert min(seconds_of_a_thousand() for _ in range(5)) < 0.1  # 100 us each
