"""Expert memory as Prometheus gauges, beside SGLang's own at /metrics (with --enable-metrics).

lora_seat.py (an adapter came or went) -> [MemoryMetrics.set] -> SGLang's /metrics
"""

from __future__ import annotations

from sgl_esft.memory_report import DeviceMemory


class MemoryMetrics:
    """The gauges of one rank."""

    def __init__(self) -> None:
        # SGLang names the folder that its processes share before it starts a rank, and
        # prometheus_client reads that name when it is imported.
        from prometheus_client import Gauge

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(
                f"sgl_esft:{name}",
                what,
                labelnames=("rank", *labels),
                multiprocess_mode="mostrecent",
            )

        self._experts = gauge("expert_memory_bytes", "Bytes of the experts' slots.", "kind")
        self._pool = gauge("page_pool_bytes", "Bytes of the device's pages.", "state")
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
        if device.pool is not None:
            self._pool.labels(rank, "used").set(device.pool.used_bytes)
            self._pool.labels(rank, "free").set(device.pool.free_bytes)
        self._fragmentation.labels(rank).set(device.fragmentation)
        self._adapters.labels(rank).set(len(device.adapters))
