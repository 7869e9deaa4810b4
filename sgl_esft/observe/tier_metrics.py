"""Adapters' way from disk to host to device as Prometheus metrics (with --enable-metrics).

    a rank's adapter slots: SlotUses --> [DeviceTierMetrics] -> SGLang's /metrics
    the engine's host tier: EngineCounters --GET /metrics--> [HostTierMetrics] ---->

What is counted elsewhere is published as differences: a Prometheus counter can only be added to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from sgl_esft.weave.slot_table import SlotUses


@dataclass
class EngineCounters:
    """What the host tier did since the start."""

    num_loads: int = 0
    num_failed_loads: int = 0
    load_seconds: float = 0.0  # of loads that succeeded, all together
    num_replacements: int = 0
    num_evictions: int = 0  # adapters that left host memory for others
    num_reloads: int = 0  # loads of adapters that had left: misses of the host tier


class Totals:
    """Counters that follow the fields of a value, from its `set` to the next."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}  # by field
        self._published: dict[str, float] = {}

    def _publish(self, totals: object) -> None:
        for field, child in self._counters.items():
            total: float = getattr(totals, field)
            child.inc(total - self._published.get(field, 0.0))
            self._published[field] = total


def counter(name: str, what: str, registry: Any, *labels: str) -> Counter:
    """A counter with our prefix. `registry` None is prometheus_client's own."""
    # SGLang names the folder that its processes share before it starts a rank, and
    # prometheus_client reads that name when it is imported.
    from prometheus_client import REGISTRY, Counter

    return Counter(f"sgl_esft:{name}", what, labels, registry=registry or REGISTRY)


class DeviceTierMetrics(Totals):
    """One rank's adapter slots."""

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        for event, what in (
            ("hits", "Adapters of a new batch that had a slot."),
            ("misses", "Adapters of a new batch that had none."),
            ("evictions", "Adapters that lost their slot."),
        ):
            made = counter(f"device_cache_{event}", what, registry, "rank")
            self._counters[f"num_{event}"] = made.labels(str(rank))

    def set(self, uses: SlotUses) -> None:
        """Publish what the slots did so far."""
        self._publish(uses)


class HostTierMetrics(Totals):
    """Loads, and adapters that left host memory and came back; of the process that serves HTTP."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        loads = counter("adapter_loads", "Loads from disk, by how.", registry, "outcome")
        self._counters = {
            "num_loads": loads.labels("ok"),
            "num_failed_loads": loads.labels("failed"),
        }
        for field, name, what in (
            ("load_seconds", "adapter_load_seconds", "Seconds of loads that succeeded."),
            ("num_replacements", "adapter_replacements", "Adapters replaced in place."),
            ("num_evictions", "host_cache_evictions", "Idle adapters that left host memory."),
            ("num_reloads", "host_cache_misses", "Loads of adapters that had left host memory."),
        ):
            self._counters[field] = counter(name, what, registry)

    def set(self, counters: EngineCounters) -> None:
        """Publish what the engine did so far."""
        self._publish(counters)
