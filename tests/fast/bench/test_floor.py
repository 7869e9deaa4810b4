"""Expected touched experts against Monte Carlo and against limits; bytes against known sums."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from bench.expertweave.expert_memory import MODEL_CONFIG
from bench.expertweave.floor import (
    V2_LITE,
    ModelBytes,
    decode_floor_bytes,
    expected_touched,
    expected_touched_at_random,
    floor_over_base,
)

M, K = 64, 6
TUNED = [set(range(6)), {3, 9, 40}, set(), {63}]


def touched_once(
    rng: np.random.Generator, owners: Sequence[int], weights: np.ndarray, tuned: list[set[int]]
) -> int:
    """Draw each token's top-k and count the distinct (copy, expert) pairs."""
    seen = set()
    for owner in owners:
        for m in np.argsort(rng.random(M) ** (1 / weights[owner]))[-K:]:
            has_own = owner > 0 and m in tuned[owner - 1]
            seen.add((owner if has_own else 0, m))
    return len(seen)


def selection_of(rng: np.random.Generator, weights: np.ndarray) -> np.ndarray:
    """How often that draw selects each expert: there is no closed form for top-k."""
    draws = np.argsort(rng.random((20_000, M)) ** (1 / weights), axis=1)[:, -K:]
    return np.bincount(draws.ravel(), minlength=M) / len(draws)


@pytest.mark.parametrize("is_skewed", [False, True])
def test_monte_carlo_agrees(is_skewed: bool) -> None:
    rng = np.random.default_rng(7)
    weights = rng.random((5, M)) ** 2 + 0.01 if is_skewed else np.ones((5, M))
    selection = np.stack([selection_of(rng, row) for row in weights]) if is_skewed else None
    num_tokens = [4, 12, 5, 8, 3]
    owners = np.repeat(range(5), num_tokens)
    drawn = [touched_once(rng, owners, weights, TUNED) for _ in range(500)]
    found = expected_touched(TUNED, num_tokens, num_experts=M, top_k=K, selection=selection)
    assert found == pytest.approx(np.mean(drawn), rel=0.01)


def test_monte_carlo_agrees_with_random_owners() -> None:
    rng = np.random.default_rng(8)
    shares = [0.1, 0.5, 0.2, 0.1, 0.1]
    drawn = [
        touched_once(rng, rng.choice(5, 24, p=shares), np.ones((5, M)), TUNED) for _ in range(500)
    ]
    found = expected_touched_at_random(TUNED, shares, 24, num_experts=M, top_k=K)
    assert found == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 256])
def test_a_single_adapter_alone_adds_nothing(num_tokens: int) -> None:
    plain = expected_touched([], [num_tokens], num_experts=M, top_k=K)
    woven = expected_touched(TUNED[:1], [0, num_tokens], num_experts=M, top_k=K)
    assert woven == pytest.approx(plain)
    at_random = expected_touched_at_random(
        TUNED[:1], [0.0, 1.0], num_tokens, num_experts=M, top_k=K
    )
    assert at_random == pytest.approx(plain)


def test_bytes_of_one_token_and_of_all_weights() -> None:
    assert ModelBytes.from_config(json.loads(MODEL_CONFIG.read_text())) == V2_LITE
    assert decode_floor_bytes([6.0]) == pytest.approx(4.90e9, rel=1e-3)
    assert decode_floor_bytes([64.0]) == pytest.approx(30.99e9, rel=1e-3)
    assert decode_floor_bytes([0.0], kv_tokens=10) - decode_floor_bytes([0.0]) == 311_040
    by_layer = [float(layer) for layer in range(26)]
    assert decode_floor_bytes(by_layer) == decode_floor_bytes([12.5])


def test_floor_over_base_of_the_20_adapters_of_the_reference_table() -> None:
    """64 tokens: 116.3 experts against 62.6 are 80 percent more bytes."""
    assert floor_over_base([116.3], [62.6]) == pytest.approx(1.80, abs=0.01)
    assert floor_over_base([6.0], [6.0]) == 1.0
