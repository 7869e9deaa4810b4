"""Faults as Prometheus metrics, beside metrics.py's.

recovery.py --kind--> [FaultMetrics.count] --> SGLang's /metrics
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class FaultMetrics:
    """`sgl_elastic:faults_total{kind}`: instance, memory, recovery. None: the default registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # As in metrics.py: not before SGLang has named the folder that its processes share.
        from prometheus_client import REGISTRY, Counter

        self._faults = Counter(
            "sgl_elastic:faults",
            "Instances and memory workers that were lost, and recoveries of the serving one.",
            ["kind"],
            registry=registry or REGISTRY,
        )

    def count(self, kind: str) -> None:
        """One more of this kind."""
        self._faults.labels(kind).inc()
