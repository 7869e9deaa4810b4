"""Ranks write their load where nothing is left of it: SGLang's own writer and reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.managers import load_snapshot

from sgl_esft import env
from sgl_esft.errors import InvariantError
from sgl_esft.health import load_file


def test_ranks_write_and_the_front_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.LOAD_FILE, load_file.create())
    reader = load_snapshot.ShmLoadSnapshotReader(load_file.path_for("ipc:///tmp/a"), 2)
    assert reader.read_all() == []  # there is no rank yet
    writers = [
        load_snapshot.ShmLoadSnapshotWriter(load_file.path_for("ipc:///tmp/a"), 2, rank)
        for rank in range(2)
    ]
    writers[1].write(load_snapshot.LoadSnapshot(dp_rank=1, num_running_reqs=3))
    assert [each.num_running_reqs for each in reader.read_all()] == [0, 3]
    for each in (*writers, reader):
        each.close()
    assert not Path(load_file.path_for("ipc:///tmp/a")).resolve().is_relative_to("/dev/shm")


def test_a_file_for_each_server() -> None:
    one, other = Path(load_file.create()), Path(load_file.create())
    one.write_bytes(b"x")
    assert other.read_bytes() == b""


def test_without_a_launcher_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.LOAD_FILE, raising=False)
    with pytest.raises(InvariantError, match=env.LOAD_FILE):
        load_file.path_for("ipc:///tmp/a")
