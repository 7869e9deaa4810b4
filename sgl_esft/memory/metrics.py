"""Expert memory as Prometheus gauges, beside SGLang's own at /metrics (with --enable-metrics).

lora_manager.py (an adapter came or went) -> [MemoryMetrics.set] ---> SGLang's /metrics
the elastic front (a scale ended) -> [MemoryMetrics.zero_from] ->
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_esft.http.record import BASE, OTHERS
from sgl_esft.memory.report import BASE_OWNER, DeviceMemory
from sgl_esft.observe.labels import MAX_ADAPTERS, BoundedLabel

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge, Metric


class MemoryMetrics:
    """The gauges of one rank, or of all as the front sees them.

    `registry` None is prometheus_client's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import REGISTRY, Gauge

        self._by_name: dict[str, Gauge] = {}

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            full_name = f"sgl_esft:{name}"
            self._by_name[full_name] = Gauge(
                full_name,
                what,
                labelnames=("rank", *labels),
                multiprocess_mode="mostrecent",
                registry=registry or REGISTRY,
            )
            return self._by_name[full_name]

        self._experts = gauge("expert_memory_bytes", "Bytes of the experts' slots.", "kind")
        self._pool = gauge("page_pool_bytes", "Bytes of the device's pages.", "state")
        self._owners = gauge(
            "expert_memory_owner_bytes",
            "Bytes of the slots that the base or an adapter has.",
            "owner",
        )
        self._labels = BoundedLabel(MAX_ADAPTERS, OTHERS, always=(BASE,))
        self._shown: frozenset[str] = frozenset()  # owners with a gauge
        self._fragmentation = gauge("expert_memory_fragmentation", "F_mem: mapped over used bytes.")
        self._adapters = gauge("adapters_on_device", "Adapters that have an adapter slot.")

    def set(self, device: DeviceMemory) -> None:
        """Publish the rank's memory as of now."""
        rank = str(device.rank)
        for kind, num_bytes in (
            ("reserved", device.reserved_bytes),
            ("mapped", device.mapped_bytes),
            ("shared", device.shared_bytes),
            ("used", device.used_bytes),
            ("padded", device.padded_bytes),
        ):
            self._experts.labels(rank, kind).set(num_bytes)
        self._set_owners(rank, device)
        if device.pool is not None:
            self._pool.labels(rank, "used").set(device.pool.used_bytes)
            self._pool.labels(rank, "free").set(device.pool.free_bytes)
        self._fragmentation.labels(rank).set(device.fragmentation)
        self._adapters.labels(rank).set(len(device.adapters))

    def _set_owners(self, rank: str, device: DeviceMemory) -> None:
        # Set to 0, not removed: a removed gauge lives on in the file that processes share.
        mapped = dict.fromkeys(self._shown, 0)
        for name, owner in {BASE: BASE_OWNER, **device.adapters}.items():
            label = self._labels.of(name)
            mapped[label] = mapped.get(label, 0) + device.owner_bytes(owner)
        self._shown = frozenset(mapped)
        for label, num_bytes in mapped.items():
            self._owners.labels(rank, label).set(num_bytes)

    def zero_from(self, num_ranks: int, published: Iterable[Metric]) -> None:
        """Ranks from `num_ranks` on serve no more: what they have published becomes 0.

        Not the ranks themselves do it: by then rank 0 may be another process's number.
        """
        for metric in published:
            gauge = self._by_name.get(metric.name)
            if gauge is None:
                continue
            for sample in metric.samples:
                if int(sample.labels["rank"]) >= num_ranks and sample.value:
                    gauge.labels(**sample.labels).set(0)


def published_gauges() -> Iterable[Metric]:
    """The gauges of all processes of this server, each with its most recent value."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])  # SGLang's, with --enable-metrics
    found: Iterable[Metric] = MultiProcessCollector.merge(
        [str(file) for file in folder.glob("gauge_mostrecent_*.db")]
    )
    return found
