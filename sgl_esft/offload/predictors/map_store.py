"""What routers said in earlier steps, and which of it is most like the present one. Pure.

    a step's embeddings and maps -> [MapStore.add] -> entries; of a full store replacement.py says
                                                      which leave
    embeddings   -> [MapStore.search_embeddings] -> the nearest entry of each token
    router probs -> [RunningSearch.follow, best] -> the nearest entry by layers 0..l, for each l

FineMoE, sections 4.1, 4.2 and 4.4. An *expert map* is one token's router distributions, one a MoE
layer. Nothing here loops over entries: a search is one matrix product a layer for the whole batch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.predictor import (
    TINY,
    Arrays,
    check_about,
    check_distance,
    read_arrays,
    unit,
    write_arrays,
)
from sgl_esft.offload.predictors.replacement import (
    AGE_WEIGHT,
    ages_of,
    redundancy_of,
    victims,
)
from sgl_esft.offload.routing import NO_OWNER, Floats, Ints

NO_ENTRY: Final = -1
FORMAT: Final = "sgl-esft expert maps 2"
_LOADED_AT_ONCE = 64  # entries of a file; of a batch, all are compared with all that are stored
_REMEDY = "give --expert-map-file the file that was saved for this base, or a new name"
_NO_OLDER = 1 << 40  # an age of a file, so that it can be added to


Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Matches:
    """The nearest entry of each token: `entries` [n], NO_ENTRY = none, and `scores` [n], cosines.

    Where there is none the score is 0.
    """

    entries: Ints
    scores: Floats


def entry_bytes(num_layers: int, num_experts: int, embedding_size: int) -> int:
    """Bytes of one entry: map, embedding, norms in float32; owner, age, if it has an embedding."""
    return 4 * (num_layers * num_experts + embedding_size + num_layers) + 8 + 8 + 1


class MapStore:
    """At most `max_bytes` of entries (one in any case), shared by all adapters of a rank.

    `distance`: the prefetch distance in layers, 1..num_layers, which weighs embeddings against
    trajectories where redundancy is judged. `embedding_size` may be 0. `base`: which model's maps
    these are, in one line, for files. `age_weight`: replacement.py's. Raises ConfigError for sizes
    that cannot be.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        embedding_size: int,
        distance: int,
        max_bytes: int,
        *,
        base: str = "",
        age_weight: float = AGE_WEIGHT,
    ) -> None:
        if min(num_layers, num_experts) < 1 or embedding_size < 0:
            raise ConfigError(
                f"a map store of {num_layers} MoE layers, {num_experts} experts and embeddings of "
                f"{embedding_size} is none: give the model's own numbers"
            )
        check_distance(distance, num_layers)
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.embedding_size = embedding_size
        self.distance = distance
        self.base = base
        self._age_weight = age_weight
        self.capacity = max(1, max_bytes // entry_bytes(num_layers, num_experts, embedding_size))
        self.size = 0
        self.num_added = 0  # since the start; a search is over when it changes
        # np.zeros takes memory only where it is written, so an empty store costs none.
        self._embeddings = np.zeros((self.capacity, embedding_size), np.float32)  # unit length or 0
        self._maps = np.zeros((num_layers, self.capacity, num_experts), np.float32)
        self._norms = np.zeros((num_layers, self.capacity), np.float32)  # [l]: of rows 0..l as one
        self._owners = np.full(self.capacity, NO_OWNER, np.int64)
        self._born = np.zeros(self.capacity, np.int64)  # num_added with it
        self._has_embedding = np.zeros(self.capacity, np.bool_)
        self._writing = threading.Lock()  # `snapshot` may be another thread's

    # ---- reading ----

    def products(self, layer: int, rows: Floats) -> Floats:
        """[n, size]: `rows` [n, J] times every stored map's row of the layer."""
        return rows @ self._maps[layer, : self.size].T

    def norms(self, layer: int) -> Floats:
        """[size]: length of every stored map's rows 0..layer, taken as one vector; never 0."""
        return self._norms[layer, : self.size]

    def rows(self, entries: Ints, layer: int) -> Floats:
        """[n, J]: the layer's rows of these entries, all of which must be in the store."""
        rows: Floats = self._maps[layer, entries]
        return rows

    def of_owners(self, owners: Ints) -> Bools:
        """[n, size]: which entries each token's owner may see: its own, and the base's."""
        stored = self._owners[None, : self.size]
        is_of: Bools = (stored == owners[:, None]) | (stored == NO_OWNER)
        return is_of

    def cosines_of_embeddings(self, embeddings: Floats) -> Floats:
        """[n, size]: equation 4; 0 where either has no embedding."""
        return unit(embeddings) @ self._embeddings[: self.size].T

    def search_embeddings(self, embeddings: Floats, owners: Ints | None = None) -> Matches:
        """The semantic search (section 4.2.1) of `embeddings` [n, E].

        `owners` [n]: of each token, only this owner's entries and the base's; None: all. An entry
        without an embedding is like nothing.
        """
        allowed = self._has_embedding[None, : self.size]
        if owners is not None:
            allowed = allowed & self.of_owners(owners)
        return nearest(self.cosines_of_embeddings(embeddings), allowed)

    # ---- writing ----

    def add(
        self,
        embeddings: Floats,
        maps: Floats,
        owners: Ints | None = None,
        trajectories: Floats | None = None,
    ) -> None:
        """Keep `maps` [n, L, J] with their `embeddings` [n, E], of length 0 where there is none.

        A full store loses for each new entry one that is like it, or old (replacement.py), never
        one of this batch. Entries with a NaN or an infinity are left out; of more than `capacity`
        the last stay. `owners` [n], NO_OWNER by default. `trajectories` [n, size]: the cosines of
        equation 5 over all layers, of a caller that has them. Raises InvariantError for arrays of
        other shapes.
        """
        owners = np.full(len(maps), NO_OWNER, np.int64) if owners is None else owners
        self._check_shapes(embeddings, maps, owners)
        sound = np.isfinite(maps).all(axis=(1, 2)) & np.isfinite(embeddings).all(axis=1)
        kept = np.flatnonzero(sound)[-self.capacity :]
        if trajectories is not None:
            trajectories = trajectories[kept]
        self._add(unit(embeddings[kept]), maps[kept], owners[kept], trajectories)

    def _check_shapes(self, embeddings: Floats, maps: Floats, owners: Ints) -> None:
        count = len(maps)
        wanted = (
            (count, self.embedding_size),
            (count, self.num_layers, self.num_experts),
            (count,),
        )
        found = (embeddings.shape, maps.shape, owners.shape)
        if found != wanted:
            raise InvariantError(
                f"entries of shapes {found} for a map store that takes {wanted}: they are of "
                "another model"
            )

    def _add(self, units: Floats, maps: Floats, owners: Ints, trajectories: Floats | None) -> None:
        with self._writing:
            self._put(units, maps, owners, trajectories)

    def _put(self, units: Floats, maps: Floats, owners: Ints, trajectories: Floats | None) -> None:
        num_appended = min(self.capacity - self.size, len(maps))
        places = np.arange(self.size, self.size + len(maps))
        if num_appended < len(maps):
            replacing = slice(num_appended, None)
            if trajectories is None:
                trajectories = self.cosines_of_maps(maps)
            semantic = units[replacing] @ self._embeddings[: self.size].T
            places[replacing] = victims(
                redundancy_of(semantic, trajectories[replacing], self.distance / self.num_layers),
                self.ages(),
                self._owners[: self.size],
                owners[replacing],
                self._age_weight,
            )
        self._embeddings[places] = units
        self._has_embedding[places] = units.any(axis=1)
        self._owners[places] = owners
        by_layer = np.swapaxes(maps, 0, 1)  # [L, n, J]
        self._maps[:, places] = by_layer
        squares = np.einsum("lnj,lnj->ln", by_layer, by_layer)
        self._norms[:, places] = np.maximum(np.sqrt(np.cumsum(squares, axis=0)), TINY)
        self.size += num_appended
        self.num_added += len(maps)
        self._born[places] = self.num_added

    def ages(self) -> Floats:
        """[size], in sizes of the store."""
        return ages_of(self._born[: self.size], self.num_added, self.capacity)

    def cosines_of_maps(self, maps: Floats) -> Floats:
        """[n, size]: equation 5 over all layers of `maps` [n, L, J]."""
        search = RunningSearch(self, len(maps))
        for layer in range(self.num_layers):
            search.follow(layer, maps[:, layer])
        return search.cosines()

    # ---- files ----

    def save(self, path: Path) -> None:
        """Write all entries as safetensors, whole or not at all: embeddings, maps, owners, ages.

        Another thread may add meanwhile: it waits while entries are copied, not while they are
        written.
        """
        with self._writing:
            arrays: Arrays = {
                "embeddings": self._embeddings[: self.size].copy(),
                "maps": self._maps[:, : self.size].copy(),
                "owners": self._owners[: self.size].copy(),
                "ages": self.num_added - self._born[: self.size],
            }
        write_arrays(path, arrays, self._about)

    @property
    def _about(self) -> dict[str, str]:
        """What a file says of the model that its maps are of."""
        sizes = f"{self.num_layers} MoE layers of {self.num_experts} experts"
        return {"format": FORMAT, "base": self.base, "sizes": sizes}

    def load(self, path: Path) -> None:
        """Add a file's entries; what does not fit replaces, as in `add`.

        Raises ConfigError for a file that is damaged or of another model.
        """
        check_about(path, self._about, "expert maps", _REMEDY)
        layouts = {
            "embeddings": ("float32", (None, self.embedding_size)),
            "maps": ("float32", (self.num_layers, None, self.num_experts)),
            "owners": ("int64", (None,)),
            "ages": ("int64", (None,)),
        }
        found = read_arrays(path, layouts, _REMEDY)
        units, maps = found["embeddings"], np.swapaxes(found["maps"], 0, 1)
        owners, ages = found["owners"], found["ages"]
        if not len(units) == len(maps) == len(owners) == len(ages) or ages.min(initial=0) < 0:
            raise ConfigError(
                f"{path} has {len(units)} embeddings, {len(maps)} maps, {len(owners)} owners and "
                f"{len(ages)} ages, {ages.min(initial=0)} at least, so it is damaged: {_REMEDY}"
            )
        is_whole = self.size + len(maps) <= self.capacity
        # The oldest first where they do not fit, as they came.
        order = np.arange(len(maps)) if is_whole else np.argsort(-ages, kind="stable")
        step = min(_LOADED_AT_ONCE, self.capacity)
        for first in range(0, len(maps), step):
            some = order[first : first + step]
            # Not `add`: to normalise twice is to lose the last bit.
            self._add(units[some], maps[some], owners[some], None)
        if is_whole:
            loaded = slice(self.size - len(maps), self.size)
            self._born[loaded] = self.num_added - np.minimum(ages, _NO_OLDER)


class RunningSearch:
    """The trajectory search (section 4.2.2) of one step's tokens, kept up layer by layer.

    Each layer adds its products to those of the layers before, so that a search over rows 0..l
    costs n * size * J multiplications whatever l is. It ends when the store changes.
    """

    def __init__(self, store: MapStore, num_tokens: int, owners: Ints | None = None) -> None:
        """`owners` [num_tokens]: as in `search_embeddings`."""
        self._store = store
        self._version = store.num_added
        self._layer = -1  # the last one followed
        self._dots = np.zeros((num_tokens, store.size), np.float32)
        self._squares = np.zeros(num_tokens, np.float32)
        self._allowed = None if owners is None else store.of_owners(owners)

    def follow(self, layer: int, rows: Floats) -> None:
        """`rows` [n, J] of the next layer. Raises InvariantError for another, or a new store."""
        if self._version != self._store.num_added or layer != self._layer + 1:
            raise InvariantError(
                f"a trajectory search stands at MoE layer {self._layer} and is given {layer}, its "
                f"store had {self._version} additions and has {self._store.num_added}: begin anew"
            )
        self._layer = layer
        self._dots += self._store.products(layer, rows)
        self._squares += np.einsum("nj,nj->n", rows, rows)

    def cosines(self) -> Floats:
        """[n, size]: of the layers so far. At least one must have been followed."""
        return self._dots / self._store.norms(self._layer) / self._lengths()[:, None]

    def best(self) -> Matches:
        """The nearest entries by the layers so far. At least one must have been followed."""
        # A token's own length changes no order: it is divided by once, not for each entry.
        found = nearest(self._dots / self._store.norms(self._layer), self._allowed)
        return Matches(found.entries, found.scores / self._lengths())

    def _lengths(self) -> Floats:
        lengths: Floats = np.maximum(np.sqrt(self._squares), TINY)
        return lengths


def nearest(scores: Floats, allowed: Bools | None = None) -> Matches:
    """Each row's largest of `scores` [n, size], of equal ones the first; `allowed`: among these."""
    if not scores.shape[1]:
        return Matches(np.full(len(scores), NO_ENTRY), np.zeros(len(scores), np.float32))
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    entries = scores.argmax(axis=1)
    largest = np.take_along_axis(scores, entries[:, None], axis=1)[:, 0]
    # -inf: nothing is allowed; NaN: the router's own output is not finite.
    is_one = np.isfinite(largest)
    return Matches(np.where(is_one, entries, NO_ENTRY), np.where(is_one, largest, np.float32(0)))
