"""Metrics by adapter, from outputs as SGLang hands them over."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sgl_esft.http import record
from sgl_esft.http.record import OTHERS, RequestRecord
from sgl_esft.observe.labels import MAX_ADAPTERS
from sgl_esft.observe.request_metrics import OTHER, OUTCOMES, RequestMetrics
from sgl_esft.plugin import engine_hooks


class Sequence:
    """A ReqState, with the times it will have."""

    def __init__(self, adapter: str | None, rid: str = "r") -> None:
        self.obj = SimpleNamespace(lora_path=adapter, rid=rid, stream=True)
        self.ttft_observed = False
        self.last_completion_tokens = 1
        self.finished = False
        self.output_ids: list[int] = []
        self.interval_s = 0.0
        self.time_stats = SimpleNamespace(
            first_token_time=10.5,
            get_first_token_latency=lambda: 0.5,
            get_interval=lambda: self.interval_s,
            get_e2e_latency=lambda: 2.0,
        )

    def outputs(self, num_tokens: int, *, finished: bool = False) -> Any:
        self.finished = finished
        return SimpleNamespace(completion_tokens=[num_tokens], prompt_tokens=[7], cached_tokens=[3])

    def counted_by_sglang(self, num_tokens: int) -> None:
        self.ttft_observed = True
        self.last_completion_tokens = num_tokens


class Metrics:
    """Metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"sgl_esft:{name}", labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def run(metrics: Metrics, sequence: Sequence, *num_tokens: int, interval_s: float = 0.1) -> None:
    """Outputs after which the sequence has so many tokens; the last one ends it."""
    sequence.interval_s = interval_s
    for number in num_tokens:
        outputs = sequence.outputs(number, finished=number == num_tokens[-1])
        metrics.metrics.observe_output(sequence, outputs, 0)
        sequence.counted_by_sglang(number)


def test_tokens_and_times_of_one_sequence(metrics: Metrics) -> None:
    run(metrics, Sequence("math"), 1, 2, 2, 3)  # one output has no new token
    streamed = {"adapter": "math", "is_streaming": "true"}
    assert metrics.value("prompt_tokens_total", adapter="math") == 7
    assert metrics.value("cached_tokens_total", adapter="math") == 3
    assert metrics.value("generation_tokens_total", adapter="math") == 3
    assert metrics.value("time_to_first_token_seconds_sum", **streamed) == 0.5
    assert metrics.value("time_to_first_token_seconds_count", **streamed) == 1
    assert metrics.value("inter_token_latency_seconds_count", adapter="math") == 2
    assert metrics.value("inter_token_latency_seconds_sum", adapter="math") == pytest.approx(0.2)
    assert metrics.value("e2e_request_latency_seconds_sum", adapter="math") == 2.0
    assert metrics.value("generation_tokens_total", adapter="base") == 0


def test_tokens_that_come_together_took_the_same_time(metrics: Metrics) -> None:
    run(metrics, Sequence(None), 1, 5, interval_s=0.4)
    assert metrics.value("inter_token_latency_seconds_count", adapter="base") == 4
    assert metrics.value("inter_token_latency_seconds_sum", adapter="base") == pytest.approx(0.4)
    assert metrics.value("inter_token_latency_seconds_bucket", adapter="base", le="0.1") == 4
    assert metrics.value("inter_token_latency_seconds_bucket", adapter="base", le="0.08") == 0


def test_embeddings_have_no_tokens(metrics: Metrics) -> None:
    sequence = Sequence(None)
    sequence.finished = True
    metrics.metrics.observe_output(sequence, SimpleNamespace(prompt_tokens=[4]), 0)
    assert metrics.value("prompt_tokens_total", adapter="base") == 4
    assert metrics.value("generation_tokens_total", adapter="base") == 0


def test_a_request_counts_once_for_each_of_its_adapters(metrics: Metrics) -> None:
    request = RequestRecord("id", 0.0, sequences=[Sequence("math"), Sequence(None), Sequence(None)])
    metrics.metrics.request_ended(request, "ok")
    metrics.metrics.request_ended(RequestRecord("id", 0.0), "refused")
    assert metrics.value("requests_total", adapter="math", outcome="ok") == 1
    assert metrics.value("requests_total", adapter="base", outcome="ok") == 1
    assert metrics.value("requests_total", adapter="(none)", outcome="refused") == 1


def test_adapters_that_come_and_go_have_only_so_many_series(metrics: Metrics) -> None:
    for number in range(MAX_ADAPTERS + 3):
        sequence = Sequence(f"made-{number}")
        run(metrics, sequence, 1)
        metrics.metrics.request_ended(RequestRecord("id", 0.0, sequences=[sequence]), "ok")
    run(metrics, Sequence(None), 1)
    run(metrics, Sequence("made-0"), 1)
    assert metrics.value("generation_tokens_total", adapter="made-0") == 2
    assert metrics.value("generation_tokens_total", adapter="base") == 1
    assert metrics.value("requests_total", adapter=OTHERS, outcome="ok") == 3
    assert metrics.value("e2e_request_latency_seconds_count", adapter=OTHERS) == 3
    assert metrics.value("requests_total", adapter=f"made-{MAX_ADAPTERS}", outcome="ok") is None


def test_error_types_are_few(metrics: Metrics) -> None:
    for number in range(300):
        metrics.metrics.error_answered(f"Made{number}Error")
    metrics.metrics.error_answered(None)
    metrics.metrics.error_answered("a b")
    metrics.metrics.error_answered("Made0Error")
    assert metrics.value("request_errors_total", type="Made0Error") == 2
    assert metrics.value("request_errors_total", type=OTHER) == 202
    types = {
        s.labels["type"]
        for m in metrics.registry.collect()
        for s in m.samples
        if "type" in s.labels
    }
    assert len(types) <= 101


def test_hooks_fill_the_record_of_the_request_at_hand() -> None:
    request = RequestRecord("id", 10.0)
    contextvars.copy_context().run(check_hooks, request)  # the other tests have no request


def check_hooks(request: RequestRecord) -> None:
    record.begin(request)
    one, two = Sequence("math", "a"), Sequence(None, "b")
    manager = SimpleNamespace(rid_to_state={"a": one, "b": two})
    engine_hooks.note_prompt(None, manager, None, "text", [1, 2, 3])
    engine_hooks.note_prompt(None, manager, None, None, None, [[0.5]])
    engine_hooks.note_sequences(None, manager, SimpleNamespace(rid="a"))
    engine_hooks.note_sequences(None, manager, SimpleNamespace(rid=["b"]), None)
    assert request.adapters == ("base", "math")
    assert request.prompt_tokens == 3
    assert (request.generated_tokens, request.ttft_s) == (0, None)
    one.output_ids += [5, 6]
    assert (request.generated_tokens, request.ttft_s) == (2, 0.5)
    one.obj.stream = False
    assert request.ttft_s is None


def test_without_metrics_the_hook_does_nothing(metrics: Metrics) -> None:
    sequence = Sequence("math")
    engine_hooks.use(None)
    engine_hooks.observe_output(None, sequence, sequence.outputs(1), 0)
    engine_hooks.use(metrics.metrics)
    engine_hooks.observe_output(None, sequence, sequence.outputs(1), 0)
    engine_hooks.use(None)
    assert metrics.value("generation_tokens_total", adapter="math") == 1


def test_before_the_first_request_the_base_has_all_series(metrics: Metrics) -> None:
    """A scrape of a fresh server knows every name that a dashboard asks for."""
    found = {metric.name for metric in metrics.registry.collect() if metric.samples}
    assert found == {metric.name for metric in metrics.registry.collect()}
    for outcome in OUTCOMES:
        assert metrics.value("requests_total", adapter="base", outcome=outcome) == 0
    assert metrics.value("request_errors_total", type=OTHER) == 0
