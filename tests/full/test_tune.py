"""The guide's own commands, from chat JSONL to an adapter: served, it answers what it never saw.

docs/guide_adapters.md --[session.run]--> base, adapter, held_out.jsonl --> served, and merged
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
from transformers import AutoTokenizer

from sgl_esft.tools.merge import merge_adapter
from tests.repo.docs import session
from tests.repo.docs.blocks import read_blocks
from tests.support.base_factory import write_random_base
from tests.support.servers import ROOT, Server, ServerPool, ServerSpec

pytestmark = [pytest.mark.server, pytest.mark.full]

ADAPTER: Final = "chat"
DEMO: Final = "sgl_esft/zoo/checkpoints/base"
WORDS_RIGHT, BASES_RIGHT = 0.8, 0.05  # of the held-out words; the guide says nine in ten, and none
BETTER_BY_NATS: Final = 0.5  # a token, on average
NUM_PROBED: Final = 40


@dataclass(frozen=True)
class Tuned:
    """What the commands have left in their folder."""

    base: Path
    adapter: Path
    words: tuple[str, ...]  # held out
    is_demo: bool


def tune_by_the_guide(folder: Path, base: Path | None) -> Tuned:
    """Run the commands, on the demo or on another base; the shown outputs are the demo's."""
    page = read_blocks(ROOT / "docs" / "guide_adapters.md")
    steps = session.steps_of([b for b in page if b.kind == "shell" and "chat.jsonl" in b.text])
    assert len(steps) == 5, "data, score, select, tune, the plan of a tune"
    if base is not None:
        steps = [replace(each, shown=None) for each in steps]
        steps[0] = replace(steps[0], command=steps[0].command.replace(DEMO, str(base)))
        assert str(base) in steps[0].command
    assert session.run(steps, folder) == []
    lines = (folder / "held_out.jsonl").read_text().splitlines()
    words = tuple(json.loads(line)["messages"][0]["content"] for line in lines)
    return Tuned(folder / "base", folder / ADAPTER, words, base is None)


@pytest.fixture(scope="module", params=["demo", "Qwen3MoeForCausalLM"])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    base = None
    if request.param != "demo":
        base = write_random_base(tmp_path_factory.mktemp("base") / "random", request.param, seed=1)
    return tune_by_the_guide(tmp_path_factory.mktemp("guide"), base)


@pytest.fixture
def server(tuned: Tuned, server_pool: ServerPool) -> Server:
    return server_pool.get(ServerSpec(tuned.base, ((ADAPTER, tuned.adapter),)))


def answers(server: Server, words: Sequence[str], model: str) -> list[str]:
    """What a chat client gets."""
    found = []
    for word in words:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": word}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["message"]["content"])
    return found


def log_prob(server: Server, tuned: Tuned, adapter: str | None) -> float:
    """Of a token of a held-out answer, on average."""
    tokenizer = AutoTokenizer.from_pretrained(tuned.base)
    prompts = [tokenizer(f"{word} -> ").input_ids for word in tuned.words[:NUM_PROBED]]
    right = [
        tokenizer(f"{word}s\n", add_special_tokens=False).input_ids
        for word in tuned.words[:NUM_PROBED]
    ]
    body = {
        "input_ids": [first + then for first, then in zip(prompts, right, strict=True)],
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1},
        **({"adapter": adapter} if adapter else {}),
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    seen = [
        value
        for answer, then in zip(response.json(), right, strict=True)
        for value, *_ in answer["meta_info"]["input_token_logprobs"][-len(then) :]
    ]
    return float(sum(seen) / len(seen))


def test_what_was_held_out_is_answered_better_than_by_the_base(
    tuned: Tuned, server: Server
) -> None:
    assert log_prob(server, tuned, ADAPTER) > log_prob(server, tuned, None) + BETTER_BY_NATS
    if tuned.is_demo:
        right = [f"{word}s" for word in tuned.words]
        for model, least, most in ((ADAPTER, WORDS_RIGHT, 1.0), ("base", 0.0, BASES_RIGHT)):
            given = answers(server, tuned.words, model)
            share = sum(a == b for a, b in zip(given, right, strict=True)) / len(right)
            assert least <= share <= most, (model, share)


def test_it_answers_as_its_merged_model_does(
    tuned: Tuned, server: Server, server_pool: ServerPool, tmp_path: Path
) -> None:
    woven = answers(server, tuned.words, ADAPTER)
    assert woven != answers(server, tuned.words, "base")
    merge_adapter(tuned.base, tuned.adapter, tmp_path / "merged")
    merged = server_pool.get(ServerSpec(tmp_path / "merged", weave=False))
    assert answers(merged, tuned.words, "default") == woven
