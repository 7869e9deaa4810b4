"""Adapters' way from disk to host to device as Prometheus metrics (with --enable-metrics).

    a rank's adapter slots: SlotUses --> [DeviceTierMetrics] -> SGLang's /metrics
    the engine's host tier: EngineCounters --GET /metrics--> [HostTierMetrics] ---->

What is counted elsewhere is published as differences: a Prometheus counter can only be added to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from sgl_esft.lifecycle.sglang_engine import EngineCounters
    from sgl_esft.weave.slot_table import SlotUses


class _Total:
    """A counter that follows a total."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._published = 0.0

    def follow(self, total: float) -> None:
        self._counter.inc(total - self._published)
        self._published = total


def _counter(name: str, what: str, registry: Any, *labels: str) -> Counter:
    # SGLang names the folder that its processes share before it starts a rank, and
    # prometheus_client reads that name when it is imported.
    from prometheus_client import REGISTRY, Counter

    return Counter(f"sgl_esft:{name}", what, labels, registry=registry or REGISTRY)


class DeviceTierMetrics:
    """One rank's adapter slots."""

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        def total(name: str, what: str) -> _Total:
            return _Total(_counter(name, what, registry, "rank").labels(str(rank)))

        self._hits = total("device_cache_hits", "Adapters of a new batch that had a slot.")
        self._misses = total("device_cache_misses", "Adapters of a new batch that had none.")
        self._evictions = total("device_cache_evictions", "Adapters that lost their slot.")

    def set(self, uses: SlotUses) -> None:
        """Publish what the slots did so far."""
        self._hits.follow(uses.num_hits)
        self._misses.follow(uses.num_misses)
        self._evictions.follow(uses.num_evictions)


class HostTierMetrics:
    """Loads, and adapters that left host memory and came back; of the process that serves HTTP."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        def total(name: str, what: str) -> _Total:
            return _Total(_counter(name, what, registry))

        loads = _counter("adapter_loads", "Loads from disk, by how.", registry, "outcome")
        self._loads = _Total(loads.labels("ok"))
        self._failed_loads = _Total(loads.labels("failed"))
        self._load_seconds = total("adapter_load_seconds", "Seconds of loads that succeeded.")
        self._replacements = total("adapter_replacements", "Adapters replaced in place.")
        self._evictions = total("host_cache_evictions", "Idle adapters that left host memory.")
        self._misses = total("host_cache_misses", "Loads of adapters that had left host memory.")

    def set(self, counters: EngineCounters) -> None:
        """Publish what the engine did so far."""
        self._loads.follow(counters.num_loads)
        self._failed_loads.follow(counters.num_failed_loads)
        self._load_seconds.follow(counters.load_seconds)
        self._replacements.follow(counters.num_replacements)
        self._evictions.follow(counters.num_evictions)
        self._misses.follow(counters.num_reloads)
