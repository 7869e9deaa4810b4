"""The watchdog: what it counts, when it recovers, when it gives up."""

from __future__ import annotations

import time

import pytest

from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.recovery import Watchdog, WatchdogConfig
from sgl_elastic.types import OperationState, ScaleRequest
from tests.support.waiting import wait_until

DONE = Operation("r1", ScaleRequest(1), OperationState.SUCCEEDED)
FAILED = Operation("r1", ScaleRequest(1), OperationState.ROLLED_BACK)
QUICK = WatchdogConfig(hang_s=3.0, period_s=0.001, attempts=3, first_pause_s=0.001)


class Scene:
    """Instances, memory and recoveries as the test says; everything that is heard."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.dead: tuple[int, ...] = ()
        self.is_serving_lost = False
        self.is_serving_memory_lost = False
        self.outcomes: list[Operation | None] = []
        self.heard: list[str] = []
        self.asked: list[tuple[float, float]] = []
        self.watchdog = Watchdog(
            self,
            self,
            self,
            config=QUICK,
            on_fault=self.heard.append,
            on_hopeless=lambda: self.heard.append("hopeless"),
            clock=lambda: 7.0,
        )

    def check(self, now_s: float, hang_s: float) -> list[str]:
        self.asked.append((now_s, hang_s))
        return self.lost

    def is_lost(self) -> bool:
        return self.is_serving_lost

    def dead_workers(self) -> tuple[int, ...]:
        return self.dead

    def is_memory_lost(self) -> bool:
        return self.is_serving_memory_lost

    def recover(self, *, is_serving: bool) -> Operation | None:
        assert is_serving != self.is_serving_lost
        outcome = self.outcomes.pop(0)
        if outcome is DONE:
            self.is_serving_lost = self.is_serving_memory_lost = False
        return outcome


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_each_loss_is_heard_once(scene: Scene) -> None:
    """A device that comes back and dies again is heard again."""
    scene.lost = ["i2", "i3"]
    for dead, heard in [
        ((1,), ["instance", "instance", "memory"]),
        ((1,), []),
        ((0, 1), ["memory"]),
        ((1,), []),
        ((0, 1), ["memory"]),
    ]:
        scene.dead = dead
        scene.watchdog.look()
        assert scene.heard == heard
        scene.lost = []
        scene.heard.clear()


@pytest.mark.parametrize(
    ("outcomes", "heard"),
    [
        ([DONE], ["recovery"]),
        ([FAILED, FAILED, DONE], ["recovery"]),  # it is tried again
        ([None, DONE], ["recovery"]),  # a scale that runs is waited for
        ([FAILED] * 3, ["hopeless"]),  # after some attempts it gives up for good
    ],
)
def test_recoveries(scene: Scene, outcomes: list[Operation | None], heard: list[str]) -> None:
    scene.is_serving_lost, scene.outcomes = True, list(outcomes)
    scene.watchdog.replace()
    assert scene.heard == ([] if outcomes[0] is None else heard)
    scene.watchdog.replace()
    assert scene.heard == heard


@pytest.mark.parametrize(
    ("outcomes", "heard"),
    [([DONE], ["recovery"]), ([None, DONE], ["recovery"]), ([FAILED, DONE], ["recovery"])],
)
def test_memory_that_is_lost_is_had_elsewhere(
    scene: Scene, outcomes: list[Operation | None], heard: list[str]
) -> None:
    scene.is_serving_memory_lost, scene.outcomes = True, list(outcomes)
    for _ in range(3):
        scene.watchdog.replace()
    assert scene.heard == heard
    assert not scene.outcomes


def test_lost_memory_that_stays_lost_does_not_end_what_serves(scene: Scene) -> None:
    """It is tried again when something else is lost."""
    scene.is_serving_memory_lost, scene.outcomes = True, [FAILED] * 3
    for _ in range(3):
        scene.watchdog.replace()
    assert scene.heard == []
    scene.dead, scene.outcomes = (1,), [DONE]
    scene.watchdog.look()
    scene.watchdog.replace()
    assert scene.heard == ["memory", "recovery"]


def test_its_threads_notice_and_end(scene: Scene) -> None:
    scene.watchdog.look()
    scene.watchdog.replace()
    assert scene.heard == [], "a quiet round"
    assert scene.asked == [(7.0, 3.0)]
    scene.is_serving_lost, scene.outcomes, scene.dead = True, [DONE], (2,)
    scene.watchdog.start()
    wait_until(lambda: set(scene.heard) == {"recovery", "memory"})
    scene.watchdog.stop()
    time.sleep(0.02)
    count = len(scene.asked)
    time.sleep(0.02)
    assert len(scene.asked) == count
