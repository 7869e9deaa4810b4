"""SGLang's decode graph runner over weaving: what a replay answers is what the eager step answers.

a tiny base and three adapters -> decode_steps.py, in processes of its own -> [judged here]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapter_factory import write_random_adapter, write_random_base

ROUNDING = 1e-4  # logits are about 1; a graph pads its batch, so that matmuls sum otherwise
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "vocab_size": 300,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
}
TUNED = {"math": {1: (0, 4, 7), 2: (1, 5)}, "law": {1: (1, 4), 2: (2, 5, 6)}, "code": {2: (0, 3)}}

Seen = Mapping[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Seen]]:
    """By layout, what each rank saw."""
    return run_ranks("tests.fast.graphs.decode_steps", tmp_path_factory.mktemp("graphs"))


def run_ranks(module: str, folder: Path) -> Mapping[str, list[Seen]]:
    """A module that prints what each rank saw, over a base and adapters that are made in `folder`.

    By case.
    """
    write_random_base(folder / "base", "DeepseekV2ForCausalLM", seed=1, **SMALL)
    for seed, (name, experts) in enumerate(TUNED.items()):
        write_random_adapter(folder / name, folder / "base", seed=seed, experts=experts)
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Seen]] = json.loads(done.stdout.splitlines()[-1])
    for case, ranks in found.items():
        failed = [rank for rank in ranks if isinstance(rank, str)]
        assert not failed, f"{case}: {failed}\n{done.stderr[-4000:]}"
    return found


def one_step_of(rank: Seen, name: str) -> torch.Tensor:
    """The eager logits of a batch's first step."""
    (found,) = [step["eager"] for step in rank["steps"] if step["name"] == f"{name}, step 0"]
    return torch.tensor(found)


@pytest.mark.parametrize("layout", ["one rank", "TP2", "DP2"])
def test_every_replay_answers_as_the_eager_step(
    seen: Mapping[str, list[Seen]], layout: str
) -> None:
    for rank in seen[layout]:
        wrong = [
            f"{step['name']}: off by {step['off']}"
            for step in rank["steps"]
            if not (step["off"] < ROUNDING and step["is_same_token"])  # NaN is wrong, too
        ]
        assert not wrong
        assert rank["replays"] == len(rank["steps"]) > 0


def test_adapters_that_came_after_the_capture_change_what_a_replay_answers(
    seen: Mapping[str, list[Seen]],
) -> None:
    (rank,) = seen["one rank"]
    base = one_step_of(rank, "base alone")
    assert torch.equal(base, one_step_of(rank, "the base again"))
    mixed = one_step_of(rank, "two adapters and the base")
    alone = one_step_of(rank, "an adapter has come")
    assert (alone[0] - base[0]).abs().max() > 100 * ROUNDING
    assert (mixed[0] - alone[0]).abs().max() < ROUNDING
    assert (mixed[1] - base[1]).abs().max() < ROUNDING
    after = one_step_of(rank, "one has gone")
    assert (after[0] - base[0]).abs().max() < ROUNDING
    replaced = one_step_of(rank, "another in its place")
    assert (replaced[0] - alone[0]).abs().max() > 100 * ROUNDING


def test_idle_ranks_are_part_of_the_gather(seen: Mapping[str, list[Seen]]) -> None:
    """A rank without a request replays with the other; requests answer as on one rank alone."""
    first, second = seen["DP2"]
    numbers = [
        (a["num_requests"], b["num_requests"])
        for a, b in zip(first["steps"], second["steps"], strict=True)
    ]
    assert {(1, 1), (3, 1), (2, 0), (0, 4), (2, 2)} < set(numbers)
    (alone,) = seen["one rank"]
    expected = one_step_of(alone, "two adapters and the base")
    for found in (one_step_of(first, "unequal"), one_step_of(second, "the first idle")[:3]):
        assert (found - expected).abs().max() < ROUNDING


def test_rerouting_and_the_gather_are_in_the_graphs(seen: Mapping[str, list[Seen]]) -> None:
    """Three graphs of two MoE layers."""
    ranks = [rank for layout in seen.values() for rank in layout]
    assert [rank["reroutes"] for rank in ranks] == [6] * 5
    assert [rank["collectives"] > 0 for rank in ranks] == [False] + [True] * 4


def test_ranks_add_up_a_layer_where_plain_sglang_does(seen: Mapping[str, list[Seen]]) -> None:
    """LoRA's place is open, and layers do not see it."""
    (alone,) = seen["one rank"]
    for rank in seen["TP2"]:
        assert rank["defers_sums"]
        found = one_step_of(rank, "two adapters and the base")
        expected = one_step_of(alone, "two adapters and the base")
        assert (found - expected).abs().max() < ROUNDING
