"""Linear regression on routers: what it learns, how far it looks, what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.offload.predictors import moments as moments_module
from sgl_esft.offload.predictors.moments import (
    HALVED_AT_TOKENS,
    SPANS,
    RouterMoments,
    logits_of,
    num_bytes_of,
)
from sgl_esft.offload.predictors.predictor import write_arrays
from sgl_esft.offload.predictors.regression import FEWEST_TOKENS, RegressionPredictor
from sgl_esft.offload.predictors.selection import softmax
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

LAYERS, EXPERTS, TOP_K = 7, 12, 3
PREDICTED = 5  # half as many more


def linear_maps(count: int, seed: int, noise: float = 0.0) -> Floats:
    """[n, L, J] of a model whose routers' logits follow from the two layers before, linearly."""
    law = np.random.default_rng(0)
    one, two = (law.normal(size=(LAYERS, EXPERTS, EXPERTS)) / EXPERTS**0.5 for _ in range(2))
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, LAYERS, EXPERTS))
    for layer in range(2, LAYERS):
        law_says = logits[:, layer - 1] @ one[layer] + 2 * logits[:, layer - 2] @ two[layer]
        logits[:, layer] = law_says + noise * logits[:, layer]
    return softmax(logits).astype(np.float32)


def trained(count: int = 600, max_bytes: int = 1 << 20) -> RegressionPredictor:
    moments = RouterMoments(LAYERS, EXPERTS, max_bytes)
    moments.add(logits_of(linear_maps(count, 1)))
    return RegressionPredictor(moments, TOP_K)


def tokens(count: int) -> StepTokens:
    return StepTokens(tuple(range(count)), (-1,) * count)


def run(predictor: RegressionPredictor, maps: Floats) -> list[list[Prediction]]:
    predictor.begin_step(tokens(len(maps)))
    found = [predictor.observe(layer, maps[:, layer]) for layer in range(LAYERS)]
    predictor.end_step()
    return found


def recall(predictor: RegressionPredictor, maps: Floats, distance: int, first: int) -> float:
    """Of the experts of layers from `first` on, those that were predicted so far ahead."""
    shares = []
    for layer, predicted in enumerate(run(predictor, maps)):
        for each in predicted:
            if each.layer - layer == distance and each.layer >= first:
                wanted = np.argsort(-maps[each.token, each.layer])[:TOP_K]
                shares.append(np.isin(wanted, each.expert_ids).mean())
    return float(np.mean(shares))


def test_a_linear_law_is_learned() -> None:
    judged = linear_maps(8, 2)
    # Of 12 experts, 5 at random would have 0.42.
    assert recall(trained(), judged, 1, first=2) > 0.97
    assert recall(trained(), judged, 2, first=4) > 0.8


def test_two_layers_back_say_more_than_one() -> None:
    narrow = num_bytes_of(LAYERS, EXPERTS, (1, 2))
    judged = linear_maps(8, 2)
    one = recall(trained(max_bytes=narrow), judged, 1, first=2)
    assert recall(trained(), judged, 1, first=2) > one + 0.1


def test_weights_are_least_squares() -> None:
    """As numpy solves it, from the rows themselves."""
    maps = linear_maps(400, 3, noise=0.5)
    moments = RouterMoments(LAYERS, EXPERTS, 1 << 20)
    for part in np.split(maps, 50):  # 8 tokens at a time
        moments.add(logits_of(part))
    found = moments.fit()
    logits = logits_of(maps).astype(np.float64)
    window, reach = moments.window, moments.reach
    assert (window, reach) == SPANS[0]
    for layer, distance in ((6, 1), (6, 2), (2, 1)):
        source = layer - distance
        used = logits[:, max(0, source - window + 1) : source + 1].reshape(len(maps), -1)
        penalty = np.sqrt(moments_module.RIDGE * len(maps)) * np.eye(used.shape[1])
        rows = np.vstack([used - used.mean(axis=0), penalty])
        wanted = logits[:, layer] - logits[:, layer].mean(axis=0)
        weights = np.linalg.lstsq(rows, np.vstack([wanted, 0 * penalty[:, :EXPERTS]]))[0]
        outputs = slice((distance - 1) * EXPERTS, distance * EXPERTS)
        learned = found.weights[source, -used.shape[1] :, outputs]
        np.testing.assert_allclose(learned, weights, atol=2e-3)
        assert not found.weights[source, : -used.shape[1], outputs].any()
        bias = logits[:, layer].mean(axis=0) - used.mean(axis=0) @ weights
        np.testing.assert_allclose(found.bias[source, outputs], bias, atol=2e-3)


def test_it_looks_two_layers_ahead_and_no_further() -> None:
    found = run(trained(), linear_maps(2, 2))
    layers = [[p.layer for p in each] for each in found]
    ahead = [[each + 1, each + 1, each + 2, each + 2] for each in range(LAYERS - 2)]
    assert layers == [*ahead, [LAYERS - 1] * 2, []]
    assert {len(p.expert_ids) for each in found for p in each} == {PREDICTED}


def test_it_learns_while_it_serves_and_says_nothing_before() -> None:
    predictor = RegressionPredictor(RouterMoments(LAYERS, EXPERTS, 1 << 20), TOP_K)
    maps = linear_maps(1500, 4)
    for number in range(FEWEST_TOKENS):
        assert run(predictor, maps[number][None]) == [[]] * LAYERS
    early = recall(predictor, linear_maps(8, 2), 1, first=2)
    for step in np.split(maps[100:1500], 200):  # 7 requests at a time
        run(predictor, step)
    assert early > 0.5
    assert recall(predictor, linear_maps(8, 2), 1, first=2) > max(0.95, early)


def test_a_step_cut_short_or_large_or_not_finite_is_not_learned_from() -> None:
    predictor = RegressionPredictor(RouterMoments(LAYERS, EXPERTS, 1 << 20), TOP_K)
    maps = linear_maps(9, 1)
    run(predictor, maps)  # more than max_batch
    predictor.begin_step(tokens(1))
    predictor.observe(0, maps[:1, 0])
    predictor.end_step()
    broken = maps[:2].copy()
    broken[1, 3, 0] = np.nan
    assert run(predictor, broken)[3:] == [[]] * (LAYERS - 3)
    assert predictor.moments.num_added == 0
    run(predictor, maps[:2])
    assert predictor.moments.num_added == 2


def test_old_tokens_count_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HALVED_AT_TOKENS > 1000
    monkeypatch.setattr(moments_module, "HALVED_AT_TOKENS", 100)
    moments = RouterMoments(LAYERS, EXPERTS, 1 << 20)
    before, after = (np.full((200, LAYERS, EXPERTS), 1 / EXPERTS, np.float32) for _ in range(2))
    before[:, :, 0], after[:, :, 1] = 0.9, 0.9
    moments.add(logits_of(before))
    for step in np.split(after, 10):
        moments.add(logits_of(step))
    assert moments.num_tokens < 200
    assert int(moments.fit().bias[0, :EXPERTS].argmax()) == 1


# ---- memory, files ----


@pytest.mark.parametrize("span", SPANS)
def test_memory_bounds_the_span(span: tuple[int, int]) -> None:
    num_bytes = num_bytes_of(LAYERS, EXPERTS, span)
    moments = RouterMoments(LAYERS, EXPERTS, num_bytes)
    assert (moments.window, moments.reach) == span
    assert moments._sums.nbytes == num_bytes
    moments.add(logits_of(linear_maps(50, 1)))
    found = run(RegressionPredictor(moments, TOP_K), linear_maps(1, 2))
    assert max(p.layer - layer for layer, each in enumerate(found) for p in each) == span[1]


def test_too_little_memory_is_named() -> None:
    fewest = num_bytes_of(LAYERS, EXPERTS)
    with pytest.raises(ConfigError, match=rf"--expert-map-memory: .* {fewest:,} bytes"):
        RouterMoments(LAYERS, EXPERTS, fewest - 1)


def test_what_was_learned_is_kept(tmp_path: Path) -> None:
    path, moments = tmp_path / "moments", trained(304).moments
    moments.save(path)
    loaded = RouterMoments(LAYERS, EXPERTS, 1 << 20)
    loaded.load(path)
    maps = linear_maps(3, 2)
    mine, theirs = (run(RegressionPredictor(m, TOP_K), maps) for m in (moments, loaded))
    assert any(mine)
    assert [(p.layer, p.expert_ids.tolist(), p.probs.tolist()) for e in mine for p in e] == [
        (p.layer, p.expert_ids.tolist(), p.probs.tolist()) for e in theirs for p in e
    ]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (RouterMoments(LAYERS, EXPERTS + 1, 1 << 20), "13 experts"),
        (RouterMoments(LAYERS, EXPERTS, 1 << 20, base="another"), "another"),
        (RouterMoments(LAYERS, EXPERTS, num_bytes_of(LAYERS, EXPERTS)), "1 layers back"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, other: RouterMoments, words: str
) -> None:
    path = tmp_path / "moments"
    trained().moments.save(path)
    with pytest.raises(ConfigError, match=words):
        other.load(path)


@pytest.mark.parametrize("damage", ["no tokens", "negative", "not finite", "another shape"])
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    path, good = tmp_path / "moments", trained().moments
    sums, num_tokens = good._sums.copy(), np.array([good.num_tokens])
    if damage == "no tokens":
        num_tokens[0] = 0
    elif damage == "negative":  # a variance: less than the ridge makes good
        sums[:] = 0
        step = np.arange(sums.shape[1])
        sums[:, step, step] = -moments_module.RIDGE * num_tokens[0]
    elif damage == "not finite":
        sums[0, 0, 0] = np.inf
    else:
        sums = sums[:-1]
    write_arrays(path, {"sums": sums, "num_tokens": num_tokens}, good._about)
    mine = RouterMoments(LAYERS, EXPERTS, 1 << 20)
    with pytest.raises(ConfigError, match="moments"):
        mine.load(path)
    assert (mine.num_tokens, mine._sums.any()) == (0, False)
