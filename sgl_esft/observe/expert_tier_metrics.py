"""Experts in tiers as Prometheus counters of one rank (with --enable-metrics and --expert-cache).

offload/tier.py: Counts, TierTimes; reader.py: ReadCounts; host_tier.py: HostCounts
    --> [ExpertTierTotals]
offload/recall.py: what was named ahead, by layer and distance --.
after each forward pass --[ExpertTierMetrics.set, set_recall]--> SGLang's /metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_esft.observe.tier_metrics import Totals, counter

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from sgl_esft.offload.decisions import Counts
    from sgl_esft.offload.host_tier import HostCounts
    from sgl_esft.offload.reader import ReadCounts
    from sgl_esft.offload.recall import Recall
    from sgl_esft.offload.tier import TierTimes


@dataclass(frozen=True)
class ExpertTierTotals:
    """Since the start, all layers together."""

    num_asked: int
    num_hits: int
    num_loads: int
    num_prefetches: int
    num_useful: int
    num_wasted: int
    num_failed: int
    stall_s: float
    read_bytes: int
    read_s: float
    num_read: int
    num_from_host: int
    host_bytes: int

    @classmethod
    def of(
        cls, counts: Counts, times: TierTimes, reads: ReadCounts, host: HostCounts
    ) -> ExpertTierTotals:
        return cls(
            num_asked=counts.num_asked,
            num_hits=counts.num_hits,
            num_loads=counts.num_loads,
            num_prefetches=counts.num_prefetches,
            num_useful=counts.num_useful,
            num_wasted=counts.num_wasted,
            num_failed=times.num_failed,
            stall_s=times.stall_s,
            read_bytes=reads.num_bytes,
            read_s=reads.seconds,
            num_read=reads.num_experts,
            num_from_host=host.num_experts,
            host_bytes=host.num_bytes,
        )

    @property
    def storage_bytes(self) -> int:
        return self.read_bytes


class ExpertTierMetrics(Totals):
    """The counters of one rank."""

    def __init__(self, rank: int, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        label = str(rank)
        loads = counter("expert_loads", "Experts read, by why.", registry, "rank", "why")
        guesses = counter(
            "expert_prefetches",
            "Prefetched experts, by what came of them.",
            registry,
            "rank",
            "was",
        )
        self._counters = {
            "num_loads": loads.labels(label, "demand"),
            "num_prefetches": loads.labels(label, "prefetch"),
            "num_useful": guesses.labels(label, "useful"),
            "num_wasted": guesses.labels(label, "wasted"),
            **_by_source(label, registry),
        }
        for field, name, what in (
            ("num_asked", "expert_requests", "Experts that layers' steps have asked for."),
            ("num_hits", "expert_hits", "Of them on the device when they were asked for."),
            ("num_failed", "expert_read_failures", "Needed experts that could not be read."),
            ("stall_s", "expert_stall_seconds", "Nothing could be computed: none had arrived."),
            ("read_bytes", "expert_read_bytes", "Bytes of experts read from storage."),
            ("read_s", "expert_read_seconds", "Time in reads, of all threads together."),
        ):
            self._counters[field] = counter(name, what, registry, "rank").labels(label)
        self._recall = _RecallCounters(label, registry)

    def set(self, totals: ExpertTierTotals) -> None:
        """Publish what was done so far."""
        self._publish(totals)

    def set_recall(self, recall: Recall, layer_ids: Sequence[int]) -> None:
        """Publish it. layer_ids: the model's, of the MoE layers in order: these are the labels."""
        for layer, num_asked in enumerate(recall.num_asked):
            if num_asked:
                self._recall.set("requests", num_asked, layer_ids[layer])
        for (layer, distance), row in recall.rows.items():
            self._recall.set("named", row.num_named, layer_ids[layer], distance)
            self._recall.set("found", row.num_found, layer_ids[layer], distance)


def _by_source(rank: str, registry: CollectorRegistry | None) -> dict[str, Counter]:
    """By field: what came into rows, from where."""
    what = "Experts that were brought into rows, by where from."
    experts = counter("expert_arrivals", what, registry, "rank", "source")
    what = "Bytes of experts that were brought into rows, by where from."
    num_bytes = counter("expert_arrival_bytes", what, registry, "rank", "source")
    return {
        "num_read": experts.labels(rank, "storage"),
        "num_from_host": experts.labels(rank, "host"),
        "storage_bytes": num_bytes.labels(rank, "storage"),
        "host_bytes": num_bytes.labels(rank, "host"),
    }


class _RecallCounters:
    """Only what is predicted for has a series; there are none where nothing is."""

    def __init__(self, rank: str, registry: CollectorRegistry | None) -> None:
        self._rank = rank
        self._counters = {
            name: counter(f"expert_recall_{name}", what, registry, "rank", *labels)
            for name, what, *labels in (
                ("requests", "Experts that steps which are predicted for asked for.", "layer"),
                ("named", "Experts that were predicted.", "layer", "distance"),
                ("found", "Of those asked for, predicted.", "layer", "distance"),
            )
        }
        self._published: dict[tuple[str, ...], int] = {}

    def set(self, name: str, total: int, *labels: int) -> None:
        """Of a layer, and a distance: a series from the first time on, at 0 too."""
        at = (self._rank, *map(str, labels))
        before = self._published.get((name, *at))
        if before != total:
            self._counters[name].labels(*at).inc(total - (before or 0))
            self._published[name, *at] = total
