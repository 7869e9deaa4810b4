"""Names of the metrics that only a server with --expert-cache has, by the code."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics


def tier_metrics() -> set[str]:
    """As at /metrics."""
    registry = CollectorRegistry()
    ExpertTierMetrics(0, registry)
    names = {name for found in registry._collector_to_names.values() for name in found}
    return {name for name in names if name.endswith("_total")}
