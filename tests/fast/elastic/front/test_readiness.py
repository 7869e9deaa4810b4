"""What the health service hears of instances that come, go and are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from sgl_elastic.front.readiness import ElasticEngine, heartbeat_path
from sgl_elastic.instance.state import Instance, InstanceState
from sgl_esft.health.heartbeat import HeartbeatTable, rank_slot


class Table:
    def __init__(self) -> None:
        self.found: list[Instance] = []
        self.lost = False

    def instances(self) -> Sequence[Instance]:
        return self.found

    def is_lost(self) -> bool:
        return self.lost


class Setup:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = Table()
        self.closed: list[bool] = []
        self.engine = ElasticEngine(
            folder, self.table, lambda: self.closed.append(True), lambda: None
        )

    def add(self, name: str, state: InstanceState, *devices: int) -> HeartbeatTable:
        self.table.found.append(Instance(name, devices, state))
        return HeartbeatTable.open(heartbeat_path(self.folder, name))

    def ages(self) -> dict[str, bool]:
        """Name of each rank's loop, and whether it has turned."""
        return {loop.name: loop.beat is not None for loop in self.engine.ranks()}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_before_the_engine_is_there(setup: Setup) -> None:
    assert setup.engine.trouble() == "no instance serves"
    assert setup.ages() == {}


def test_ranks_are_those_that_serve(setup: Setup) -> None:
    heartbeats = setup.add("i1", InstanceState.ACTIVE, 0, 1)
    setup.add("i2", InstanceState.PARKED, 0)
    assert setup.engine.trouble() is None
    assert setup.ages() == {"rank 0 of instance i1": False, "rank 1 of instance i1": False}
    heartbeats.slot(rank_slot(1)).beat()
    assert setup.ages() == {"rank 0 of instance i1": False, "rank 1 of instance i1": True}


def test_a_standby_that_warms_up_does_not_stand_in(setup: Setup) -> None:
    setup.add("i1", InstanceState.ACTIVE, 0)
    setup.add("i2", InstanceState.WARM, 0).slot(rank_slot(0)).beat()
    assert setup.ages() == {"rank 0 of instance i1": False}


def test_between_two_instances_the_first_counts(setup: Setup) -> None:
    """The serving one comes first, frozen for the moment of the switch."""
    setup.add("i1", InstanceState.FROZEN, 0).slot(rank_slot(0)).beat()
    setup.add("i2", InstanceState.WARM, 0)
    assert setup.ages() == {"rank 0 of instance i1": True}


def test_replicas_all_count(setup: Setup) -> None:
    setup.add("i1", InstanceState.ACTIVE, 0)
    setup.add("i2", InstanceState.ACTIVE, 1)
    assert len(setup.ages()) == 2


def test_a_lost_instance_is_trouble(setup: Setup) -> None:
    setup.add("i1", InstanceState.FAILED, 0)
    setup.table.lost = True
    assert "replacement" in str(setup.engine.trouble())


def test_heartbeats_of_instances_that_are_gone_are_closed(setup: Setup) -> None:
    setup.add("i1", InstanceState.ACTIVE, 0)
    setup.ages()
    setup.table.found.clear()
    setup.add("i2", InstanceState.ACTIVE, 0)
    setup.ages()
    assert list(setup.engine._heartbeats) == ["i2"]


def test_it_ends_everything(setup: Setup) -> None:
    asyncio.run(setup.engine.end())
    assert setup.closed == [True]
