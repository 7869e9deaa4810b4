"""Clients that know nothing of this project: openai, SGLang's bench client, curl-like calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.support.one_rank import OneRank

pytestmark = pytest.mark.server


def client_of(one_rank: OneRank) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{one_rank.server.url}/v1", api_key="none", max_retries=0)


def text_of(one_rank: OneRank, prompt: str, adapter: str | None) -> str:
    answer = one_rank.server.generate([prompt], [adapter], 12)[0]
    return str(answer["text"])


@pytest.mark.parametrize("adapter", [None, "a0", "a2"])
def test_openai_completions(adapter: str | None, one_rank: OneRank) -> None:
    """model="base:name", model="name" and an extra field all mean the adapter."""
    client, prompt = client_of(one_rank), one_rank.prompts[4]
    expected = text_of(one_rank, prompt, adapter)
    models = ["default"] if adapter is None else [f"base:{adapter}", adapter]
    texts = [
        client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .text
        for model in models
    ]
    texts.append(
        client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            extra_body={"adapter": adapter, "ignore_eos": True},
        )
        .choices[0]
        .text
    )
    assert texts == [expected] * len(texts)


def test_openai_chat_streams(one_rank: OneRank) -> None:
    client = client_of(one_rank)
    texts = {}
    for adapter in ("a0", "a1"):
        stream = client.chat.completions.create(
            model=f"base:{adapter}",
            messages=[{"role": "user", "content": one_rank.prompts[5]}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        texts[adapter] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert texts["a0"] != texts["a1"]
    assert all(texts.values())


def test_openai_lists_adapters_and_reports_unknown_ones(one_rank: OneRank) -> None:
    client = client_of(one_rank)
    models = {model.id for model in client.models.list()}
    assert {"a0", "a1", "a2", one_rank.family.base.name} <= models
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="base:nobody", prompt="x")


def test_generate_with_the_adapter_field(one_rank: OneRank) -> None:
    answers = one_rank.server.post(
        "/generate",
        {
            "text": [one_rank.prompts[0]] * 3,
            "adapter": ["a0", None, "a1"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        },
    ).json()
    assert [tuple(a["output_ids"]) for a in answers] == [
        one_rank.expected[name][0] for name in ("a0", None, "a1")
    ]


@pytest.mark.full
def test_bench_serving(one_rank: OneRank, tmp_path: Path) -> None:
    """SGLang's own load client, unchanged, over three adapters."""
    out = tmp_path / "bench.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--base-url", one_rank.server.url, "--dataset-name", "random-ids"),
        *("--num-prompts", "12", "--random-input-len", "24", "--random-output-len", "8"),
        *("--random-range-ratio", "1", "--lora-name", "a0", "a1", "a2"),
        *("--tokenizer", str(one_rank.family.base), "--output-file", str(out)),
        "--disable-tqdm",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text().splitlines()[-1])["completed"] == 12
