"""FineMoE's rivals: counts of requests, the next layer's gate, trained probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.counts import RequestCountsPredictor
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.learned import LearnedPredictor, Probes, train
from sgl_esft.offload.predictors.map_store import MapStore
from sgl_esft.offload.predictors.moments import RouterMoments, logits_of
from sgl_esft.offload.predictors.next_gate import NextGatePredictor
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.predictors.regression import RegressionPredictor
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

LAYERS, EXPERTS, WIDTH, TOP_K = 4, 12, 6, 2


def random_maps(count: int, seed: int) -> Floats:
    rows = np.random.default_rng(seed).gamma(0.3, size=(count, LAYERS, EXPERTS)) + 1e-3
    return (rows / rows.sum(axis=2, keepdims=True)).astype(np.float32)


def tokens_of(*request_ids: int) -> StepTokens:
    return StepTokens(request_ids, (-1,) * len(request_ids))


def run(predictor: Predictor, maps: Floats, tokens: StepTokens) -> list[list[Prediction]]:
    """Predictions before the step and after each layer."""
    found = [predictor.begin_step(tokens)]
    found += [predictor.observe(layer, maps[:, layer]) for layer in range(LAYERS)]
    predictor.end_step()
    return found


def counted(maps: Floats) -> Floats:
    """[L, J]: how often each expert is among the two most probable of some tokens [n, L, J]."""
    counts = np.zeros((LAYERS, EXPERTS), np.float32)
    for token in maps:
        for layer, row in enumerate(token):
            counts[layer, np.argsort(-row, kind="stable")[:TOP_K]] += 1
    return counts


def cosine(one: Floats, other: Floats) -> float:
    return float((one * other).sum() / (np.linalg.norm(one) * np.linalg.norm(other)))


# ---- counts of requests ----


def test_the_nearest_request_guides_by_counts_that_grow_layer_by_layer() -> None:
    predictor = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K)
    stored = np.stack([counted(random_maps(9, seed)) for seed in range(20)])
    predictor.remember(stored)
    steps = random_maps(3, 70)
    request = np.zeros((LAYERS, EXPERTS), np.float32)
    for step in steps:
        found = run(predictor, step[None], tokens_of(5))
        for layer in range(-1, LAYERS):
            if layer >= 0:
                row = np.argsort(-step[layer], kind="stable")[:TOP_K]
                request[layer, row] += 1
            expected = {}
            if request.any():
                guide = stored[np.argmax([cosine(request, other) for other in stored])]
                for later in range(layer + 1, LAYERS):
                    best = np.argsort(-guide[later], kind="stable")[:TOP_K]
                    share = guide[later, best] / guide[later].sum()
                    expected[later] = (best.tolist(), share * (1 - (later - layer) / (LAYERS + 1)))
            assert [p.layer for p in found[layer + 1]] == list(expected)
            for prediction in found[layer + 1]:
                ids, probs = expected[prediction.layer]
                assert prediction.expert_ids.tolist() == ids
                np.testing.assert_allclose(prediction.probs, probs, rtol=1e-5)


def test_a_request_enters_when_it_ends_with_all_its_tokens() -> None:
    first, second = random_maps(2, 1), random_maps(2, 2)
    by_steps = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K)
    for step in (first, second):  # requests 7 and 8 in one batch
        assert run(by_steps, step, tokens_of(7, 8)) == [[]] * (LAYERS + 1)
    by_steps.forget([8, 1234])
    at_once = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K)
    at_once.remember(counted(np.stack([first[1], second[1]]))[None])
    new = random_maps(1, 3)
    mine, theirs = (run(each, new, tokens_of(9)) for each in (by_steps, at_once))
    assert any(mine)
    assert [[p.expert_ids.tolist() for p in found] for found in mine] == [
        [p.expert_ids.tolist() for p in found] for found in theirs
    ]


def test_a_step_that_is_ended_late_brings_no_request_back() -> None:
    maps = random_maps(1, 1)
    late, at_once = (RequestCountsPredictor(LAYERS, EXPERTS, TOP_K) for _ in range(2))
    late.begin_step(tokens_of(7))
    for layer in range(LAYERS):
        late.observe(layer, maps[:, layer])
    late.forget([7])
    late.end_step()
    at_once.remember(counted(maps)[None])
    # Were 7 still known, its next step would be predicted from its first layer on.
    assert late.begin_step(tokens_of(7)) == []
    mine, theirs = (run(each, maps, tokens_of(8)) for each in (late, at_once))
    assert [len(found) for found in mine] == [len(found) for found in theirs] == [0, 3, 2, 1, 0]


def test_a_step_that_was_cut_short_counts_for_nothing() -> None:
    predictor, maps = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K), random_maps(1, 1)
    predictor.begin_step(tokens_of(1))
    for layer in range(LAYERS - 1):
        predictor.observe(layer, maps[:, layer])
    predictor.end_step()
    predictor.forget([1])
    assert run(predictor, maps, tokens_of(2)) == [[]] * (LAYERS + 1)


def test_reach_bounds_how_far_is_predicted() -> None:
    predictor = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K, reach=2)
    predictor.remember(counted(random_maps(5, 1))[None])
    found = run(predictor, random_maps(1, 2), tokens_of(1))
    assert [[p.layer for p in each] for each in found] == [[], [1, 2], [2, 3], [3], []]


def test_the_store_of_requests_is_bounded_and_keeps_what_differs() -> None:
    predictor = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K, max_requests=2)
    one, other = counted(random_maps(5, 1)), counted(random_maps(5, 2))
    predictor.remember(np.stack([one, other]))
    predictor.remember((one * 3)[None])  # like the first, so it takes its place
    steps = {request: random_maps(5, seed) for request, seed in ((1, 1), (2, 2))}
    guides = {}
    for request, maps in steps.items():
        for step in maps:
            found = run(predictor, step[None], tokens_of(request))
        guides[request] = {p.layer: p.expert_ids.tolist() for p in found[0]}
    for request, matrix in ((1, one), (2, other)):
        best = {n: np.argsort(-matrix[n], kind="stable")[:TOP_K].tolist() for n in range(LAYERS)}
        assert guides[request] == best


# ---- the next gate ----


def gates(seed: int = 1) -> list[Floats]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(EXPERTS, WIDTH)).astype(np.float32) for _ in range(LAYERS)]


@pytest.mark.parametrize("widen", [1, 3, 100])
def test_the_next_gate_is_asked_with_these_hidden_states(widen: int) -> None:
    weights, hidden = gates(), np.random.default_rng(2).normal(size=(3, WIDTH)).astype(np.float32)
    predictor = NextGatePredictor(weights, TOP_K, widen)
    for layer in range(LAYERS - 1):
        found = predictor.observe_hidden(layer, hidden)
        assert [(p.layer, p.token) for p in found] == [(layer + 1, token) for token in range(3)]
        for prediction in found:
            logits = weights[layer + 1].astype(np.float64) @ hidden[prediction.token]
            probs = np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-probs)[: TOP_K * widen]
            assert prediction.expert_ids.tolist() == best.tolist()
            np.testing.assert_allclose(prediction.probs, probs[best], rtol=1e-4)
    assert predictor.observe_hidden(LAYERS - 1, hidden) == []


def test_large_logits_do_not_overflow() -> None:
    predictor = NextGatePredictor(gates(), TOP_K)
    [found] = predictor.observe_hidden(0, np.full((1, WIDTH), 1e4, np.float32))
    assert np.isfinite(found.probs).all()


def test_gates_of_no_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="shapes"):
        NextGatePredictor([*gates(), np.ones((EXPERTS, WIDTH + 1), np.float32)], TOP_K)
    with pytest.raises(ConfigError, match=r"shapes \[\]"):
        NextGatePredictor([], TOP_K)
    with pytest.raises(ConfigError, match="widened 0"):
        NextGatePredictor(gates(), TOP_K, 0)
    with pytest.raises(InvariantError, match="hidden states"):
        NextGatePredictor(gates(), TOP_K).observe_hidden(0, np.ones((1, WIDTH + 1), np.float32))


# ---- trained probes ----


def planted(count: int, distance: int, seed: int) -> Floats:
    """Maps in which layer l + distance is layer l with its experts renamed, one way a layer."""
    maps = random_maps(count, seed) * np.linspace(1, 4, EXPERTS, dtype=np.float32)  # unlike means
    maps /= maps.sum(axis=2, keepdims=True)
    for layer in range(distance, LAYERS):
        renamed = np.random.default_rng(layer).permutation(EXPERTS)
        maps[:, layer] = maps[:, layer - distance][:, renamed]
    return maps


@pytest.mark.parametrize("distance", [1, 2])
def test_probes_learn_a_linear_law(distance: int) -> None:
    predictor = train(planted(400, distance, 1), distance, 1e-9, top_k=TOP_K)
    new = planted(8, distance, 2)
    found = run(predictor, new, tokens_of(*range(8)))
    assert [[p.layer for p in each] for each in found[1:]] == [
        [layer + distance] * 8 if layer + distance < LAYERS else [] for layer in range(LAYERS)
    ]
    assert found[0] == []
    for prediction in (p for each in found for p in each):
        row = new[prediction.token, prediction.layer]
        assert set(prediction.expert_ids.tolist()) == set(np.argsort(-row)[:TOP_K].tolist())


def test_probes_of_masks_see_which_experts_and_not_how_much() -> None:
    maps = np.zeros((300, LAYERS, EXPERTS), np.float32)
    kinds = np.random.default_rng(1).integers(4, size=300)
    for token, kind in enumerate(kinds):
        maps[token, :, kind * 3 : kind * 3 + TOP_K] = (0.7, 0.3)
    predictor = train(maps, 1, 1e-6, top_k=TOP_K, of_mask=True)
    flipped = maps[:4].copy()
    flipped[flipped == 0.7] = 0.1  # the order within the two is another: the same mask
    mine, theirs = (run(predictor, each, tokens_of(0, 1, 2, 3)) for each in (maps[:4], flipped))
    assert [[p.expert_ids.tolist() for p in each] for each in mine] == [
        [p.expert_ids.tolist() for p in each] for each in theirs
    ]
    for prediction in (p for each in mine for p in each):
        first = kinds[prediction.token] * 3
        assert sorted(prediction.expert_ids.tolist()) == [first, first + 1]


def test_a_large_ridge_leaves_the_mean() -> None:
    maps = random_maps(50, 1)
    predictor = train(maps, 1, 1e9, top_k=TOP_K)
    found = run(predictor, random_maps(1, 2), tokens_of(1))
    for each in found[1:LAYERS]:
        mean = maps[:, each[0].layer].mean(axis=0)
        assert each[0].expert_ids.tolist() == np.argsort(-mean)[:TOP_K].tolist()


@pytest.mark.parametrize("of_mask", [False, True])
def test_probes_are_loaded_as_they_were_saved(tmp_path: Path, of_mask: bool) -> None:
    path = tmp_path / "probes.safetensors"
    predictor = train(random_maps(60, 1), 2, 0.01, top_k=TOP_K, of_mask=of_mask)
    predictor.save(path)
    loaded = LearnedPredictor.load(path, LAYERS, EXPERTS, TOP_K)
    new = random_maps(5, 2)
    mine, theirs = (run(each, new, tokens_of(*range(5))) for each in (predictor, loaded))
    assert any(mine)
    for one, other in zip(mine, theirs, strict=True):
        assert [(p.layer, p.expert_ids.tolist(), p.probs.tolist()) for p in one] == [
            (p.layer, p.expert_ids.tolist(), p.probs.tolist()) for p in other
        ]
    assert (loaded.probes.distance, loaded.probes.of_mask) == (2, of_mask)


@pytest.mark.parametrize(
    "model",
    [(LAYERS + 1, EXPERTS, TOP_K), (LAYERS, EXPERTS + 1, TOP_K), (LAYERS, EXPERTS, TOP_K + 1)],
)
def test_probes_of_another_model_are_refused_by_name(
    tmp_path: Path, model: tuple[int, int, int]
) -> None:
    path = tmp_path / "probes.safetensors"
    train(random_maps(60, 1), 2, 0.01, top_k=TOP_K).save(path)
    with pytest.raises(ConfigError, match=r"probes\.safetensors.*traces of this model"):
        LearnedPredictor.load(path, *model)


def test_probes_that_are_no_whole_set_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "probes.safetensors"
    good = train(random_maps(60, 1), 2, 0.01, top_k=TOP_K).probes
    damaged = (
        Probes(good.weights, good.biases[:1], 2, TOP_K),
        Probes(good.weights, good.biases, 3, TOP_K),
        Probes(good.weights * np.float32(np.nan), good.biases, 2, TOP_K),
    )
    for probes in damaged:
        LearnedPredictor(probes).save(path)
        with pytest.raises(ConfigError, match=r"probes\.safetensors"):
            LearnedPredictor.load(path, LAYERS, EXPERTS, TOP_K)


@pytest.mark.parametrize(
    ("count", "distance", "ridge", "words"),
    [(0, 1, 0.1, "0 maps"), (5, 1, 0.0, "ridge of 0"), (5, 0, 0.1, "of 0"), (5, 5, 0.1, "of 5")],
)
def test_what_cannot_be_trained_is_refused(
    count: int, distance: int, ridge: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(random_maps(count, 1), distance, ridge, top_k=TOP_K)


# ---- the protocol ----


def _finemoe() -> Predictor:
    store = MapStore(LAYERS, EXPERTS, WIDTH, 2, 1 << 20)
    store.add(np.ones((9, WIDTH), np.float32), random_maps(9, 5))
    return FineMoEPredictor(store, TOP_K, 2)


def _counts() -> Predictor:
    predictor = RequestCountsPredictor(LAYERS, EXPERTS, TOP_K)
    predictor.remember(np.stack([counted(random_maps(4, seed)) for seed in range(5)]))
    return predictor


def regressing(maps: Floats) -> RegressionPredictor:
    moments = RouterMoments(LAYERS, EXPERTS, 1 << 20)
    moments.add(logits_of(maps))
    return RegressionPredictor(moments, TOP_K)


MAKERS: dict[str, Callable[[], Predictor]] = {
    "finemoe": _finemoe,
    "counts": _counts,
    "next gate": lambda: NextGatePredictor(gates(), TOP_K),
    "learned": lambda: train(random_maps(40, 5), 2, 0.01, top_k=TOP_K),
    "regression": lambda: regressing(random_maps(40, 5)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_only_later_layers_are_named_and_the_same_each_time(name: str) -> None:
    runs = []
    for _ in range(2):
        predictor, found = MAKERS[name](), []
        for step in range(3):
            found.append(run(predictor, random_maps(2, step), tokens_of(1, 2)))
            found.append(run(predictor, random_maps(0, step), tokens_of()))  # an idle rank
        predictor.forget([1, 2])
        runs.append(found)
    for each in runs[0]:
        for layer, predicted in enumerate(each, start=-1):
            assert all(layer < p.layer < LAYERS for p in predicted)
            assert all(0 <= p.token < 2 for p in predicted)
            assert all((p.expert_ids >= 0).all() for p in predicted)
            assert all((p.expert_ids < EXPERTS).all() for p in predicted)
            assert all((np.diff(p.probs) <= 0).all() for p in predicted)
            assert all(p.expert_ids.dtype == np.int64 for p in predicted)
            assert all(p.probs.dtype == np.float32 for p in predicted)
    mine, theirs = (
        [
            (p.layer, p.token, p.expert_ids.tolist(), p.probs.tolist())
            for e in r
            for q in e
            for p in q
        ]
        for r in runs
    )
    assert mine == theirs
    assert bool(mine) == (name != "next gate")


@pytest.mark.parametrize("name", ["finemoe", "counts", "learned", "regression"])
def test_a_layer_out_of_order_is_a_defect(name: str) -> None:
    predictor = MAKERS[name]()
    predictor.begin_step(tokens_of(1))
    with pytest.raises(InvariantError, match="layer 2"):
        predictor.observe(2, random_maps(1, 1)[:, 2])
