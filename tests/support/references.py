"""What the merged checkpoints answer on plain SGLang: the definition of correct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.families import Family, random_prompts
from tests.support.servers import Server, ServerPool, ServerSpec

NUM_NEW_TOKENS = 12
CANDIDATES_A_PROMPT = 1.28  # on the others a model ties
# Two tokens closer than this are a tie: another batch or layout may round it the other way.
TIE_LOGPROB = 1e-4

Tokens = tuple[int, ...]
Answers = dict[str | None, list[Tokens]]  # model (None = base) -> tokens for each prompt

_by_family: dict[str, Reference] = {}


@dataclass(frozen=True)
class Reference:
    """Prompts without ties for any of the models, and each model's greedy answers to them."""

    prompts: list[str]
    answers: Answers


def reference_of(family: Family, pool: ServerPool) -> Reference:
    """One plain server, given each checkpoint's weights in turn."""
    if family.architecture not in _by_family:
        server = pool.get(ServerSpec(model_path=family.base, weave=False))
        candidates = random_prompts(math.ceil(family.num_prompts * CANDIDATES_A_PROMPT))
        raw = {None: _ask(server, family.base, candidates)}
        raw |= {name: _ask(server, path, candidates) for name, path in family.merged.items()}
        _by_family[family.architecture] = _without_ties(candidates, raw, family.num_prompts)
    return _by_family[family.architecture]


def _ask(server: Server, checkpoint: Any, prompts: Sequence[str]) -> list[dict[str, Any]]:
    server.use_weights(checkpoint)
    return server.generate(
        prompts,
        [None] * len(prompts),
        NUM_NEW_TOKENS,
        body={"return_logprob": True, "top_logprobs_num": 2},
    )


def _without_ties(
    prompts: list[str], raw: dict[str | None, list[dict[str, Any]]], num_prompts: int
) -> Reference:
    clear = [
        i
        for i in range(len(prompts))
        if all(_smallest_gap(answers[i]) > TIE_LOGPROB for answers in raw.values())
    ][:num_prompts]
    assert len(clear) == num_prompts, "too many ties: the random model says nothing clearly"
    answers = {name: [tuple(a[i]["output_ids"]) for i in clear] for name, a in raw.items()}
    return Reference([prompts[i] for i in clear], answers)


def _smallest_gap(answer: dict[str, Any]) -> float:
    """Least distance of the best two tokens' log-probabilities over the answer's positions."""
    best_two = answer["meta_info"]["output_top_logprobs"]
    return min(first[0] - second[0] for first, second in best_two)
