"""Woven answers are the merged model's answers, token for token.

For every architecture and parallel layout: base and four adapters, served
together in mixed batches, against plain SGLang on the merged checkpoints.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tests.support.base_factory import AWKWARD_PAGE, SERVED_ARCHITECTURES
from tests.support.families import Families
from tests.support.references import NUM_NEW_TOKENS, Answers, reference_of
from tests.support.servers import DP2_EP2, TP2_EP2, ServerPool, ServerSpec

pytestmark = pytest.mark.server

# Small chunks and few running requests, so that prefills are chunked and batches turn over.
CHUNKED = ("--chunked-prefill-size", "64", "--max-running-requests", "24")
DP_ARCHITECTURE = "Qwen2MoeForCausalLM"  # last, so that its server still runs for the last test
# Expert memory is virtual: experts that end within a page, or many on one page. "padded" is the
# paper's baselines: every slot has its memory, and rerouting is a chain of torch operations.
LAYOUTS = {
    "one-rank": (*CHUNKED, "--expert-page-size", AWKWARD_PAGE),
    "tp2-ep2": TP2_EP2,
    "dp2-ep2": (*DP2_EP2, "--expert-page-size", "2MiB"),
    "padded": (*CHUNKED, "--expert-memory", "padded", "--reroute", "unfused"),
}
# Experts in tiers: as many rows as one token needs, and what is fetched ahead. More: test_tiers.py.
TIERS = (*CHUNKED, "--expert-cache", "4", "--expert-policy", "finemoe")
# Rerouting inside the router: softmax, and sigmoid with a bias and groups. Not in README's table.
MORE_LAYOUTS = {
    "replicas": (*CHUNKED, "--dp-size", "2"),
    "router": (*CHUNKED, "--reroute", "router"),
    "router-tp2-ep2": (*TP2_EP2, "--reroute", "router"),
    "tiers": (*TIERS, "--expert-loads-per-layer", "3"),
}
BATCH = 40
# What `make test` serves. There, DeepSeek-V2 on one rank is the demo's (test_zoo_served.py), and DP
# attention the elastic server's (test_elastic.py).
QUICK = {("Qwen3MoeForCausalLM", "tp2-ep2"), ("Qwen3MoeForCausalLM", "tiers")}
# SGLang's own Mixtral has no DP attention; fast/launch/test_refusals.py has that case.
CASES = [
    ("MixtralForCausalLM", "one-rank"),
    ("MixtralForCausalLM", "tp2-ep2"),
    ("DeepseekV3ForCausalLM", "one-rank"),
    ("DeepseekV3ForCausalLM", "tp2-ep2"),
    ("DeepseekV3ForCausalLM", "router-tp2-ep2"),
    ("DeepseekV2ForCausalLM", "router"),
    ("DeepseekV2ForCausalLM", "padded"),
    ("DeepseekV2ForCausalLM", "replicas"),
    ("Qwen3MoeForCausalLM", "tiers"),
    *itertools.product(
        ("DeepseekV2ForCausalLM", "Qwen3MoeForCausalLM", DP_ARCHITECTURE),
        ("one-rank", "tp2-ep2", "dp2-ep2"),
    ),
]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES],
)
def test_woven_equals_merged(
    architecture: str, layout: str, families: Families, server_pool: ServerPool
) -> None:
    family = families.get(architecture)
    reference = reference_of(family, server_pool)
    expected, prompts = reference.answers, reference.prompts
    flags = (LAYOUTS | MORE_LAYOUTS)[layout]
    server = server_pool.get(ServerSpec(family.base, family.named, flags))
    requests = [(name, i) for name in expected for i in range(len(prompts))]
    random.Random(layout).shuffle(requests)
    wrong = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        answers = server.token_ids(
            [prompts[i] for _, i in batch], [name for name, _ in batch], NUM_NEW_TOKENS
        )
        wrong += [r for r, a in zip(batch, answers, strict=True) if a != expected[r[0]][r[1]]]
    assert wrong == []
    assert_models_differ(expected)


def test_every_served_architecture_is_here() -> None:
    assert set(CASES) > QUICK
    assert {architecture for architecture, _ in CASES} >= set(SERVED_ARCHITECTURES)


@pytest.mark.full
def test_more_adapters_than_slots_under_dp_attention(
    families: Families, server_pool: ServerPool
) -> None:
    """Slots are permanent there: loading one more unloads the oldest, asking brings it back."""
    family = families.get(DP_ARCHITECTURE)
    reference = reference_of(family, server_pool)
    server = server_pool.get(ServerSpec(family.base, family.named, LAYOUTS["dp2-ep2"]))

    def answers_as(adapter: str, model: str) -> bool:
        tokens = server.token_ids([reference.prompts[0]], [adapter], NUM_NEW_TOKENS)[0]
        return tokens == reference.answers[model][0]

    assert all(answers_as(name, name) for name in family.adapters)
    assert server.load("fifth", family.adapters["a3"]).status_code == 200
    assert server.adapter_names() == ["a1", "a2", "a3", "fifth"]
    assert answers_as("fifth", "a3")
    assert answers_as("a0", "a0")
    assert server.adapter_names() == ["a0", "a2", "a3", "fifth"]
    assert server.unload("fifth").status_code == 200


def assert_models_differ(answers: Answers) -> None:
    """The test would prove nothing if adapters did not change what is generated."""
    for name, tokens in answers.items():
        others = [answers[other] for other in answers if other != name]
        for other in others:
            same = sum(a == b for a, b in zip(tokens, other, strict=True))
            assert same < len(tokens) / 2
