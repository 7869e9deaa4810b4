"""Metrics by adapter, heat, request ids and JSON logs of a real server: the numbers, exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from sgl_esft import zoo
from sgl_esft.observe.json_logs import ACCESS_LOGGER
from tests.support.optional_metrics import lora_metrics, tier_metrics
from tests.support.servers import ROOT, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

# Overlapped, a sequence that has just ended takes part in one more step.
SPEC = ServerSpec(
    args=(
        *("--enable-metrics", "--heat-every", "1", "--disable-overlap-schedule"),
        *("--max-adapters", "3", "--log-format", "json", "--log-level-http", "info"),
        *("--max-running-requests", "4"),  # so that others wait
    )
)
ADAPTERS = ("reverse", "sum")
NUM_NEW_TOKENS = 6
_SAMPLE = re.compile(r"^(\w+:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_CONFIG = json.loads((zoo.base_path() / "config.json").read_text())

Labels = frozenset[str]


@dataclass(frozen=True)
class Snapshot:
    """All that a server tells at one moment."""

    samples: Mapping[tuple[str, Labels], float]
    heat: Mapping[str, Any]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples that have these labels."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(v for (n, have), v in self.samples.items() if n == name and wanted <= have)

    def tokens_of(self, adapter: str, layer_idx: int) -> int:
        layers = self.heat["adapters"].get(adapter)
        return 0 if layers is None else sum(layers[layer_idx])


def snapshot(server: Server) -> Snapshot:
    heat = get(server, "/v1/heat").json()  # what the last step counted is fetched for it
    text = get(server, "/metrics").text
    samples = {
        (name, frozenset(re.findall(r'\w+="[^"]*"', labels))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }
    return Snapshot(samples, heat)


def get(server: Server, route: str, **headers: str) -> requests.Response:
    return requests.get(f"{server.url}{route}", headers=headers, timeout=60)


@pytest.fixture
def server(server_pool: ServerPool) -> Server:
    return server_pool.get(SPEC)


def stream(server: Server, adapter: str) -> str:
    """A stream that does not say its usage; returns its request id."""
    response = server.post(
        "/v1/completions",
        {
            "model": f"base:{adapter}",
            "prompt": "coffee -> ",
            "stream": True,
            "max_tokens": NUM_NEW_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        },
    )
    assert response.status_code == 200
    assert "completion_tokens" not in response.text
    return response.headers["x-request-id"]


def lines(server: Server) -> list[dict[str, Any]]:
    """The access lines so far."""
    found = [line for line in server.log_path.read_text().splitlines() if line.startswith("{")]
    parsed = [json.loads(line) for line in found]
    return [line for line in parsed if line["logger"] == ACCESS_LOGGER]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    (found,) = (line for line in lines(server) if line["request_id"] == request_id)
    return found


def test_numbers_are_exact(server: Server) -> None:
    before = snapshot(server)
    answers = server.generate(["cat -> ", "1 + 2 = ", "dog -> "], [*ADAPTERS, None], NUM_NEW_TOKENS)
    streamed = line_of(server, stream(server, "reverse"))
    after = snapshot(server)

    def gained(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    told = {
        name: dict(answer["meta_info"])
        for name, answer in zip((*ADAPTERS, "base"), answers, strict=True)
    }
    told["reverse"]["prompt_tokens"] += streamed["prompt_tokens"]
    told["reverse"]["completion_tokens"] += NUM_NEW_TOKENS
    num_sequences = {"reverse": 2, "sum": 1, "base": 1}
    layers = range(len(after.heat["layers"]))
    for name, meta in told.items():
        prompt, generated = meta["prompt_tokens"], meta["completion_tokens"]
        number = num_sequences[name]
        assert generated == number * NUM_NEW_TOKENS
        assert gained("sgl_esft:requests_total", adapter=name, outcome="ok") == number
        assert gained("sgl_esft:prompt_tokens_total", adapter=name) == prompt
        assert gained("sgl_esft:generation_tokens_total", adapter=name) == generated
        assert gained("sgl_esft:time_to_first_token_seconds_count", adapter=name) == number
        assert gained("sgl_esft:e2e_request_latency_seconds_count", adapter=name) == number
        cached = gained("sgl_esft:cached_tokens_total", adapter=name)
        # The last token of a sequence is not computed on.
        computed = prompt - cached + generated - number
        for layer_idx in layers:
            routed = after.tokens_of(name, layer_idx) - before.tokens_of(name, layer_idx)
            assert routed == computed * _CONFIG["num_experts_per_tok"]
    assert gained("sgl_esft:requests_total") == sum(num_sequences.values())
    tokens_between = gained("sgl_esft:inter_token_latency_seconds_count", adapter="reverse")
    assert tokens_between >= NUM_NEW_TOKENS - 1  # a whole answer comes at once


def test_adapters_add_up_to_sglangs_own(server: Server) -> None:
    server.generate(["a", "b"], ["sum", None], 3)
    stream(server, "sum")
    now = snapshot(server)
    for ours, sglangs in (
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("cached_tokens_total", "cached_tokens_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
    ):
        assert now.value(f"sgl_esft:{ours}") == now.value(f"sglang:{sglangs}")
    ours_s = now.value("sgl_esft:e2e_request_latency_seconds_sum")
    assert ours_s == pytest.approx(now.value("sglang:e2e_request_latency_seconds_sum"))


def test_heat_says_what_a_step_reads(server: Server) -> None:
    server.generate(["x"], ["sum"], 4)
    now = snapshot(server)
    heat = now.heat
    num_layers, num_experts = len(heat["layers"]), heat["num_experts"]
    assert num_experts == _CONFIG["n_routed_experts"]
    for counts in heat["adapters"].values():
        assert [len(layer) for layer in counts] == [num_experts] * num_layers
    # The last step had one token.
    k = _CONFIG["num_experts_per_tok"]
    assert heat["distinct_experts_per_step"]["last"] == [k] * num_layers
    for layer_id, mean in zip(
        heat["layers"], heat["distinct_experts_per_step"]["mean"], strict=True
    ):
        total = now.value("sgl_esft:distinct_experts_sum", layer=str(layer_id))
        number = now.value("sgl_esft:distinct_experts_count", layer=str(layer_id))
        assert number == heat["sampled_steps"]
        assert mean == pytest.approx(total / number)


def test_tiers_and_owners_are_told(server: Server) -> None:
    """Six adapters, three slots: whoever comes in puts another one out."""
    before = snapshot(server)
    for adapter in (*zoo.adapter_paths(), *ADAPTERS):
        server.generate(["x"], [adapter], 2)
    now = snapshot(server)

    def gained(name: str) -> float:
        return now.value(name, rank="0") - before.value(name, rank="0")

    misses = gained("sgl_esft:device_cache_misses_total")
    assert misses + gained("sgl_esft:device_cache_hits_total") == len(zoo.adapter_paths()) + 2
    assert misses >= len(zoo.adapter_paths()) - 3
    assert gained("sgl_esft:device_cache_evictions_total") == misses
    device = get(server, "/v1/memory").json()["devices"][0]
    owners = {**device["adapters"], "base": -1}
    for name in (*zoo.adapter_paths(), "base"):
        told = now.value("sgl_esft:expert_memory_owner_bytes", owner=name)
        assert told == sum(
            run["count"] * layer["slot_bytes"]
            for layer in device["layers"]
            for run in layer["runs"]
            if name in owners and run["owner"] == owners[name]
        )
    assert now.value("sgl_esft:adapter_loads_total") == 0  # all were there from the start
    assert now.value("sgl_esft:ready") == 1


def test_later_requests_go_ahead_and_answers_stay(server: Server) -> None:
    """Batches are composed by adapter: who needs no other slot may overtake, within a bound."""
    names = [None, *sorted(zoo.adapter_paths())]
    asked = [(prompt, name) for prompt in ("coffee -> ", "river -> ") for name in names]
    alone = [server.token_ids([prompt], [name])[0] for prompt, name in asked]
    before = snapshot(server)
    together = server.token_ids([p for p, _ in asked], [n for _, n in asked])
    assert together == alone
    overtaken = "sgl_esft:overtaking_admissions_total"
    assert snapshot(server).value(overtaken) > before.value(overtaken)


def test_the_dashboard_for_grafana_finds_what_it_asks_sglang_for(server: Server) -> None:
    stream(server, "sum")
    assert server.post("/generate", {"text": "x", "adapter": "nobody"}).status_code == 404
    names = {name for name, _ in snapshot(server).samples}
    dashboard = (ROOT / "docs" / "grafana" / "sgl-esft.json").read_text()
    asked = set(re.findall(r"\b(?:sglang|sgl_esft):\w+", dashboard))
    assert len(asked) > 20
    assert asked - names - tier_metrics() - lora_metrics() == set()  # those are with flags


def test_refusals_are_counted_by_type_and_make_no_labels(server: Server) -> None:
    before = snapshot(server)
    for number in range(5):
        body = {"text": "x", "adapter": f"nobody-{number}"}
        assert server.post("/generate", body).status_code == 404
    assert get(server, "/v1/nowhere").status_code == 404
    after = snapshot(server)
    errors = "sgl_esft:request_errors_total"
    unknown = {"type": "UnknownAdapterError"}
    assert after.value(errors, **unknown) - before.value(errors, **unknown) == 5
    refused = {"adapter": "(none)", "outcome": "refused"}
    gained = after.value("sgl_esft:requests_total", **refused) - before.value(
        "sgl_esft:requests_total", **refused
    )
    assert gained == 5
    assert not any("nobody" in label for _, labels in after.samples for label in labels)


def test_every_answer_has_an_id_and_a_line_without_what_was_said(server: Server) -> None:
    secret = "a-secret-of-the-prompt"
    response = requests.post(
        f"{server.url}/generate",
        json={"text": secret, "adapter": "sum", "sampling_params": {"max_new_tokens": 2}},
        headers={"x-request-id": "mine-1"},
        timeout=60,
    )
    assert response.headers["x-request-id"] == "mine-1"
    line = line_of(server, "mine-1")
    assert (line["path"], line["status"], line["outcome"]) == ("/generate", 200, "ok")
    assert line["adapters"] == ["sum"]
    meta = response.json()["meta_info"]
    assert line["prompt_tokens"] == meta["prompt_tokens"]
    assert line["generated_tokens"] == meta["completion_tokens"]
    assert line["ttft_s"] is None
    assert 0 < line["duration_s"] < 60
    for route, status in (("/v1/nowhere", 404), ("/health", 200), ("/v1/models", 200)):
        answer = get(server, route, **{"x-request-id": "not sane"})
        assert answer.status_code == status
        assert len(answer.headers["x-request-id"]) == 32
        assert line_of(server, answer.headers["x-request-id"])["status"] == status
    assert secret not in server.log_path.read_text()


def test_a_stream_that_does_not_say_its_usage_is_known(server: Server) -> None:
    line = line_of(server, stream(server, "reverse"))
    assert line["generated_tokens"] == NUM_NEW_TOKENS
    assert line["prompt_tokens"] > 0
    assert 0 < line["ttft_s"] <= line["duration_s"]
