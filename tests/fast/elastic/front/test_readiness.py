"""What the health service hears of instances that come, go and are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from sgl_elastic.front.readiness import ElasticEngine, heartbeat_path
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot

S = InstanceState


class Setup:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lost = folder, False
        self.found: list[Instance] = []
        self.closed: list[bool] = []
        self.engine = ElasticEngine(folder, self, lambda: self.closed.append(True), lambda: None)

    def instances(self) -> Sequence[Instance]:
        return self.found

    def is_lost(self) -> bool:
        return self.lost

    def add(self, name: str, state: InstanceState, *devices: int) -> HeartbeatTable:
        self.found.append(Instance(name, devices, state))
        return HeartbeatTable.open(heartbeat_path(self.folder, name))

    def ages(self) -> dict[str, bool]:
        """Name of each rank's loop, and whether it has turned."""
        return {loop.name: loop.beat is not None for loop in self.engine.ranks()}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_ranks_are_those_that_serve(setup: Setup) -> None:
    heartbeats = setup.add("i1", S.ACTIVE, 0, 1)
    setup.add("i2", S.PARKED, 0)
    assert setup.engine.trouble() is None
    assert setup.ages() == {"rank 0 of instance i1": False, "rank 1 of instance i1": False}
    heartbeats.slot(rank_slot(1)).beat()
    assert setup.ages() == {"rank 0 of instance i1": False, "rank 1 of instance i1": True}


@pytest.mark.parametrize(
    ("instances", "beaten", "loops"),
    [
        ([], [], {}),
        ([(S.ACTIVE, 0), (S.WARM, 0)], [1], {"rank 0 of instance i0": False}),  # a standby
        # Frozen for the moment of the switch.
        ([(S.FROZEN, 0), (S.WARM, 0)], [0], {"rank 0 of instance i0": True}),
        (
            [(S.ACTIVE, 0), (S.ACTIVE, 1)],  # replicas
            [1],
            {"rank 0 of instance i0": False, "rank 0 of instance i1": True},
        ),
    ],
)
def test_which_instances_count(
    setup: Setup,
    instances: list[tuple[InstanceState, int]],
    beaten: list[int],
    loops: dict[str, bool],
) -> None:
    tables = [setup.add(f"i{n}", *each) for n, each in enumerate(instances)]
    for number in beaten:
        tables[number].slot(rank_slot(0)).beat()
    assert setup.ages() == loops
    assert setup.engine.trouble() == (None if instances else "no instance serves")


def test_a_lost_instance_is_trouble_and_the_end_ends_everything(setup: Setup) -> None:
    setup.add("i1", S.FAILED, 0)
    setup.lost = True
    assert "replacement" in str(setup.engine.trouble())
    asyncio.run(setup.engine.end())
    assert setup.closed == [True]


def test_heartbeats_of_instances_that_are_gone_are_closed(setup: Setup) -> None:
    setup.add("i1", S.ACTIVE, 0)
    setup.ages()
    setup.found.clear()
    setup.add("i2", S.ACTIVE, 0)
    setup.ages()
    assert list(setup.engine._heartbeats) == ["i2"]
