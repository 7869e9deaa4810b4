"""The coordinator's metrics over whole scales."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from sgl_elastic.autoscale.metrics import FaultMetrics, ScaleMetrics, SpareMetrics, when_ended
from sgl_elastic.instance.spares import SpareMemory, SpareState
from sgl_elastic.types import Plan, ScaleRequest
from tests.fast.elastic.scale_fakes import (
    NEW,
    OLD,
    PLAN,
    World,
    always,
    make_coordinator,
    never,
    once,
)

UP = ScaleRequest(dp_size=3)


class Watched:
    """A coordinator with metrics in a registry of its own."""

    def __init__(self, *plans: Plan) -> None:
        self.world = World()
        self.registry = CollectorRegistry()
        self.metrics = ScaleMetrics(self.registry)
        following = iter(plans)
        self.coordinator = make_coordinator(self.world, lambda request, old: next(following))
        self.coordinator.listen(self.metrics.observe)

    def scale(self) -> None:
        self.coordinator.wait(self.coordinator.submit(UP).operation_id, 10.0)
        assert self.coordinator._idle.wait(10.0)  # then the next one may be asked for

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"sgl_elastic:{name}", labels)


def test_before_the_first_scale_all_names_are_there() -> None:
    """A scrape of a fresh server knows every name that a dashboard asks for."""
    registry = CollectorRegistry()
    ScaleMetrics(registry).set_placement(OLD)
    FaultMetrics(registry)
    SpareMetrics(registry)
    assert [metric.name for metric in registry.collect() if not metric.samples] == []


def test_what_spares_take() -> None:
    registry = CollectorRegistry()
    metrics = SpareMetrics(registry)
    one = SpareMemory(1, SpareState.READY, 10, 30)
    metrics.set([one, SpareMemory(2, SpareState.STARTING, 2, 3)])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sgl_elastic:{name}", labels)

    assert value("spares") == 1, "a copy of one that imports would have to wait"
    assert (value("spare_bytes", kind="pss"), value("spare_bytes", kind="rss")) == (12, 33)
    metrics.set(())
    assert (value("spares"), value("spare_bytes", kind="rss")) == (0, 0)


def test_a_scale_up() -> None:
    watched = Watched(PLAN)
    watched.metrics.set_placement(OLD)
    assert watched.value("devices") == 2
    watched.scale()
    assert watched.value("scale_operations_total", outcome="succeeded") == 1
    assert watched.value("scale_step_seconds_count", kind="copy_trunk") == 1
    assert watched.value("scale_step_seconds_count", kind="grow_kv") == 2
    assert watched.value("scale_phase_seconds_count", phase="switch") == 1
    assert watched.value("scale_gap_seconds_count") == 1
    assert watched.value("devices") == 3
    assert watched.value("device_experts", device="2") == 2
    assert watched.value("device_kv_tokens", device="2") == 120
    watched.metrics.set_placement(OLD)
    assert watched.value("devices") == 2
    assert watched.value("device_experts", device="2") == 0, "it has left"
    assert watched.value("device_kv_tokens", device="2") == 0
    watched.metrics.observe_held(0.25)
    assert watched.value("held_request_seconds_sum") == 0.25


def test_a_roll_back_and_how_many_ranks_serve_at_each_end() -> None:
    watched = Watched(PLAN, PLAN)
    told: list[int] = []
    watched.coordinator.listen(when_ended(told.append))
    watched.world.fault = once(4)
    watched.scale()
    assert watched.value("scale_operations_total", outcome="rolled_back") == 1
    assert watched.value("scale_step_seconds_count", kind="copy_trunk") == 0
    assert watched.value("devices") == 2
    watched.scale()
    assert told == [2, 3]


def test_steps_of_a_degraded_operation_count_once() -> None:
    watched = Watched(PLAN, Plan(NEW, NEW, (), (), {}, {}))
    watched.world.fault = always("retire")
    watched.scale()
    watched.world.fault = never
    watched.scale()
    assert watched.value("scale_operations_total", outcome="degraded") == 1
    assert watched.value("scale_operations_total", outcome="succeeded") == 2
    assert watched.value("scale_step_seconds_count", kind="copy_trunk") == 1
