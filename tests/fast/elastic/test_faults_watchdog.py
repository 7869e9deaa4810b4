"""The watchdog: what it counts, when it recovers, when it gives up."""

from __future__ import annotations

import time

import pytest

from sgl_elastic.coordinator.operations import Operation
from sgl_elastic.coordinator.recovery import Watchdog, WatchdogConfig
from sgl_elastic.types import OperationState, ScaleRequest

DONE = Operation("r1", ScaleRequest(1), OperationState.SUCCEEDED)
FAILED = Operation("r1", ScaleRequest(1), OperationState.ROLLED_BACK)
QUICK = WatchdogConfig(hang_s=3.0, period_s=0.001, attempts=3, first_pause_s=0.001)


class Scene:
    """Instances, memory and recoveries as the test says; everything that is heard."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.dead: tuple[int, ...] = ()
        self.is_serving_lost = False
        self.outcomes: list[Operation | None] = []
        self.heard: list[str] = []
        self.asked: list[tuple[float, float]] = []
        self.watchdog = Watchdog(
            self,
            self,
            self.recover,
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

    def recover(self) -> Operation | None:
        outcome = self.outcomes.pop(0)
        if outcome is DONE:
            self.is_serving_lost = False
        return outcome


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_quiet_round(scene: Scene) -> None:
    scene.watchdog.look()
    scene.watchdog.replace()
    assert scene.heard == []
    assert scene.asked == [(7.0, 3.0)]


def test_each_loss_is_heard_once(scene: Scene) -> None:
    scene.lost, scene.dead = ["i2", "i3"], (1,)
    scene.watchdog.look()
    scene.lost = []
    scene.watchdog.look()
    scene.dead = (0, 1)
    scene.watchdog.look()
    assert scene.heard == ["instance", "instance", "memory", "memory"]


def test_a_device_that_comes_back_and_dies_again_is_heard_again(scene: Scene) -> None:
    for dead in ((1,), (), (1,)):
        scene.dead = dead
        scene.watchdog.look()
    assert scene.heard == ["memory", "memory"]


def test_a_recovery_is_tried_again(scene: Scene) -> None:
    scene.is_serving_lost, scene.outcomes = True, [FAILED, FAILED, DONE]
    scene.watchdog.replace()
    assert scene.heard == ["recovery"]


def test_a_scale_that_runs_is_waited_for(scene: Scene) -> None:
    scene.is_serving_lost, scene.outcomes = True, [None, DONE]
    scene.watchdog.replace()
    assert scene.heard == []
    scene.watchdog.replace()
    assert scene.heard == ["recovery"]


def test_after_some_attempts_it_gives_up_for_good(scene: Scene) -> None:
    scene.is_serving_lost, scene.outcomes = True, [FAILED] * 3
    scene.watchdog.replace()
    scene.watchdog.replace()
    assert scene.heard == ["hopeless"]


def test_its_threads_notice_and_end(scene: Scene) -> None:
    scene.is_serving_lost, scene.outcomes, scene.dead = True, [DONE], (2,)
    scene.watchdog.start()
    deadline = time.monotonic() + 5
    while set(scene.heard) != {"recovery", "memory"}:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    scene.watchdog.stop()
    time.sleep(0.02)
    count = len(scene.asked)
    time.sleep(0.02)
    assert len(scene.asked) == count
