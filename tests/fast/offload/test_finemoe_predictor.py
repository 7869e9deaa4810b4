"""FineMoE's predictor finds planted trajectories, selects as a brute force does, and learns."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.finemoe import FineMoEPredictor
from sgl_esft.offload.predictors.map_store import MapStore, entry_bytes
from sgl_esft.offload.predictors.selection import (
    most_likely,
    predictions,
    rank,
    reaching,
    thresholds,
)
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

LAYERS, EXPERTS, WIDTH, TOP_K = 6, 16, 10, 3


def random_maps(count: int, seed: int) -> Floats:
    rows = np.random.default_rng(seed).gamma(0.3, size=(count, LAYERS, EXPERTS)) + 1e-3
    return (rows / rows.sum(axis=2, keepdims=True)).astype(np.float32)


def random_embeddings(count: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def make_store(capacity: int = 64, distance: int = 2) -> MapStore:
    max_bytes = capacity * entry_bytes(LAYERS, EXPERTS, WIDTH)
    return MapStore(LAYERS, EXPERTS, WIDTH, distance, max_bytes)


def step_of(
    count: int,
    embeddings: Floats | None = None,
    adapter_slots: tuple[int, ...] | None = None,
    owners: tuple[int, ...] | None = None,
) -> StepTokens:
    return StepTokens(tuple(range(count)), adapter_slots or (-1,) * count, embeddings, owners)


def run(
    predictor: FineMoEPredictor, maps: Floats, tokens: StepTokens
) -> tuple[list[Prediction], list[list[Prediction]]]:
    """A whole step: predictions before it, and after each layer."""
    first = predictor.begin_step(tokens)
    later = [predictor.observe(layer, maps[:, layer]) for layer in range(maps.shape[1])]
    predictor.end_step()
    return first, later


def plain(found: list[Prediction]) -> list[tuple[int, int, list[int], list[float]]]:
    return [(p.layer, p.token, p.expert_ids.tolist(), p.probs.tolist()) for p in found]


# ---- selection ----


def brute_selection(row: Floats, delta: float, least: int) -> list[int]:
    """Section 4.3 word for word: pick the most probable until the sum is delta, `least` or more."""
    left, picked = list(range(len(row))), []
    total = 0.0
    while left and (total < delta or len(picked) < least):
        best = max(left, key=lambda expert: (row[expert], -expert))
        if row[best] == 0 and len(picked) >= least:
            break
        left.remove(best)
        picked.append(best)
        total += float(row[best])
    return picked


@pytest.mark.parametrize("least", [1, 3, 16])
def test_selection_is_the_brute_force_selection(least: int) -> None:
    rows = random_maps(200, 3)[:, 0]
    rows[::3] = np.round(rows[::3], 2)  # ties and zeros
    deltas = np.random.default_rng(4).random(200).astype(np.float32)
    deltas[:40:2], deltas[1:40:2] = 0, 1
    ranked = rank(rows)
    counts = reaching(ranked, deltas, least)
    found = predictions(5, np.arange(200), ranked, counts)
    for row, delta, prediction in zip(rows, deltas, found, strict=True):
        assert prediction.expert_ids.tolist() == brute_selection(row, float(delta), least)
        np.testing.assert_array_equal(prediction.probs, row[prediction.expert_ids])


def test_a_sure_match_prefetches_little_and_an_unsure_one_much() -> None:
    scores = np.array([1.5, 1, 0.75, 0, -1], np.float32)
    assert thresholds(scores).tolist() == [0, 0, 0.25, 1, 1]
    ranked = rank(np.full((5, 8), 0.125, np.float32))
    assert reaching(ranked, thresholds(scores), 1).tolist() == [1, 1, 2, 8, 8]
    assert reaching(ranked, thresholds(scores), 3).tolist() == [3, 3, 3, 8, 8]


def test_ties_go_to_the_lower_id() -> None:
    rows = np.array([[0.2, 0.3, 0.2, 0.3, 0.0]], np.float32)
    assert rank(rows).expert_ids.tolist() == [[1, 3, 0, 2, 4]]


def test_the_most_likely_leaves_out_what_cannot_be() -> None:
    rows = np.array([[0, 1, 0, 0], [0, 0, 0, 0], [0.5, 0.1, 0.2, 0.2]], np.float32)
    found = most_likely(2, np.array([4, 5, 6]), rows, 3)
    assert [(p.token, p.expert_ids.tolist()) for p in found] == [(4, [1]), (6, [0, 2, 3])]


# ---- which layers, and when ----


@pytest.mark.parametrize("distance", [1, 2, LAYERS - 1, LAYERS])
def test_predictions_are_of_the_layers_at_the_distance(distance: int) -> None:
    store = make_store(distance=distance)
    store.add(random_embeddings(20, 1), random_maps(20, 2))
    predictor = FineMoEPredictor(store, TOP_K, distance)
    first, later = run(predictor, random_maps(2, 3), step_of(2, random_embeddings(2, 4)))
    both = [0, 1]
    assert [(p.layer, p.token) for p in first] == [(n, t) for n in range(distance) for t in both]
    assert [[(p.layer, p.token) for p in found] for found in later] == [
        [(layer + distance, token) for token in both] if layer + distance < LAYERS else []
        for layer in range(LAYERS)
    ]
    assert all(len(p.expert_ids) >= TOP_K for found in (first, *later) for p in found)


def test_nothing_is_predicted_without_knowledge() -> None:
    predictor = FineMoEPredictor(make_store(), TOP_K, 2)
    embeddings, maps = random_embeddings(2, 1), random_maps(2, 2)
    assert run(predictor, maps, step_of(2, embeddings)) == ([], [[]] * LAYERS)  # an empty store
    first, later = run(predictor, maps, step_of(2))  # no embeddings: trajectories alone
    assert first == []
    assert [len(found) for found in later] == [2, 2, 2, 2, 0, 0]
    assert predictor.begin_step(step_of(0)) == []  # an idle rank
    predictor.end_step()


def test_a_batch_too_large_is_left_alone() -> None:
    store = make_store()
    store.add(random_embeddings(9, 1), random_maps(9, 2))
    predictor = FineMoEPredictor(store, TOP_K, 2, max_batch=3)
    for count, size in ((4, 9), (3, 12)):
        tokens = step_of(count, random_embeddings(count, 5))
        first, later = run(predictor, random_maps(count, 6), tokens)
        assert bool(first) == any(later) == (count == 3)
        assert store.size == size


# ---- what is found ----


def test_planted_trajectories_give_exactly_the_planted_experts() -> None:
    """Kinds of tokens whose experts are disjoint, known from one noisy step each."""
    draw = np.random.default_rng(8)
    kinds = np.zeros((5, LAYERS, EXPERTS), np.float32)
    for layer in range(LAYERS):
        places = draw.permutation(EXPERTS)[:15].reshape(5, TOP_K)
        for kind, experts in enumerate(places):
            kinds[kind, layer, experts] = (0.5, 0.3, 0.2)

    def noisy() -> Floats:
        rows = kinds + draw.random(kinds.shape).astype(np.float32) * np.float32(0.02)
        return (rows / rows.sum(axis=2, keepdims=True)).astype(np.float32)

    words = random_embeddings(5, 9)
    predictor = FineMoEPredictor(make_store(), TOP_K, 2)
    run(predictor, noisy(), step_of(5, words))
    order = [3, 0, 4, 4, 1]
    tokens = step_of(5, words[order] + np.float32(0.01))
    first, later = run(predictor, noisy()[order], tokens)
    found = [*first, *(prediction for each in later for prediction in each)]
    assert len(found) == 5 * LAYERS
    for prediction in found:
        planted = np.flatnonzero(kinds[order[prediction.token], prediction.layer])
        assert sorted(prediction.expert_ids.tolist()) == planted.tolist()


def test_the_guiding_row_is_that_of_the_entry_with_the_best_cosine() -> None:
    store, old, new = make_store(distance=2), random_maps(50, 2), random_maps(4, 3)
    store.add(random_embeddings(50, 1), old)
    predictor = FineMoEPredictor(store, TOP_K, 2, learns=False)
    _, later = run(predictor, new, step_of(4))
    for layer, found in enumerate(later[: LAYERS - 2]):
        flat_old = old[:, : layer + 1].reshape(50, -1).astype(np.float64)
        flat_new = new[:, : layer + 1].reshape(4, -1).astype(np.float64)
        lengths = np.linalg.norm(flat_new, axis=1)[:, None] * np.linalg.norm(flat_old, axis=1)
        scores = flat_new @ flat_old.T / lengths
        for prediction in found:
            guide = scores[prediction.token].argmax()
            row = old[guide, layer + 2]
            delta = 1 - scores[prediction.token, guide]
            assert prediction.expert_ids.tolist() == brute_selection(row, delta, TOP_K)
            np.testing.assert_array_equal(prediction.probs, row[prediction.expert_ids])


def test_adapters_have_maps_of_their_own() -> None:
    """Both adapters' tokens look alike and go on differently; others know the base's alone."""
    maps = random_maps(3, 2)
    maps[1:, :3] = maps[0, :3]
    words = np.repeat(random_embeddings(1, 1), 3, axis=0)
    predictor = FineMoEPredictor(make_store(), TOP_K, 2, by_adapter=True)
    run(predictor, maps[:2], step_of(2, words[:2], (4, 5), (77, 88)))

    def guides() -> dict[int, float]:
        """By token: what the layer after the three that are alike is predicted to be."""
        tokens = step_of(4, np.repeat(words[:1], 4, axis=0), (4, 5, 0, -1), (88, 77, 99, -1))
        predictor.begin_step(tokens)  # they have changed places
        for layer in range(3):
            found = predictor.observe(layer, np.repeat(maps[:1, layer], 4, axis=0))
        return {p.token: p.probs[0] for p in found}

    assert guides() == {0: maps[1, 4].max(), 1: maps[0, 4].max()}
    run(predictor, maps[2:], step_of(1, words[:1], (-1,), (-1,)))
    base = maps[2, 4].max()
    assert guides() == {0: maps[1, 4].max(), 1: maps[0, 4].max(), 2: base, 3: base}


def test_by_adapter_it_must_be_known_whose_slots_are_whose() -> None:
    predictor = FineMoEPredictor(make_store(), TOP_K, 2, by_adapter=True)
    with pytest.raises(ConfigError, match=r"--store-by adapter.*record the trace again"):
        predictor.begin_step(step_of(1, random_embeddings(1, 1)))


# ---- learning ----


def test_whole_steps_are_learned_and_others_are_not() -> None:
    store = make_store()
    predictor = FineMoEPredictor(store, TOP_K, 2)
    maps, words = random_maps(3, 2), random_embeddings(3, 1)
    predictor.begin_step(step_of(3, words))
    for layer in range(LAYERS - 1):
        predictor.observe(layer, maps[:, layer])
    predictor.end_step()  # a layer was not observed
    assert store.size == 0
    predictor.end_step()  # no step at all
    run(predictor, maps, step_of(3, words))
    assert store.size == 3
    assert store.search_embeddings(words).entries.tolist() == [0, 1, 2]
    run(FineMoEPredictor(store, TOP_K, 2, learns=False), maps, step_of(3, words))
    assert store.size == 3


def test_a_step_without_embeddings_is_learned_with_none() -> None:
    store = make_store()
    run(FineMoEPredictor(store, TOP_K, 2), random_maps(2, 2), step_of(2))
    assert store.size == 2
    assert store.search_embeddings(random_embeddings(1, 1)).entries.tolist() == [-1]


def test_what_is_learned_is_not_the_callers_buffer() -> None:
    store, words, maps = make_store(), random_embeddings(1, 1), random_maps(1, 2)
    predictor, shown = FineMoEPredictor(store, TOP_K, 2), words.copy()
    predictor.begin_step(step_of(1, shown))
    shown[:] = 5
    probs = np.empty((1, EXPERTS), np.float32)
    for layer in range(LAYERS):
        probs[:] = maps[:, layer]
        predictor.observe(layer, probs)
    predictor.end_step()
    assert store.search_embeddings(words).scores[0] == pytest.approx(1)
    assert [store.rows(np.array([0]), n).tolist() for n in range(LAYERS)] == [
        maps[:, n].tolist() for n in range(LAYERS)
    ]


def test_a_full_store_learns_as_it_would_by_itself() -> None:
    """The running products of a step say which entries leave, bit for bit as `add` alone does."""
    alone, learned = make_store(capacity=10), make_store(capacity=10)
    predictor = FineMoEPredictor(learned, TOP_K, 2)
    for seed in range(8):
        maps, words = random_maps(3, seed), random_embeddings(3, seed + 50)
        run(predictor, maps, step_of(3, words))
        alone.add(words, maps)
    everyone = np.arange(10)
    for layer in range(LAYERS):
        mine, theirs = alone.rows(everyone, layer), learned.rows(everyone, layer)
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("capacity", "num_products"), [(3, LAYERS), (64, LAYERS - 2)])
def test_a_layer_is_compared_once(
    monkeypatch: pytest.MonkeyPatch, capacity: int, num_products: int
) -> None:
    """Of a full store all layers, for who leaves; otherwise those from which one is predicted."""
    store = make_store(capacity)
    store.add(random_embeddings(3, 1), random_maps(3, 2))
    layers, products = [], store.products

    def counted(layer: int, rows: Floats) -> Floats:
        layers.append(layer)
        return products(layer, rows)

    monkeypatch.setattr(store, "products", counted)
    run(FineMoEPredictor(store, TOP_K, 2), random_maps(2, 3), step_of(2))
    assert layers == list(range(num_products))
    assert store.num_added == 5


def test_the_same_calls_give_the_same_predictions() -> None:
    def whole_run() -> list[tuple[int, int, list[int], list[float]]]:
        predictor, found = FineMoEPredictor(make_store(capacity=12), TOP_K, 2), []
        for seed in range(10):
            tokens = step_of(4, random_embeddings(4, seed))
            first, later = run(predictor, random_maps(4, seed + 90), tokens)
            found += plain([*first, *(prediction for each in later for prediction in each)])
        return found

    once = whole_run()
    assert len(once) == 9 * 4 * LAYERS
    assert once == whole_run()


def test_a_router_that_is_not_finite_is_neither_followed_nor_learned() -> None:
    store = make_store()
    store.add(random_embeddings(5, 1), random_maps(5, 2))
    predictor, maps = FineMoEPredictor(store, TOP_K, 2), random_maps(2, 3)
    maps[0, 1] = np.nan
    _, later = run(predictor, maps, step_of(2))
    assert [[p.token for p in found] for found in later] == [[0, 1], [1], [1], [1], [], []]
    assert store.size == 6


# ---- misuse ----


def test_layers_out_of_order_and_other_shapes_are_defects() -> None:
    predictor = FineMoEPredictor(make_store(), TOP_K, 2)
    maps = random_maps(2, 1)
    predictor.begin_step(step_of(2))
    with pytest.raises(InvariantError, match="MoE layer 1"):
        predictor.observe(1, maps[:, 1])
    with pytest.raises(InvariantError, match=r"\(1, 16\)"):
        predictor.observe(0, maps[:1, 0])
    with pytest.raises(InvariantError, match="embeddings"):
        predictor.begin_step(step_of(2, np.ones((2, WIDTH + 1), np.float32)))


@pytest.mark.parametrize(
    ("top_k", "distance", "words"),
    [(0, 2, "0 of 16"), (17, 2, "17 of 16"), (3, 0, "of 0"), (3, 7, "of 7")],
)
def test_numbers_that_cannot_be_are_refused(top_k: int, distance: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FineMoEPredictor(make_store(), top_k, distance)
