"""Names of the metrics that only servers with some option have, by the code."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics
from sgl_esft.plugin.lora_store import LoraMetrics


def tier_metrics() -> set[str]:
    """With --expert-cache, as at /metrics."""
    registry = CollectorRegistry()
    ExpertTierMetrics(0, registry)
    return {name for name in _names(registry) if name.endswith("_total")}


def lora_metrics() -> set[str]:
    """With --enable-lora, as at /metrics."""
    registry = CollectorRegistry()
    LoraMetrics(0, registry)
    return _names(registry)


def _names(registry: CollectorRegistry) -> set[str]:
    return {name for found in registry._collector_to_names.values() for name in found}
