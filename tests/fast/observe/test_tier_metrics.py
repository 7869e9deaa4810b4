"""Totals that others keep, followed by counters; pages by owner."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from sgl_esft.observe.tier_metrics import DeviceTierMetrics, EngineCounters, HostTierMetrics
from sgl_esft.weave.slot_table import SlotUses


def test_the_device_tier_follows_its_slots() -> None:
    registry = CollectorRegistry()
    metrics = DeviceTierMetrics(1, registry)
    metrics.set(SlotUses(3, 2, 1))
    metrics.set(SlotUses(3, 2, 1))
    metrics.set(SlotUses(7, 2, 2))
    for name, value in (("hits", 7), ("misses", 2), ("evictions", 2)):
        found = registry.get_sample_value(f"sgl_esft:device_cache_{name}_total", {"rank": "1"})
        assert found == value


def test_the_host_tier_follows_the_engine() -> None:
    registry = CollectorRegistry()
    metrics = HostTierMetrics(registry)
    counters = EngineCounters(5, 1, 2.5, 2, 4, 3)
    metrics.set(counters)
    metrics.set(replace(counters, num_loads=6, load_seconds=3.0))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sgl_esft:{name}_total", labels)

    assert value("adapter_loads", outcome="ok") == 6
    assert value("adapter_loads", outcome="failed") == 1
    assert value("adapter_load_seconds") == 3.0
    assert value("adapter_replacements") == 2
    assert value("host_cache_evictions") == 4
    assert value("host_cache_misses") == 3
