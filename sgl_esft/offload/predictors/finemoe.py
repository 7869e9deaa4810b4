"""FineMoE's predictor: the most similar earlier step says which experts come.

    StepTokens -> [begin_step] -> semantic search -> layers 0..d-1
    probs of layer l -> [observe] -> trajectory search over layers 0..l -> layer l + d
    [end_step] -> the step's maps enter the store

FineMoE, sections 4.2 and 4.3, with d the prefetch distance. Numbers of a search are float32 and
depend on nothing but the calls so far.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sgl_esft.errors import ConfigError, InvariantError
from sgl_esft.offload.predictors.map_store import NO_ENTRY, MapStore, Matches, RunningSearch
from sgl_esft.offload.predictors.predictor import check_distance, check_order, check_top_k
from sgl_esft.offload.predictors.selection import predictions, rank, reaching, thresholds
from sgl_esft.offload.routing import NO_OWNER, Floats, Ints, Prediction, StepTokens


class FineMoEPredictor:
    """A `Predictor` over an expert map store.

    `top_k`: experts a token is routed to, the fewest that are predicted of a layer. `distance`:
    in layers. `learns`: whether steps enter the store. `by_adapter`: a token is only compared
    with entries of its own adapter (`StepTokens.owners`) and of the base. A step of more than
    `max_batch` tokens is neither predicted for nor learned from: such a batch touches nearly every
    expert.

    Raises ConfigError for a distance or a top_k that the store's model cannot have.
    """

    def __init__(
        self,
        store: MapStore,
        top_k: int,
        distance: int,
        *,
        learns: bool = True,
        by_adapter: bool = False,
        max_batch: int = 8,
    ) -> None:
        check_distance(distance, store.num_layers)
        check_top_k(top_k, store.num_experts)
        self.store = store
        self._top_k = top_k
        self._distance = distance
        self._learns = learns
        self._by_adapter = by_adapter
        self._max_batch = max_batch
        self._step: _Step | None = None

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """Predictions of layers 0..distance-1 by the tokens' embeddings, where there are any.

        Raises ConfigError by adapter, for tokens whose adapters nobody has named.
        """
        num_tokens = len(tokens.request_ids)
        self._step = None
        if not 0 < num_tokens <= self._max_batch:
            return []
        step = self._step = _Step(self.store, tokens.embeddings, self._owners(tokens), num_tokens)
        if tokens.embeddings is None or not self.store.size:
            return []
        matches = self.store.search_embeddings(step.embeddings, step.searched_owners)
        return [
            prediction
            for layer in range(self._distance)
            for prediction in self._guided(layer, matches)
        ]

    def _owners(self, tokens: StepTokens) -> Ints | None:
        if not self._by_adapter:
            return None
        if tokens.owners is None:
            raise ConfigError(
                "--store-by adapter: which adapter was in which slot is not known: record the "
                "trace again, or leave the flag out"
            )
        return np.array(tokens.owners, np.int64)

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Predictions of MoE layer `layer + distance` by layers 0..layer; `probs` [n, J]."""
        step = self._step
        if step is None:
            return []
        step.see(layer, probs)
        target = layer + self._distance
        is_target = target < self.store.num_layers
        if step.search is None or not (is_target or self._is_judged(step)):
            return []
        step.search.follow(layer, step.maps[:, layer])
        return self._guided(target, step.search.best()) if is_target else []

    def _is_judged(self, step: _Step) -> bool:
        """Whether this step's whole trajectories will be needed, to say which entries leave."""
        return self._learns and self.store.size + step.num_tokens > self.store.capacity

    def _guided(self, layer: int, matches: Matches) -> list[Prediction]:
        tokens = np.flatnonzero(matches.entries != NO_ENTRY)
        ranked = rank(self.store.rows(matches.entries[tokens], layer))
        counts = reaching(ranked, thresholds(matches.scores[tokens]), self._top_k)
        return predictions(layer, tokens, ranked, counts)

    wants_hidden = False
    wants_embeddings = True
    is_quick = False

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Nothing: hidden states are not asked for."""
        return []

    def end_step(self) -> None:
        """Keep the step's maps, if all layers were observed."""
        step, self._step = self._step, None
        if step is None or not self._learns or step.num_seen < self.store.num_layers:
            return
        search = step.search if self._is_judged(step) else None
        trajectories = None if search is None else search.cosines()
        self.store.add(step.embeddings, step.maps, step.owners, trajectories)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Nothing is kept by request."""


class _Step:
    """What is known of the step at hand."""

    def __init__(
        self, store: MapStore, embeddings: Floats | None, owners: Ints | None, num_tokens: int
    ) -> None:
        self.num_tokens = num_tokens
        self.num_seen = 0  # layers
        self.maps = np.empty((num_tokens, store.num_layers, store.num_experts), np.float32)
        self.embeddings = np.zeros((num_tokens, store.embedding_size), np.float32)
        if embeddings is not None:
            if embeddings.shape != self.embeddings.shape:
                raise InvariantError(
                    f"embeddings {embeddings.shape} of {num_tokens} tokens, for a map store of "
                    f"embeddings of {store.embedding_size}: they are of another model"
                )
            self.embeddings[:] = embeddings  # copied: the caller's buffer may be used again
        self.searched_owners = owners
        self.owners = np.full(num_tokens, NO_OWNER, np.int64) if owners is None else owners
        self.search = RunningSearch(store, num_tokens, owners) if store.size else None

    def see(self, layer: int, probs: Floats) -> None:
        check_order(layer, self.num_seen, probs, (self.num_tokens, self.maps.shape[2]))
        self.maps[:, layer] = probs
        self.num_seen += 1
