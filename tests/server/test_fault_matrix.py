"""Any process of a live elastic server is killed or stopped at any phase of a scale, up and down.

    CELLS --> a test each, on one server; on a new one after a cell that failed

`python -m bench.soak.fault_matrix --part 1/6` runs a part of them and keeps a record of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.elastic_faults import Elastic
from tests.server.fault_cells import CELLS, Cell, Measured, Note, carry_out, is_idle, measured

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.soak]


@dataclass
class Ground:
    """A server, and when each phase of its scales begins and ends.

    A cell that fails may leave a server that no later cell can use: they get another one.
    """

    folder: Path
    elastic: Elastic | None = None
    phases: Measured | None = None
    is_spoilt: bool = False

    def get(self) -> tuple[Elastic, Measured]:
        if self.is_spoilt:
            self.stop()
        if self.elastic is None:
            self.elastic, self.is_spoilt = Elastic(self.folder / "log"), True
            self.elastic.learn()
            self.phases, self.is_spoilt = measured(self.elastic), False
        assert self.phases is not None
        return self.elastic, self.phases

    def stop(self) -> None:
        if self.elastic is not None:
            self.elastic.server.stop()
        self.elastic, self.is_spoilt = None, False


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    ground = Ground(tmp_path_factory.mktemp("faults"))
    try:
        yield ground
    finally:
        ground.stop()


@pytest.fixture
def ready(ground: Ground) -> tuple[Elastic, Measured]:
    """Apart from the test, so that a server that does not start is no failure of its cell."""
    return ground.get()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_process_at_a_phase_of_a_scale(
    ground: Ground, ready: tuple[Elastic, Measured], cell: Cell, record_property: Note
) -> None:
    """No stream breaks; what serves is the old placement or the new one."""
    elastic, phases = ready
    ground.is_spoilt = True
    carry_out(elastic, cell, phases, record_property)
    elastic.wait_for(lambda: is_idle(elastic), 120)
    ground.is_spoilt = False
