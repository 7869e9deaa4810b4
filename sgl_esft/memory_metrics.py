"""Expert memory as Prometheus gauges, beside SGLang's own at /metrics (with --enable-metrics).

lora_seat.py (an adapter came or went) -> [MemoryMetrics.set] -> SGLang's /metrics
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_esft.memory_report import BASE_OWNER, DeviceMemory
from sgl_esft.observe.record import BASE

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MemoryMetrics:
    """The gauges of one rank. `registry` None is prometheus_client's own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import REGISTRY, Gauge

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(
                f"sgl_esft:{name}",
                what,
                labelnames=("rank", *labels),
                multiprocess_mode="mostrecent",
                registry=registry or REGISTRY,
            )

        self._experts = gauge("expert_memory_bytes", "Bytes of the experts' slots.", "kind")
        self._pool = gauge("page_pool_bytes", "Bytes of the device's pages.", "state")
        self._owners = gauge(
            "expert_memory_owner_bytes",
            "Bytes of the slots that the base or an adapter has.",
            "owner",
        )
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
        owners = {BASE: BASE_OWNER, **device.adapters}
        # Set to 0, not removed: a removed gauge lives on in the file that processes share.
        self._shown |= frozenset(owners)
        for name in self._shown:
            mapped = device.owner_bytes(owners[name]) if name in owners else 0
            self._owners.labels(rank, name).set(mapped)
        if device.pool is not None:
            self._pool.labels(rank, "used").set(device.pool.used_bytes)
            self._pool.labels(rank, "free").set(device.pool.free_bytes)
        self._fragmentation.labels(rank).set(device.fragmentation)
        self._adapters.labels(rank).set(len(device.adapters))
