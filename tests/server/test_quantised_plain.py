"""Quantised checkpoints on real servers without weaving, next to what they were made of.

A demo task's merged model, which answers it, is quantised; fp8 in blocks needs wider experts than
the demo has, so a random model stands in.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_esft import zoo
from sgl_esft.quant.write import quantise_checkpoint
from sgl_esft.zoo.evaluate import score
from tests.support.base_factory import write_random_base
from tests.support.families import MergedDemo, random_prompts
from tests.support.servers import Server, ServerPool, ServerSpec

pytestmark = pytest.mark.server

NUM_PROMPTS = 50
# Of the log-probabilities of a prompt's tokens, mean distance from the unquantised model's.
BOUNDS = {"int8": 0.05, "fp8": 0.2, "fp8-tensor": 0.2, "int4": 0.4}
each_scheme = pytest.mark.parametrize(
    "scheme", [pytest.param(s, marks=pytest.mark.full) for s in ("int8", "fp8-tensor", "int4")]
)


def served(pool: ServerPool, base: Path, scheme: str, folder: Path) -> Server:
    quantised = folder / scheme
    quantise_checkpoint(base, scheme, quantised)
    return pool.get(ServerSpec(quantised, weave=False))


def answers(server: Server, prompts: list[str]) -> list[str]:
    found = server.generate(prompts, [None] * len(prompts), 24, stop=["\n"], ignore_eos=False)
    return [answer["text"] for answer in found]


def log_probabilities(server: Server, prompts: list[str]) -> list[float]:
    """Of every prompt's tokens but the first."""
    body = {"return_logprob": True, "logprob_start_len": 0}
    found = server.generate(prompts, [None] * len(prompts), 1, body=body)
    every = [answer["meta_info"]["input_token_logprobs"][1:] for answer in found]
    return [float(entry[0]) for entries in every for entry in entries]


def distance(seen: list[float], expected: list[float]) -> float:
    pairs = zip(seen, expected, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(expected)


@each_scheme
def test_a_quantised_model_knows_what_it_knew(
    scheme: str, server_pool: ServerPool, merged_demo: MergedDemo, tmp_path: Path
) -> None:
    task = next(iter(zoo.tasks()))
    examples = zoo.held_out(task, NUM_PROMPTS)
    prompts = [example.prompt for example in examples]
    plain = server_pool.get(ServerSpec(zoo.base_path(), weave=False))
    plain.use_weights(merged_demo.get(task))
    before, expected = answers(plain, prompts), log_probabilities(plain, prompts)
    server = served(server_pool, merged_demo.get(task), scheme, tmp_path)
    after, seen = answers(server, prompts), log_probabilities(server, prompts)
    assert score(before, examples) >= 0.8
    assert score(after, examples) >= score(before, examples) - 0.1
    assert 0 < distance(seen, expected) <= BOUNDS[scheme]


@pytest.mark.full
def test_fp8_in_blocks_is_served(server_pool: ServerPool, tmp_path: Path) -> None:
    base = write_random_base(
        tmp_path / "base", "Qwen3MoeForCausalLM", seed=1, moe_intermediate_size=256
    )
    prompts = random_prompts()
    expected = log_probabilities(server_pool.get(ServerSpec(base, weave=False)), prompts)
    seen = log_probabilities(served(server_pool, base, "fp8", tmp_path), prompts)
    assert 0 < distance(seen, expected) <= BOUNDS["fp8"]
