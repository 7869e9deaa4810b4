"""Answers with experts in tiers are those of the merged models, however few rows there are.

As test_equality.py: base and four adapters in mixed batches, against plain SGLang on the merged
checkpoints, prompts in chunks, the prefix cache on.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests as http

from sgl_esft import zoo
from sgl_esft.config import DEFAULT_MAP_STORE_BYTES, DEFAULT_PREFETCH_DISTANCE
from sgl_esft.formats.model_spec import read_moe_spec
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import policy_of
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.simulate import replay
from sgl_esft.offload.trace import read_header_of, read_trace
from sgl_esft.plugin.recording import FLUSH_PERIOD_S
from tests.server.test_equality import BATCH, CHUNKED
from tests.support.families import Families
from tests.support.optional_metrics import tier_metrics
from tests.support.references import NUM_NEW_TOKENS, reference_of
from tests.support.servers import DP2_EP2, TP2_EP2, Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

LAYOUTS = {
    "one-rank": CHUNKED,
    "tp2": ("--tp-size", "2"),
    "ep2": TP2_EP2,
    "dp2": DP2_EP2,
}
# As much as the link carries is said and not measured: otherwise a busy machine predicts nothing.
NUM_ROWS, POLICY = 6, "finemoe"
AHEAD = ("--expert-loads-per-layer", "3", "--enable-metrics")
# Rows of a layer: as many as one token needs, some, and nearly all. One rank with as many as one
# token needs is in test_equality.py too.
CASES = [
    ("Qwen3MoeForCausalLM", "one-rank", "11", "auto"),
    ("Qwen3MoeForCausalLM", "ep2", "6", "regression"),
    ("Qwen3MoeForCausalLM", "dp2", "6", "lru"),
    ("DeepseekV2ForCausalLM", "one-rank", "4", "stream"),
    ("DeepseekV2ForCausalLM", "one-rank", "5", "next-gate"),
    ("DeepseekV2ForCausalLM", "tp2", "7", "finemoe"),
    ("DeepseekV2ForCausalLM", "dp2", "5", "auto"),
    ("DeepseekV3ForCausalLM", "one-rank", "9", "regression"),
    ("DeepseekV3ForCausalLM", "ep2", "4", "lfu"),
    ("Qwen2MoeForCausalLM", "one-rank", "5", "static"),
    ("Qwen2MoeForCausalLM", "one-rank", "6", "request-counts"),
    ("Qwen2MoeForCausalLM", "dp2", "7", "stream"),
    ("MixtralForCausalLM", "one-rank", "2", "lru"),
    ("MixtralForCausalLM", "ep2", "3", "finemoe"),
]


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "layout", "rows", "policy"), CASES)
def test_answers_in_tiers_equal_merged(
    architecture: str,
    layout: str,
    rows: str,
    policy: str,
    families: Families,
    server_pool: ServerPool,
) -> None:
    family = families.get(architecture)
    reference = reference_of(family, server_pool)
    flags = (*LAYOUTS[layout], "--expert-cache", rows, "--expert-policy", policy, *AHEAD)
    server = server_pool.get(ServerSpec(family.base, family.named, flags))
    requests = [(name, i) for name in reference.answers for i in range(len(reference.prompts))]
    random.Random(f"{layout} {policy}").shuffle(requests)
    wrong = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        answers = server.token_ids(
            [reference.prompts[i] for _, i in batch], [name for name, _ in batch], NUM_NEW_TOKENS
        )
        expected = [reference.answers[name][i] for name, i in batch]
        wrong += [r for r, a, e in zip(batch, answers, expected, strict=True) if a != e]
    assert wrong == []
    assert counter(server, "expert_loads", 'why="demand"'), "every expert was there"


def counter(server: Server, name: str, label: str = "") -> int:
    """Of all ranks."""
    text = http.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith(f"sgl_esft:{name}_total")]
    assert lines, name
    return int(sum(float(line.split()[-1]) for line in lines if label in line))


@dataclass(frozen=True)
class Demo:
    """The demo with few rows, its files a copy that a test may break, its routing recorded."""

    server: Server
    base: Path
    trace: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    folder = tmp_path_factory.mktemp("tiers")
    base = shutil.copytree(zoo.base_path(), folder / "base")
    trace = folder / "trace"
    flags = ("--expert-cache", str(NUM_ROWS), "--expert-policy", POLICY, *AHEAD)
    spec = ServerSpec(
        base,
        tuple(zoo.adapter_paths().items())[:3],
        (*flags, "--store-by", "adapter", "--record-routing", str(trace)),
    )
    server = Server(spec, folder / "log")
    try:
        server.wait_until_ready()
        yield Demo(server, base, trace)
    finally:
        server.stop()


PROMPTS = [f"{word} -> " for word in ("coffee", "tea", "water", "milk", "juice", "wine")]


def asked(demo: Demo, prompts: Sequence[str]) -> list[Any]:
    """Greedy answers of the base and the adapters, all at once."""
    names = [None, *(name for name, _ in demo.server.spec.adapters)]
    pairs = [(prompt, name) for prompt in prompts for name in names]
    return demo.server.token_ids([p for p, _ in pairs], [n for _, n in pairs], NUM_NEW_TOKENS)


def test_the_simulator_counts_what_the_server_counted(demo: Demo) -> None:
    """After all that was asked of it: the trace alone, decided again."""
    for prompt in PROMPTS:
        asked(demo, [prompt])
    asked(demo, PROMPTS)
    time.sleep(3 * FLUSH_PERIOD_S)  # it is idle meanwhile
    header = read_header_of(demo.trace)
    decisions = Decisions(
        header.num_layers,
        header.num_slots,
        NUM_ROWS,
        policy_of(POLICY),
        num_base=header.num_base,
        loads_per_layer=float(AHEAD[1]),
    )
    sizes = (header.num_layers, header.num_experts, header.embedding_size)
    distance = min(DEFAULT_PREFETCH_DISTANCE, header.num_layers)
    store = MapStore(*sizes, distance, DEFAULT_MAP_STORE_BYTES)
    predictor = FineMoEPredictor(store, header.top_k, distance, by_adapter=True)
    replayed = replay(header, read_trace(demo.trace), decisions, predictor)
    found, recall = replayed.counts, replayed.recall
    assert found.num_useful > 0
    assert len(np.unique(store._owners[: store.size])) == 4, "the base's and three adapters'"
    layer_ids = read_moe_spec(demo.base).moe_layer_ids
    assert len(recall.rows) == header.num_layers
    for layer, num_asked in enumerate(recall.num_asked):
        label = f'layer="{layer_ids[layer]}"'
        assert counter(demo.server, "expert_recall_requests", label) == num_asked
    for (layer, distance), row in recall.rows.items():
        labels = f'distance="{distance}",layer="{layer_ids[layer]}"'
        assert counter(demo.server, "expert_recall_named", labels) == row.num_named > 0
        assert counter(demo.server, "expert_recall_found", labels) == row.num_found
    assert vars(found) == {
        "num_asked": counter(demo.server, "expert_requests"),
        "num_hits": counter(demo.server, "expert_hits"),
        "num_loads": counter(demo.server, "expert_loads", 'why="demand"'),
        "num_prefetches": counter(demo.server, "expert_loads", 'why="prefetch"'),
        "num_useful": counter(demo.server, "expert_prefetches", 'was="useful"'),
        "num_wasted": counter(demo.server, "expert_prefetches", 'was="wasted"'),
    }


def test_every_metric_of_tiers_is_told(demo: Demo) -> None:
    """Those that servers without tiers are excused from, by the code's own list."""
    text = http.get(f"{demo.server.url}/metrics", timeout=30).text
    assert len(tier_metrics()) > 7
    assert [name for name in tier_metrics() if f"\n{name}{{" not in text] == []


def test_a_file_that_changes_while_it_serves_is_no_answer(demo: Demo) -> None:
    """Its requests end with a named error, and nothing of what failed is kept."""
    right = asked(demo, PROMPTS[:2])
    files = sorted(demo.base.glob("*.safetensors"))
    before = {file: (file.read_bytes(), file.stat()) for file in files}
    for file in files:
        with file.open("r+b") as stream:  # the same inode, cut short
            stream.truncate(file.stat().st_size // 2)
    body = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    answer = demo.server.post("/generate", body)
    assert answer.status_code == 503, answer.text
    assert "ExpertReadError" in answer.text
    assert files[0].name in answer.text
    assert str(demo.base) not in answer.text
    assert counter(demo.server, "expert_read_failures") > 0
    for file, (content, stat) in before.items():
        with file.open("r+b") as stream:
            stream.write(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Neither rows nor the prompt's KV: the same prompt, with the prefix cache on.
    assert asked(demo, PROMPTS[:2]) == right
