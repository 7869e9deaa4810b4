"""Requests by adapter as Prometheus metrics, beside SGLang's own at /metrics (--enable-metrics).

    engine_hooks.py --outputs of the engine--> [RequestMetrics] -> SGLang's /metrics
    middleware.py ----ends of requests------->

Times and tokens are taken where SGLang takes its own, so over all adapters they add up to
`sglang:time_to_first_token_seconds` and its neighbours. Labels are names that the server knows, or
classes of errors: no client can make one, and labels.py bounds how many there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sgl_esft.http.record import BASE, NO_ADAPTER, OTHERS, RequestRecord, adapter_of
from sgl_esft.observe.labels import MAX_ADAPTERS, BoundedLabel

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

OTHER: Final = "other"
OUTCOMES: Final = ("ok", "refused", "timeout", "failed", "cancelled")  # of a request
_MAX_ERROR_TYPES: Final = 100
_ERROR_TYPE = re.compile(r"[A-Za-z]\w{0,63}")

# Seconds. From a step of a small model to a long prompt's prefill behind others.
_TTFT_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8),
    *(1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 100.0, 200.0),
)
_INTER_TOKEN_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
)
_E2E_S = (
    *(0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
    *(10.0, 20.0, 40.0, 60.0, 100.0, 200.0, 400.0, 800.0, 1800.0),
)


class RequestMetrics:
    """The metrics of the process that serves HTTP. `registry` None is prometheus_client's own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # SGLang names the folder that its processes share before it serves, and prometheus_client
        # reads that name when it is imported.
        from prometheus_client import REGISTRY, Counter, Histogram

        where = registry or REGISTRY

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"sgl_esft:{name}", what, labels, registry=where)

        def histogram(name: str, what: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            names = ("adapter", *labels)
            return Histogram(f"sgl_esft:{name}", what, names, registry=where, buckets=buckets)

        self._requests = counter(
            "requests", "Requests for the model that ended, by how.", "adapter", "outcome"
        )
        self._errors = counter("request_errors", "Answers that were errors, by type.", "type")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens prefilled.", "adapter")
        self._cached_tokens = counter(
            "cached_tokens", "Prompt tokens found in the prefix cache.", "adapter"
        )
        self._generation_tokens = counter(
            "generation_tokens", "Generation tokens processed.", "adapter"
        )
        self._ttft = histogram(
            "time_to_first_token_seconds",
            "Seconds to a sequence's first token; to all of them, if it is not streamed.",
            _TTFT_S,
            "is_streaming",
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Seconds from token to token.", _INTER_TOKEN_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "Seconds to a sequence's last token.", _E2E_S
        )
        self._adapters = BoundedLabel(MAX_ADAPTERS, OTHERS, always=(BASE, NO_ADAPTER))
        # Class names of ours and of SGLang's: few.
        self._error_types = BoundedLabel(_MAX_ERROR_TYPES, OTHER)
        self._begin()

    def _begin(self) -> None:
        """The base's series, at 0: until then a scrape would not know the metrics' names."""
        for outcome in OUTCOMES:
            self._requests.labels(BASE, outcome)
        for is_streaming in ("false", "true"):
            self._ttft.labels(BASE, is_streaming)
        self._errors.labels(OTHER)
        tokens = (self._prompt_tokens, self._cached_tokens, self._generation_tokens)
        for metric in (*tokens, self._inter_token, self._e2e):
            metric.labels(BASE)

    def observe_output(self, state: Any, outputs: Any, index: int) -> None:
        """One sequence's part of a batch of outputs, before SGLang has counted it.

        state: SGLang's ReqState; outputs: its BatchStrOutput or the like.
        """
        adapter = self._adapters.of(adapter_of(state))
        num_tokens = _tokens_at(outputs, "completion_tokens", index)
        if not state.ttft_observed:
            num_new = num_tokens
            self._prompt_tokens.labels(adapter).inc(outputs.prompt_tokens[index])
            self._cached_tokens.labels(adapter).inc(_tokens_at(outputs, "cached_tokens", index))
            is_streaming = "true" if getattr(state.obj, "stream", False) else "false"
            first_token_s = state.time_stats.get_first_token_latency()
            self._ttft.labels(adapter, is_streaming).observe(first_token_s)
        else:
            num_new = num_tokens - state.last_completion_tokens
            self._observe_inter_token(adapter, state.time_stats.get_interval(), num_new)
        if num_new > 0:
            self._generation_tokens.labels(adapter).inc(num_new)
        if state.finished:
            self._e2e.labels(adapter).observe(state.time_stats.get_e2e_latency())

    def _observe_inter_token(self, adapter: str, seconds: float, num_new: int) -> None:
        """Tokens that arrive together took the same time each."""
        latencies = self._inter_token.labels(adapter)
        for _ in range(num_new):
            latencies.observe(seconds / num_new)

    def request_ended(self, record: RequestRecord, outcome: str) -> None:
        """A request for the model has ended; it counts once for each adapter it used."""
        for adapter in record.adapters or (NO_ADAPTER,):
            self._requests.labels(self._adapters.of(adapter), outcome).inc()

    def error_answered(self, error_type: str | None) -> None:
        """An answer was an error of this type; None: it did not say which."""
        label = OTHER
        if error_type is not None and _ERROR_TYPE.fullmatch(error_type):
            label = self._error_types.of(error_type)
        self._errors.labels(label).inc()


def ready_gauge(registry: CollectorRegistry | None = None) -> Callable[[bool], None]:
    """Publishes whether the server is ready. None: prometheus_client's own registry."""
    from prometheus_client import REGISTRY, Gauge

    gauge = Gauge(
        "sgl_esft:ready",
        "1 while GET /readyz answers 200.",
        multiprocess_mode="mostrecent",
        registry=registry or REGISTRY,
    )
    set_to: Callable[[bool], None] = gauge.set
    return set_to


def _tokens_at(outputs: Any, field: str, index: int) -> int:
    """Embeddings have no such tokens."""
    counts = getattr(outputs, field, None)
    return int(counts[index]) if counts else 0
