"""Counters of experts in tiers follow what a rank has counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics, ExpertTierTotals
from sgl_esft.offload.decisions import Counts
from sgl_esft.offload.reader import ReadCounts
from sgl_esft.offload.tier import TierTimes


def totals(times: int) -> ExpertTierTotals:
    return ExpertTierTotals.of(
        Counts(*(times * number for number in (20, 12, 8, 5, 3, 1))),
        TierTimes(stall_s=0.5 * times, num_failed=2 * times),
        ReadCounts(num_experts=13 * times, num_reads=40, num_bytes=4096 * times, seconds=1.5),
    )


def test_counters_are_totals_and_not_sums_of_totals() -> None:
    registry = CollectorRegistry()
    metrics = ExpertTierMetrics(3, registry)
    metrics.set(totals(1))
    metrics.set(totals(2))
    metrics.set(totals(2))
    text = generate_latest(registry).decode()
    for line in (
        'expert_requests_total{rank="3"} 40.0',
        'expert_hits_total{rank="3"} 24.0',
        'expert_loads_total{rank="3",why="demand"} 16.0',
        'expert_loads_total{rank="3",why="prefetch"} 10.0',
        'expert_prefetches_total{rank="3",was="useful"} 6.0',
        'expert_prefetches_total{rank="3",was="wasted"} 2.0',
        'expert_read_bytes_total{rank="3"} 8192.0',
        'expert_read_seconds_total{rank="3"} 1.5',
        'expert_stall_seconds_total{rank="3"} 1.0',
        'expert_read_failures_total{rank="3"} 4.0',
    ):
        assert f"sgl_esft:{line}\n" in text, line
