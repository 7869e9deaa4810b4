"""Answers with experts in tiers are those of the merged models, however few rows there are.

As test_equality.py: base and four adapters in mixed batches, against plain SGLang on the merged
checkpoints, prompts in chunks, the prefix cache on.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests as http

from sgl_esft.config import DEFAULT_MAP_STORE_BYTES, DEFAULT_PREFETCH_DISTANCE
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import policy_of
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.simulate import replay
from sgl_esft.offload.trace import read_header_of, read_trace
from sgl_esft.plugin.recording import FLUSH_PERIOD_S
from tests.server.test_equality import BATCH, CHUNKED
from tests.support.families import Families, Family
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
AHEAD = ("--expert-loads-per-layer", "3", "--enable-metrics")
# Rows of a layer: as many as one token needs, some, and nearly all.
QUICK = ("Qwen3MoeForCausalLM", "one-rank", "4", "finemoe")
CASES = [
    QUICK,
    ("Qwen3MoeForCausalLM", "one-rank", "11", "auto"),
    ("Qwen3MoeForCausalLM", "ep2", "3KiB", "lfu"),
    ("Qwen3MoeForCausalLM", "dp2", "6", "lru"),
    ("DeepseekV2ForCausalLM", "one-rank", "4", "stream"),
    ("DeepseekV2ForCausalLM", "tp2", "7", "finemoe"),
    ("DeepseekV2ForCausalLM", "dp2", "5", "auto"),
    ("DeepseekV3ForCausalLM", "one-rank", "9", "finemoe"),
    ("DeepseekV3ForCausalLM", "ep2", "4", "lfu"),
    ("Qwen2MoeForCausalLM", "one-rank", "5", "static"),
    ("Qwen2MoeForCausalLM", "dp2", "7", "stream"),
    ("MixtralForCausalLM", "one-rank", "2", "lru"),
    ("MixtralForCausalLM", "ep2", "3", "finemoe"),
]


@pytest.mark.parametrize(
    ("architecture", "layout", "rows", "policy"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.full) for case in CASES],
)
def test_answers_in_tiers_equal_merged(
    architecture: str,
    layout: str,
    rows: str,
    policy: str,
    families: Families,
    server_pool: ServerPool,
    traces: Path,
) -> None:
    family = families.get(architecture)
    reference = reference_of(family, server_pool)
    server = server_pool.get(spec_of(family, (architecture, layout, rows, policy), traces))
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


def spec_of(family: Family, case: tuple[str, ...], traces: Path) -> ServerSpec:
    _, layout, rows, policy = case
    flags = (*LAYOUTS[layout], "--expert-cache", rows, "--expert-policy", policy, *AHEAD)
    if case == QUICK:
        flags += ("--record-routing", str(traces / "quick"))
    return ServerSpec(family.base, family.named, flags)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def counter(server: Server, name: str, label: str = "") -> int:
    """Of all ranks."""
    text = http.get(f"{server.url}/metrics", timeout=30).text
    lines = [line for line in text.splitlines() if line.startswith(f"sgl_esft:{name}_total")]
    assert lines, name
    return int(sum(float(line.split()[-1]) for line in lines if label in line))


def test_the_simulator_counts_what_the_server_counted(
    families: Families, server_pool: ServerPool, traces: Path
) -> None:
    """After all that was asked of it: the trace alone, decided again."""
    family = families.get(QUICK[0])
    server = server_pool.get(spec_of(family, QUICK, traces))
    prompt = "again and again"
    server.token_ids([prompt] * 3, [None, "a1", "a2"], NUM_NEW_TOKENS)
    time.sleep(3 * FLUSH_PERIOD_S)  # it is idle meanwhile
    header = read_header_of(traces / "quick")
    decisions = Decisions(
        header.num_layers,
        header.num_slots,
        int(QUICK[2]),
        policy_of(QUICK[3]),
        num_base=header.num_base,
        loads_per_layer=float(AHEAD[1]),
    )
    distance = min(DEFAULT_PREFETCH_DISTANCE, header.num_layers)
    store = MapStore(
        header.num_layers,
        header.num_experts,
        header.embedding_size,
        distance,
        DEFAULT_MAP_STORE_BYTES,
    )
    predictor = FineMoEPredictor(store, header.top_k, distance)
    found = replay(header, read_trace(traces / "quick"), decisions, predictor).counts
    assert found.num_prefetches > 0
    assert found.num_useful > 0
    assert vars(found) == {
        "num_asked": counter(server, "expert_requests"),
        "num_hits": counter(server, "expert_hits"),
        "num_loads": counter(server, "expert_loads", 'why="demand"'),
        "num_prefetches": counter(server, "expert_loads", 'why="prefetch"'),
        "num_useful": counter(server, "expert_prefetches", 'was="useful"'),
        "num_wasted": counter(server, "expert_prefetches", 'was="wasted"'),
    }


@pytest.fixture
def breakable(
    families: Families, tmp_path: Path, server_pool: ServerPool
) -> Iterator[tuple[Family, Server, Path]]:
    """A server of its own copy of a base, whose files a test may break."""
    family = families.get("Qwen3MoeForCausalLM")
    base = shutil.copytree(family.base, tmp_path / "base")
    server = Server(
        ServerSpec(base, family.named, ("--expert-cache", "4", "--expert-policy", "lru")),
        tmp_path / "log",
    )
    try:
        server.wait_until_ready()
        yield family, server, base
    finally:
        server.stop()


def test_a_file_that_changes_while_it_serves_is_no_answer(
    breakable: tuple[Family, Server, Path], server_pool: ServerPool
) -> None:
    """Its requests end with a named error; adapters' experts and others that are here go on."""
    family, server, base = breakable
    reference = reference_of(family, server_pool)
    prompts, names = reference.prompts[:6], [None] * 6
    right = [reference.answers[None][i] for i in range(6)]
    assert server.token_ids(prompts, names, NUM_NEW_TOKENS) == right
    files = sorted(base.glob("*.safetensors"))
    before = {file: (file.read_bytes(), file.stat()) for file in files}
    for file in files:
        with file.open("r+b") as stream:  # the same inode, cut short
            stream.truncate(file.stat().st_size // 2)
    body = {
        "text": reference.prompts[7],
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS},
    }
    answer = server.post("/generate", body)
    assert answer.status_code == 503, answer.text
    assert "ExpertReadError" in answer.text
    assert "model" in answer.text, "the file is named"
    assert str(base) not in answer.text
    for file, (content, stat) in before.items():
        with file.open("r+b") as stream:
            stream.write(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Nothing of what failed was kept: neither rows nor the prompt's KV.
    again = server.token_ids([reference.prompts[7]], [None], NUM_NEW_TOKENS)
    assert again == [reference.answers[None][7]]
