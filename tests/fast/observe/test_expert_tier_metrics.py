"""Counters of experts in tiers follow what a rank has counted."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from sgl_esft.observe.expert_tier_metrics import ExpertTierMetrics, ExpertTierTotals
from sgl_esft.offload.decisions import Counts
from sgl_esft.offload.host_tier import HostCounts
from sgl_esft.offload.reader import ReadCounts
from sgl_esft.offload.recall import Recall
from sgl_esft.offload.tier import TierTimes


def totals(times: int) -> ExpertTierTotals:
    return ExpertTierTotals.of(
        Counts(*(times * number for number in (20, 12, 8, 5, 3, 1))),
        TierTimes(stall_s=0.5 * times, num_failed=2 * times),
        ReadCounts(num_experts=13 * times, num_reads=40, num_bytes=4096 * times, seconds=1.5),
        HostCounts(num_experts=7 * times, num_bytes=512 * times),
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
        'expert_arrivals_total{rank="3",source="storage"} 26.0',
        'expert_arrivals_total{rank="3",source="host"} 14.0',
        'expert_arrival_bytes_total{rank="3",source="storage"} 8192.0',
        'expert_arrival_bytes_total{rank="3",source="host"} 1024.0',
        'expert_read_bytes_total{rank="3"} 8192.0',
        'expert_read_seconds_total{rank="3"} 1.5',
        'expert_stall_seconds_total{rank="3"} 1.0',
        'expert_read_failures_total{rank="3"} 4.0',
    ):
        assert f"sgl_esft:{line}\n" in text, line


def test_recall_has_a_series_for_each_layer_and_distance_that_was_predicted() -> None:
    """By the model's layer ids; nothing of a layer, or a server, that nothing is predicted of."""
    registry = CollectorRegistry()
    metrics, recall = ExpertTierMetrics(3, registry), Recall(3)
    metrics.set_recall(recall, [1, 2, 3])
    assert "expert_recall_requests_total{" not in generate_latest(registry).decode()
    for needed in ((4, 5), (5, 6)):
        recall.begin()
        recall.watch()
        recall.named(1, 2, np.array([5, 7]))
        recall.named(1, 1, np.array([9]))
        recall.asked(1, np.array(needed))
        metrics.set_recall(recall, [1, 2, 3])
    recall.begin()
    recall.named(1, 2, np.array([5]))
    recall.asked(1, np.array([5]))  # a pass that is not predicted for
    metrics.set_recall(recall, [1, 2, 3])
    lines = generate_latest(registry).decode().splitlines()
    assert [
        line for line in lines if line.startswith("sgl_esft:expert_recall") and "_total" in line
    ] == [
        'sgl_esft:expert_recall_requests_total{layer="2",rank="3"} 4.0',
        'sgl_esft:expert_recall_named_total{distance="2",layer="2",rank="3"} 4.0',
        'sgl_esft:expert_recall_named_total{distance="1",layer="2",rank="3"} 2.0',
        'sgl_esft:expert_recall_found_total{distance="2",layer="2",rank="3"} 2.0',
        'sgl_esft:expert_recall_found_total{distance="1",layer="2",rank="3"} 0.0',
    ]
