"""A woven int8 server with few rows answers as the one with all experts in memory.

    base in int8, adapters --> woven server, and one with --expert-cache --> the same answers

Base and four adapters in mixed batches: three in bfloat16, quantised when they are loaded, one
stored quantised. The server with all experts is held against merged checkpoints in
test_quantised.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from sgl_esft.formats.model_spec import read_moe_spec
from tests.server.test_quantised import (
    MIN_CLEAR,
    QUICK,
    TIE_LOGPROB,
    Model,
    ask,
    ask_alone,
    assert_models_differ,
    prompts,
    spec_of,
)
from tests.server.test_tiers import counter
from tests.support.quantised_zoo import NAMES, QuantisedZoo
from tests.support.servers import ServerPool

pytestmark = [pytest.mark.server, pytest.mark.full]

NUM_ROWS = 6
MAX_BYTES_PER_S = 4_000_000_000  # more than a test waits for
TIERS = (
    *("--expert-cache", str(NUM_ROWS), "--expert-policy", "lfu", "--enable-metrics"),
    *("--expert-read-bandwidth", f"{MAX_BYTES_PER_S}B"),
)
MODELS: tuple[Model, ...] = (None, *NAMES)


def test_answers_in_tiers_are_those_with_all_experts_in_memory(
    quantised_zoo: QuantisedZoo, server_pool: ServerPool, tmp_path: Path
) -> None:
    spec = spec_of(quantised_zoo, *QUICK, tmp_path / "copies")
    texts = prompts()
    asked = [(model, i) for model in MODELS for i in range(len(texts))]
    random.Random("tiers").shuffle(asked)
    models, every = [model for model, _ in asked], [texts[i] for _, i in asked]
    whole = server_pool.get(spec)
    together = dict(zip(asked, ask(whole, models, every), strict=True))
    alone = {model: ask_alone(whole, model) for model in MODELS}
    expected = {model: [together[model, i] for i in range(len(texts))] for model in MODELS}
    assert_models_differ({m: [text for text, _ in each] for m, each in expected.items()})

    tiered = server_pool.get(replace(spec, args=(*spec.args, *TIERS)))
    found = dict(zip(asked, ask(tiered, models, every), strict=True))
    clear = {key for key, (_, gap) in together.items() if gap > TIE_LOGPROB}
    assert [key for key in clear if found[key][0] != together[key][0]] == []
    for model in MODELS:
        assert sum(key[0] == model for key in clear) >= MIN_CLEAR
        assert ask_alone(tiered, model) == alone[model], "not a bit differs there"
    assert counter(tiered, "expert_loads", 'why="demand"'), "every expert was there"

    report = requests.get(f"{tiered.url}/v1/memory", timeout=30).json()
    slot_bytes = read_moe_spec(quantised_zoo.quantised(None, "int8")).expert_bytes
    (device,) = report["devices"]
    assert device["tiers"]["max_bytes_per_s"] == MAX_BYTES_PER_S
    assert {layer["slot_bytes"] for layer in device["layers"]} == {slot_bytes}
