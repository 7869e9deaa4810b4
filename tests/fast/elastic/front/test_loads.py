"""GET /v1/loads of an elastic server: SGLang's own writers, read by the front's hook."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotWriter

from sgl_elastic import front_hooks
from sgl_elastic.instance.state import InstanceState

pytestmark = pytest.mark.anyio


def write(directory: Path, instance: str, num_running: list[int]) -> None:
    """As the ranks of an instance do."""
    for rank, num in enumerate(num_running):
        path = str(directory / f"{instance}.loads")
        writer = ShmLoadSnapshotWriter(path, len(num_running), rank)
        writer.write(LoadSnapshot(dp_rank=rank, num_running_reqs=num))
        writer.close()


async def running(**asked: Any) -> list[int]:
    return [load.num_running_reqs for load in await front_hooks.get_loads(None, **asked)]


def instance(name: str, num_ranks: int, state: InstanceState) -> Any:
    return SimpleNamespace(instance_id=name, num_ranks=num_ranks, state=state)


async def test_they_are_of_the_instance_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = instance("a", 1, InstanceState.ACTIVE), instance("b", 2, InstanceState.PARKED)
    runtime = SimpleNamespace(directory=tmp_path, instances=lambda: (one, two))
    monkeypatch.setattr(front_hooks, "_runtime", runtime)
    assert await running() == []  # its rank has had no batch yet
    write(tmp_path, "a", [3])
    write(tmp_path, "b", [1, 5])
    assert await running() == [3]
    one.state = InstanceState.FROZEN
    assert await running() == [3]  # while requests are handed over
    two.state = InstanceState.ACTIVE
    assert await running() == [1, 5]
    assert await running(dp_rank=1) == [5]
    assert await running(dp_rank=2) == []
