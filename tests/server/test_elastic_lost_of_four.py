"""Twenty devices of four are lost under load, one after the other: each costs its share, no more.

No standby is parked: what takes over is a copy of a spare, on whichever three devices are left.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.elastic_faults import Elastic
from tests.server.elastic_losses import Ground, check_slots, edge_slots, losses

pytestmark = [pytest.mark.server, pytest.mark.alone, pytest.mark.soak, pytest.mark.timeout(1800)]

GROUND = Ground(4, args=("--standby-ranks", "0"), window_s=4.0)
LEAST_RATE = 3 / 4 - 0.05  # of before; on shared cores one rank less is no loss at all


def test_twenty_of_four_devices_are_lost(tmp_path: Path) -> None:
    elastic = Elastic(tmp_path / "log", GROUND.spec)
    try:
        elastic.learn()
        first, edges = elastic.mapped_slots(), edge_slots(elastic)
        lived = [GROUND.carry_out(elastic, loss) for loss in losses(20, 4, GROUND.num_devices)]
        check_slots(elastic.mapped_slots(), first, edges)  # nothing has added up
    finally:
        elastic.server.stop()
    ratios = [each.rate_ratio for each in lived]
    print(f"rates over before: {sorted(ratios)}")  # noqa: T201
    assert min(ratios) >= LEAST_RATE
