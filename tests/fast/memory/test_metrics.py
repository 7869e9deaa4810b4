"""What ranks publish of their memory, and what is left of it when they have gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from sgl_esft.http.record import OTHERS
from sgl_esft.memory.metrics import MemoryMetrics
from sgl_esft.observe.labels import MAX_ADAPTERS
from tests.support.memory_reports import padded_device

# Two ranks as one process publishes them, then the front of a server that has one rank left.
RANKS = """
from sgl_esft.memory.metrics import MemoryMetrics
from tests.fast.memory.test_metrics import publish
publish(MemoryMetrics(), 2)
"""
FRONT = """
from sgl_esft.memory.metrics import MemoryMetrics, published_gauges
MemoryMetrics().zero_from(1, published_gauges())
for metric in published_gauges():
    for sample in metric.samples:
        print(metric.name, sample.labels["rank"], bool(sample.value))
"""


def publish(metrics: MemoryMetrics, num_ranks: int) -> None:
    """As if each of these ranks had the same memory."""
    device = padded_device()
    for rank in range(num_ranks):
        metrics.set(replace(device, rank=rank))


def test_ranks_that_left_have_no_memory() -> None:
    ranks, front = CollectorRegistry(), CollectorRegistry()
    publish(MemoryMetrics(ranks), 4)
    MemoryMetrics(front).zero_from(2, ranks.collect())
    published = [s for metric in ranks.collect() for s in metric.samples]
    zeroed = [s for metric in front.collect() for s in metric.samples]
    assert {s.labels["rank"] for s in zeroed} == {"2", "3"}
    assert {s.value for s in zeroed} == {0.0}
    wanted = {
        (s.name, *s.labels.values()) for s in published if int(s.labels["rank"]) >= 2 and s.value
    }
    assert {(s.name, *s.labels.values()) for s in zeroed} == wanted


def test_owners_that_come_and_go_have_only_so_many_series() -> None:
    registry = CollectorRegistry()
    metrics = MemoryMetrics(registry)
    device = padded_device(rank=0)

    def mapped(owner: str) -> float | None:
        labels = {"rank": "0", "owner": owner}
        return registry.get_sample_value("sgl_esft:expert_memory_owner_bytes", labels)

    for number in range(MAX_ADAPTERS):
        metrics.set(replace(device, adapters={f"made-{number}": 0}))
    metrics.set(replace(device, adapters={"late": 0, "later": 2}))
    assert mapped(OTHERS) == device.owner_bytes(0) + device.owner_bytes(2) > 0
    assert (mapped("late"), mapped("made-0")) == (None, 0)
    assert mapped("base") == device.owner_bytes(-1)
    metrics.set(replace(device, adapters={}))
    assert mapped(OTHERS) == 0


def test_what_the_front_says_counts_over_what_the_ranks_said(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for script in (RANKS, FRONT):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {rank for _, rank, _ in lines} == {"0", "1"}
    assert not [name for name, rank, is_there in lines if rank == "1" and is_there == "True"]
    assert ["sgl_esft:adapters_on_device", "0", "True"] in lines
