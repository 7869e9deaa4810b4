"""The map store does what direct cosines and a brute force over all entries would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.map_store import (
    FORMAT,
    NO_ENTRY,
    MapStore,
    RunningSearch,
    entry_bytes,
)
from sgl_esft.offload.routing import NO_OWNER, Floats

LAYERS, EXPERTS, WIDTH = 5, 8, 12


def random_maps(count: int, seed: int, layers: int = LAYERS) -> Floats:
    rows = np.random.default_rng(seed).gamma(0.3, size=(count, layers, EXPERTS)) + 1e-3
    return (rows / rows.sum(axis=2, keepdims=True)).astype(np.float32)


def random_embeddings(count: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def make_store(capacity: int, distance: int = 2, **more: Any) -> MapStore:
    max_bytes = capacity * entry_bytes(LAYERS, EXPERTS, WIDTH)
    return MapStore(LAYERS, EXPERTS, WIDTH, distance, max_bytes, **more)


def filled(count: int, capacity: int | None = None) -> MapStore:
    store = make_store(capacity or count)
    store.add(random_embeddings(count, 1), random_maps(count, 2))
    return store


def cosine(one: Floats, other: Floats) -> float:
    """The slow way, in float64."""
    a, b = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def stored_maps(store: MapStore) -> Floats:
    everyone = np.arange(store.size)
    return np.stack([store.rows(everyone, layer) for layer in range(LAYERS)], axis=1)


# ---- size ----


def test_capacity_is_what_the_bytes_hold() -> None:
    one = entry_bytes(LAYERS, EXPERTS, WIDTH)
    for max_bytes, capacity in ((0, 1), (one, 1), (2 * one - 1, 1), (2 * one, 2), (7 * one, 7)):
        assert MapStore(LAYERS, EXPERTS, WIDTH, 1, max_bytes).capacity == capacity


def test_an_entry_takes_the_bytes_that_are_counted() -> None:
    store = make_store(16)
    arrays = [value for value in vars(store).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 16 * entry_bytes(LAYERS, EXPERTS, WIDTH)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 8, 4, 1), "0 MoE layers"),
        ((5, 0, 4, 1), "0 experts"),
        ((5, 8, -1, 1), "embeddings of -1"),
        ((5, 8, 4, 0), "distance of 0"),
        ((5, 8, 4, 6), "distance of 6"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MapStore(*sizes, max_bytes=1 << 20)


# ---- searching ----


@pytest.mark.parametrize("size", [1, 40])
def test_running_products_are_the_direct_cosines_after_each_layer(size: int) -> None:
    store, new = filled(size), random_maps(3, 7)
    old, search = stored_maps(store), RunningSearch(filled(size), 3)
    for layer in range(LAYERS):
        search.follow(layer, new[:, layer])
        direct = [[cosine(n[: layer + 1], o[: layer + 1]) for o in old] for n in new]
        np.testing.assert_allclose(search.cosines(), direct, atol=1e-6)
        best = search.best()
        assert best.entries.tolist() == np.argmax(direct, axis=1).tolist()
        np.testing.assert_allclose(best.scores, np.max(direct, axis=1), atol=1e-6)


def test_embeddings_are_compared_by_their_direction() -> None:
    store, old, new = make_store(20), random_embeddings(20, 1), random_embeddings(4, 5)
    store.add(old * 7, random_maps(20, 2))
    direct = [[cosine(n, o) for o in old] for n in new]
    np.testing.assert_allclose(store.cosines_of_embeddings(new * 3), direct, atol=1e-6)
    found = store.search_embeddings(new)
    assert found.entries.tolist() == np.argmax(direct, axis=1).tolist()
    np.testing.assert_allclose(found.scores, np.max(direct, axis=1), atol=1e-6)


def test_an_entry_without_an_embedding_is_never_found_by_one() -> None:
    store = make_store(4)
    nothing = np.zeros((2, WIDTH), np.float32)
    store.add(nothing, random_maps(2, 2))
    assert store.search_embeddings(random_embeddings(3, 5)).entries.tolist() == [NO_ENTRY] * 3
    against = random_embeddings(1, 1)
    store.add(against, random_maps(1, 3))
    found = store.search_embeddings(-against)  # -1 is less than the 0 of the other two
    assert (found.entries.tolist(), found.scores.round(5).tolist()) == ([2], [-1])


def test_an_empty_store_finds_nothing() -> None:
    store = make_store(4)
    assert store.search_embeddings(random_embeddings(2, 1)).entries.tolist() == [NO_ENTRY] * 2
    search = RunningSearch(store, 2)
    search.follow(0, random_maps(2, 1)[:, 0])
    assert search.best().entries.tolist() == [NO_ENTRY] * 2
    assert search.best().scores.tolist() == [0, 0]


def test_owners_see_their_own_entries_and_the_bases() -> None:
    store = make_store(12)
    embeddings, maps = random_embeddings(12, 1), random_maps(12, 2)
    owners = np.array([NO_OWNER, 3, 8] * 4)
    store.add(embeddings, maps, owners)
    # Each asks for entry 0, which is the base's: the others get the best of their own, or nothing.
    asking = np.array([NO_OWNER, 3, 8, 5])
    search = RunningSearch(store, 4, asking)
    search.follow(0, np.repeat(maps[:1, 0], 4, axis=0))
    by_map, by_word = (
        search.best(),
        store.search_embeddings(np.repeat(embeddings[:1], 4, 0), asking),
    )
    for found, direct in (
        (by_map, [cosine(maps[0, 0], other[0]) for other in maps]),
        (by_word, [cosine(embeddings[0], other) for other in embeddings]),
    ):
        own = [
            int(np.argmax(np.where((owners == owner) | (owners == NO_OWNER), direct, -2)))
            for owner in asking
        ]
        assert found.entries.tolist() == own
    assert by_map.entries.tolist() == [0, 0, 0, 0]
    # The base sees no adapter's: entry 1 is adapter 3's.
    search = RunningSearch(store, 4, asking)
    search.follow(0, np.repeat(maps[1:2, 0], 4, axis=0))
    found = search.best()
    assert found.entries[1] == 1
    assert all(owners[entry] == NO_OWNER for entry in found.entries[[0, 3]])


def test_equal_entries_give_the_first() -> None:
    store, maps = make_store(6), random_maps(1, 3)
    store.add(random_embeddings(6, 1), np.repeat(maps, 6, axis=0))
    search = RunningSearch(store, 1)
    search.follow(0, maps[:, 0])
    assert search.best().entries.tolist() == [0]


def test_a_search_does_not_outlive_its_store_nor_skip_a_layer() -> None:
    store, new = filled(4, capacity=8), random_maps(1, 9)
    search = RunningSearch(store, 1)
    with pytest.raises(InvariantError, match="stands at MoE layer -1 and is given 1"):
        search.follow(1, new[:, 1])
    search.follow(0, new[:, 0])
    store.add(random_embeddings(1, 3), new)
    with pytest.raises(InvariantError, match="had 4 additions and has 5"):
        search.follow(1, new[:, 1])


# ---- adding ----


def brute_victims(
    embeddings: Floats, maps: Floats, new_embeddings: Floats, new_maps: Floats, distance: int
) -> list[int]:
    """Section 4.4 word for word, in turn and each victim once."""
    victims: list[int] = []
    for embedding, new in zip(new_embeddings, new_maps, strict=True):
        redundancy = [
            distance / LAYERS * cosine(embedding, other)
            + (LAYERS - distance) / LAYERS * cosine(new, old)
            for other, old in zip(embeddings, maps, strict=True)
        ]
        left = [-9 if entry in victims else score for entry, score in enumerate(redundancy)]
        victims.append(int(np.argmax(left)))
    return victims


@pytest.mark.parametrize("distance", [1, 3, LAYERS])
def test_a_full_store_loses_the_most_redundant(distance: int) -> None:
    store = make_store(30, distance)
    embeddings, maps = random_embeddings(30, 1), random_maps(30, 2)
    store.add(embeddings, maps)
    new_embeddings, new_maps = random_embeddings(8, 3), random_maps(8, 4)
    victims = brute_victims(embeddings, maps, new_embeddings, new_maps, distance)
    expected = maps.copy()
    expected[victims] = new_maps
    store.add(new_embeddings, new_maps)
    np.testing.assert_array_equal(stored_maps(store), expected)
    assert (store.size, store.num_added) == (30, 38)
    found = store.search_embeddings(new_embeddings)
    assert found.entries.tolist() == victims


def test_both_halves_of_redundancy_count() -> None:
    """Entry 0 has the new map, entry 1 its embedding: the distance decides who leaves."""
    embeddings, maps = random_embeddings(2, 1), random_maps(2, 2)
    left = {}
    for distance in (1, LAYERS - 1):
        store = make_store(2, distance)
        store.add(embeddings, maps)
        store.add(embeddings[1:], maps[:1])
        left[distance] = store.search_embeddings(embeddings[:1]).scores.tolist()[0] < 0.99
    assert left == {1: True, LAYERS - 1: False}


def test_entries_of_one_batch_have_victims_of_their_own() -> None:
    store = make_store(5)
    embeddings, maps = random_embeddings(5, 1), random_maps(5, 2)
    store.add(embeddings, maps)
    same_embeddings, same_maps = np.repeat(embeddings[2:3], 3, 0), np.repeat(maps[2:3], 3, 0)
    store.add(same_embeddings, same_maps)
    changed = [entry for entry in range(5) if np.array_equal(stored_maps(store)[entry], maps[2])]
    victims = brute_victims(embeddings, maps, same_embeddings, same_maps, 2)
    assert (victims[0], len(changed)) == (2, 3)
    assert changed == sorted(victims)


def test_a_batch_that_half_fits_appends_first_and_never_loses_itself() -> None:
    store = filled(3, capacity=5)
    new_maps = random_maps(4, 9)
    store.add(random_embeddings(4, 8), new_maps)
    kept = {entry.tobytes() for entry in stored_maps(store)}
    assert store.size == 5
    assert all(entry.tobytes() in kept for entry in new_maps)


def test_of_more_than_fits_the_last_stay() -> None:
    store, maps = make_store(3), random_maps(7, 2)
    store.add(random_embeddings(7, 1), maps)
    np.testing.assert_array_equal(stored_maps(store), maps[-3:])


def test_replaced_entries_are_found_by_their_new_maps_norms_and_owner() -> None:
    store = filled(6)
    store.add(random_embeddings(6, 21), random_maps(6, 22) * 3, np.full(6, 4))
    new = random_maps(2, 23)
    search = RunningSearch(store, 2, np.full(2, 4))
    for layer in range(LAYERS):
        search.follow(layer, new[:, layer])
    direct = [[cosine(n, o) for o in stored_maps(store)] for n in new]
    np.testing.assert_allclose(search.cosines(), direct, atol=1e-6)
    assert search.best().entries.tolist() == np.argmax(direct, axis=1).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_enters(bad: float) -> None:
    store, maps, embeddings = make_store(4), random_maps(3, 2), random_embeddings(3, 1)
    maps[0, 2, 1] = bad
    embeddings[1, 0] = bad
    store.add(embeddings, maps)
    np.testing.assert_array_equal(stored_maps(store), maps[2:])


@pytest.mark.parametrize("shape", [(2, LAYERS + 1, EXPERTS), (2, LAYERS, EXPERTS - 1)])
def test_maps_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="another model"):
        make_store(4).add(random_embeddings(2, 1), np.ones(shape, np.float32))


def test_the_same_calls_give_the_same_store() -> None:
    stores = [make_store(10), make_store(10)]
    for store in stores:
        for seed in range(6):
            store.add(random_embeddings(4, seed), random_maps(4, seed + 50))
    assert stored_maps(stores[0]).tobytes() == stored_maps(stores[1]).tobytes()


# ---- files ----


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    store = make_store(20)
    embeddings = random_embeddings(9, 1)
    embeddings[4] = 0
    store.add(embeddings, random_maps(9, 2), np.arange(9))
    store.save(tmp_path / "maps.safetensors")
    other = make_store(9)
    other.load(tmp_path / "maps.safetensors")
    other.save(tmp_path / "again.safetensors")
    assert (other.size, other.num_added) == (9, 9)
    once, again = (load_file(tmp_path / f"{name}.safetensors") for name in ("maps", "again"))
    assert set(once) == {"embeddings", "maps", "owners", "ages"}
    assert {name: array.tobytes() for name, array in once.items()} == {
        name: array.tobytes() for name, array in again.items()
    }
    search = RunningSearch(other, 1, np.array([6]))
    search.follow(0, random_maps(1, 3)[:, 0])
    assert search.best().entries.tolist() == [6]
    assert other.search_embeddings(random_embeddings(5, 3)).entries.tolist() == (
        store.search_embeddings(random_embeddings(5, 3)).entries.tolist()
    )


def test_ages_are_kept_across_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    stores = [make_store(12), make_store(12)]
    for seed in range(9):
        stores[0].add(random_embeddings(2, seed), random_maps(2, seed + 50))
    stores[0].save(path)
    stores[1].load(path)
    assert len(set(stores[0].ages().tolist())) > 3
    for seed in range(9, 20):
        for store in stores:
            store.add(random_embeddings(2, seed), random_maps(2, seed + 50))
    assert stored_maps(stores[0]).tobytes() == stored_maps(stores[1]).tobytes()


def test_a_file_of_another_base_is_refused_whatever_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    make_store(3, base="One 12ab").save(path)
    other = make_store(3, base="Other 34cd")
    words = r"maps\.safetensors has expert maps of the base 'One 12ab', 5 MoE layers of 8 experts"
    with pytest.raises(ConfigError, match=rf"{words}, and served is 'Other 34cd'.*or a new name"):
        other.load(path)
    make_store(3, base="One 12ab").load(path)


def test_a_smaller_store_takes_what_it_can_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    filled(100).save(path)
    small, known = make_store(7), {entry.tobytes() for entry in stored_maps(filled(100))}
    small.load(path)
    kept = [entry.tobytes() for entry in stored_maps(small)]
    assert (len(kept), len(set(kept))) == (7, 7)
    assert set(kept) <= known


@pytest.mark.parametrize("other", [(4, 8, 12), (5, 9, 12), (5, 8, 13)])
def test_a_store_of_another_model_is_refused_by_name(
    tmp_path: Path, other: tuple[int, int, int]
) -> None:
    path = tmp_path / "maps.safetensors"
    filled(3).save(path)
    store = MapStore(*other, 1, 1 << 20)
    with pytest.raises(ConfigError, match=r"maps\.safetensors.*saved for this base"):
        store.load(path)
    assert store.size == 0


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path, store = tmp_path / "maps.safetensors", make_store(8)
    with pytest.raises(ConfigError, match=r"maps\.safetensors"):
        store.load(path)
    filled(3).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"maps\.safetensors is damaged"):
        store.load(path)
    sound = {
        "embeddings": random_embeddings(2, 1),
        "maps": np.ascontiguousarray(np.swapaxes(random_maps(2, 2), 0, 1)),
        "owners": np.zeros(2, np.int64),
        "ages": np.zeros(2, np.int64),
    }
    about = {"format": FORMAT, "base": "", "sizes": f"{LAYERS} MoE layers of {EXPERTS} experts"}
    nan = sound["maps"].copy()
    nan[1, 1, 1] = np.nan
    for change, words in (
        ({"owners": np.zeros(3, np.int64)}, "2 maps, 3 owners and 2 ages"),
        ({"ages": np.array([3, -1])}, "-1 at least"),
        ({"owners": np.zeros(2, np.int32)}, "int32"),
        ({"more": np.zeros(2, np.int64)}, "more"),
        ({"maps": nan}, "NaN"),
    ):
        save_file({**sound, **change}, path, about)
        with pytest.raises(ConfigError, match=words):
            store.load(path)
    assert store.size == 0
    for said in ({}, {**about, "format": "sgl-esft expert maps 1"}):
        save_file(sound, path, said)
        with pytest.raises(ConfigError, match="is no file of sgl-esft expert maps 2"):
            store.load(path)
    save_file({**sound, "ages": np.full(2, np.iinfo(np.int64).max)}, path, about)
    store.load(path)
    assert store.size == 2
    store.add(random_embeddings(7, 1), random_maps(7, 2))
    assert store.ages().min() >= 0


def test_a_file_is_replaced_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "maps.safetensors"
    filled(3).save(path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        filled(5).save(path)
        assert reader.read() == before
    assert path.read_bytes() != before


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "maps.safetensors"
    filled(3).save(path)
    before = path.read_bytes()

    def half(arrays: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("sgl_esft.offload.predictors.predictor.save_file", half)
    with pytest.raises(OSError, match="no space"):
        filled(5).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
