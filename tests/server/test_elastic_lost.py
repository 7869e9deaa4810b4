"""A device is lost under load: its rank, its memory worker, or both. The others go on.

One server of two devices with standbys for each one of them and for both. What is right is what the
same server answered before the first loss. After each loss the device is taken back by a scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgl_esft import zoo
from tests.server.elastic_faults import Elastic
from tests.server.elastic_losses import KINDS, Ground, Loss, losses

pytestmark = [pytest.mark.server, pytest.mark.alone]

GROUND = Ground(2, ((0,), (1,), (0, 1)), ("--standby-ranks", "4"))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elastic]:
    elastic = Elastic(tmp_path_factory.mktemp("lost") / "log", GROUND.spec)
    try:
        elastic.learn()
        yield elastic
    finally:
        elastic.server.stop()


def test_both_ranks_answer_for_adapters_from_the_start(elastic: Elastic) -> None:
    """Before any scale: each question to the ranks has as many answers as there are ranks."""
    for _ in range(2):
        assert elastic.server.unload("sum").status_code == 200
        loaded = elastic.server.load("sum", zoo.adapter_paths()["sum"])
        assert loaded.status_code == 200, loaded.text


@pytest.mark.parametrize(
    "loss", losses(len(KINDS), 3, GROUND.num_devices), ids=lambda loss: loss.kind
)
def test_a_device_is_lost(elastic: Elastic, loss: Loss) -> None:
    GROUND.carry_out(elastic, loss)


@pytest.mark.soak
def test_twenty_devices_are_lost(elastic: Elastic) -> None:
    for loss in losses(20, 20, GROUND.num_devices):
        GROUND.carry_out(elastic, loss)
