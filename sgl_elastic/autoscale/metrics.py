"""Scaling as Prometheus metrics, beside SGLang's own at /metrics (with --enable-metrics).

coordinator.listen --operation, placement--> [ScaleMetrics] --> SGLang's /metrics
front.py --seconds a request was held------>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sgl_elastic.coordinator.operations import Operation, StepState
from sgl_elastic.instance.spares import SpareMemory, SpareState
from sgl_elastic.types import ExpertCopy, OperationState, Placement, StepKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


# From a page that is mapped in a millisecond to an instance that is started in minutes.
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class CopyMetrics:
    """Copies of experts by device (--redundant-experts)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY, Gauge

        self._copies = Gauge(
            "sgl_elastic:expert_copies",
            "Copies of experts, in all layers.",
            ["device"],
            registry=registry or REGISTRY,
            multiprocess_mode="mostrecent",
        )
        self._shown: frozenset[int] = frozenset()

    def observe(self, placement: Placement, copies: Sequence[ExpertCopy]) -> None:
        """0 for devices that have none, or have left."""
        self._shown |= frozenset(placement.device_ids)
        for device_id in self._shown:
            count = sum(copy.device_id == device_id for copy in copies)
            self._copies.labels(str(device_id)).set(count)


_OUTCOMES = (OperationState.SUCCEEDED, OperationState.ROLLED_BACK, OperationState.DEGRADED)
_PHASES = ("plan", "memory", "prepare", "switch", "drain")
_FAULTS = ("instance", "memory", "recovery")


class ScaleMetrics:
    """The metrics of one coordinator. `registry` None is prometheus_client's own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it serves, and prometheus_client
        # reads that name when it is imported.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        where = registry or REGISTRY

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(
                f"sgl_elastic:{name}", what, labels, registry=where, multiprocess_mode="mostrecent"
            )

        def histogram(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"sgl_elastic:{name}", what, labels, registry=where, buckets=SECONDS)

        self._operations = Counter(
            "sgl_elastic:scale_operations",
            "Scale operations that ended, by how.",
            ["outcome"],
            registry=where,
        )
        self._step_seconds = histogram("scale_step_seconds", "Seconds of one step.", "kind")
        self._phase_seconds = histogram("scale_phase_seconds", "Seconds of one phase.", "phase")
        self._gap_seconds = histogram("scale_gap_seconds", "Seconds new requests were held.")
        self._held_seconds = histogram("held_request_seconds", "Seconds one request was held.")
        self._devices = gauge("devices", "Devices of the instance that serves.")
        self._experts = gauge("device_experts", "Routed experts of each layer.", "device")
        self._kv_tokens = gauge("device_kv_tokens", "KV capacity in tokens.", "device")
        self._shown: frozenset[int] = frozenset()  # devices with gauges
        self._last: tuple[str, str] = ("", "")  # id and outcome of what was counted last
        self._begin()

    def _begin(self) -> None:
        """Series at 0: until the first scale a scrape would not know the metrics' names."""
        for outcome in _OUTCOMES:
            self._operations.labels(outcome.value)
        for kind in StepKind:
            self._step_seconds.labels(kind.value)
        for phase in _PHASES:
            self._phase_seconds.labels(phase)

    def observe(self, operation: Operation, placement: Placement) -> None:
        """A listener of the coordinator."""
        outcome = (operation.operation_id, operation.state.value)
        if not operation.finished or outcome == self._last:
            return
        self.set_placement(placement)
        self._operations.labels(operation.state.value).inc()
        # An operation that was degraded ends a second time, with steps that were counted.
        if operation.operation_id != self._last[0]:
            self._count(operation)
        self._last = outcome

    def _count(self, operation: Operation) -> None:
        for step in operation.steps:
            if step.state is not StepState.PENDING:
                self._step_seconds.labels(step.kind.value).observe(step.seconds)
        for phase in operation.phases:
            self._phase_seconds.labels(phase.name).observe(phase.seconds)
        if operation.gap_s:
            self._gap_seconds.observe(operation.gap_s)

    def set_placement(self, placement: Placement) -> None:
        """What each device of the serving instance holds; 0 for devices that have left."""
        self._devices.set(placement.dp_size)
        # Set to 0, not removed: a removed gauge lives on in the other processes' files.
        self._shown |= frozenset(placement.device_ids)
        for device_id in self._shown:
            device = str(device_id)
            self._experts.labels(device).set(len(placement.experts_of(device_id)))
            self._kv_tokens.labels(device).set(placement.kv_tokens_of(device_id))

    def observe_held(self, seconds: float) -> None:
        """A request waited so long at a switch."""
        self._held_seconds.observe(seconds)


def when_ended(tell: Callable[[int], None]) -> Callable[[Operation, Placement], None]:
    """A listener of the coordinator: `tell` hears how many ranks serve after each operation.

    By then those of the former instance have run their last batch, and publish nothing more.
    """

    def observe(operation: Operation, placement: Placement) -> None:
        if operation.finished:
            tell(placement.dp_size)

    return observe


# Faults as Prometheus metrics, beside metrics.py's.
#
# recovery.py --kind--> [FaultMetrics.count] --> SGLang's /metrics


class FaultMetrics:
    """`sgl_elastic:faults_total{kind}`: instance, memory, recovery, request.

    `registry` None is prometheus_client's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # As in metrics.py: not before SGLang has named the folder that its processes share.
        from prometheus_client import REGISTRY, Counter

        self._faults = Counter(
            "sgl_elastic:faults",
            "Instances and memory workers that were lost, recoveries of the serving one, and "
            "requests that ended engines.",
            ["kind"],
            registry=registry or REGISTRY,
        )
        for kind in _FAULTS:
            self._faults.labels(kind)

    def count(self, kind: str) -> None:
        """One more of this kind."""
        self._faults.labels(kind).inc()


class SpareMetrics:
    """`sgl_elastic:spares` and their `sgl_elastic:spare_bytes{kind}`: pss, rss.

    `registry` None is prometheus_client's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # As in metrics.py: not before SGLang has named the folder that its processes share.
        from prometheus_client import REGISTRY, Gauge

        where, mode = registry or REGISTRY, "mostrecent"
        self._spares = Gauge(
            "sgl_elastic:spares",
            "Processes that instances can begin as copies of.",
            registry=where,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )
        self._bytes = Gauge(
            "sgl_elastic:spare_bytes",
            "Host memory of all spares; pss shares a page among those who have it.",
            ["kind"],
            registry=where,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )
        self.set(())

    def set(self, spares: Iterable[SpareMemory]) -> None:
        """What there is now."""
        found = tuple(spares)
        self._spares.set(sum(each.state is SpareState.READY for each in found))
        self._bytes.labels("pss").set(sum(each.pss_bytes for each in found))
        self._bytes.labels("rss").set(sum(each.rss_bytes for each in found))
