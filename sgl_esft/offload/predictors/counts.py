"""MoE-Infinity's predictor: the most similar earlier request says which experts come.

    probs of layer l -> [observe] -> the request's counts so far -> nearest stored matrix
    -> experts of later layers, worth less the further away; [forget] -> the counts enter the store

MoE-Infinity (arXiv 2401.14361), its expert activation matrices; FineMoE calls this coarse-grained.
Similarity is the cosine of whole matrices, kept up as counts grow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sgl_esft.offload.predictors.map_store import MapStore, entry_bytes, nearest
from sgl_esft.offload.predictors.predictor import check_distance, check_order, check_top_k
from sgl_esft.offload.predictors.selection import most_likely, rank
from sgl_esft.offload.routing import Floats, Prediction, StepTokens

_ALL_STORED = 256  # matrices; MoE-Infinity keeps some hundreds


class RequestCountsPredictor:
    """A `Predictor` by request.

    A token's experts are taken to be the `top_k` most probable. `reach`: how many layers ahead are
    predicted, all by default. `max_requests`: matrices kept; when full, a new one replaces the one
    most like it. `Prediction.probs` are shares of the stored row's counts times
    1 - distance / (L + 1), so that they order experts of several layers, and are no distribution.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        *,
        reach: int | None = None,
        max_requests: int = _ALL_STORED,
    ) -> None:
        check_top_k(top_k, num_experts)
        self._reach = num_layers if reach is None else reach
        check_distance(self._reach, num_layers)
        self._top_k = top_k
        # Without embeddings, redundancy is the cosine of two matrices and nothing else.
        max_bytes = max_requests * entry_bytes(num_layers, num_experts, 0)
        self._store = MapStore(num_layers, num_experts, 0, 1, max_bytes)
        self._counts: dict[int, Floats] = {}  # request id -> [L, J]
        self._request_ids: tuple[int, ...] = ()
        self._reset((), np.zeros((0, num_layers, num_experts), np.float32))

    def _reset(self, request_ids: tuple[int, ...], counts: Floats) -> None:
        """Begin with these tokens' counts [n, L, J]."""
        self._request_ids, self._now, self._num_seen = request_ids, counts, 0
        self._dots = np.zeros((len(counts), self._store.size), np.float32)
        for layer in range(self._store.num_layers):
            self._dots += self._store.products(layer, counts[:, layer])

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        """Predictions of the first layers, for requests of which a step was seen before."""
        store = self._store
        empty = np.zeros((store.num_layers, store.num_experts), np.float32)
        known = [self._counts.get(request, empty) for request in tokens.request_ids]
        # An idle rank has steps without tokens; np.stack would refuse them.
        self._reset(tokens.request_ids, np.array(known, np.float32).reshape(-1, *empty.shape))
        return self._predict(-1)

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        """Predictions of layers layer+1..layer+reach; `probs` [n, J]."""
        check_order(layer, self._num_seen, probs, (len(self._now), self._store.num_experts))
        self._num_seen += 1
        chosen = rank(probs).expert_ids[:, : self._top_k]
        added = np.zeros(probs.shape, np.float32)
        np.put_along_axis(added, chosen, np.float32(1), axis=1)
        self._now[:, layer] += added
        self._dots += self._store.products(layer, added)
        return self._predict(layer)

    def _predict(self, layer: int) -> list[Prediction]:
        """Of the layers after `layer`; -1 = before the first one."""
        store, num_layers = self._store, self._store.num_layers
        if not store.size:
            return []
        # Short of each request's own length, which changes no order.
        matches = nearest(self._dots / store.norms(num_layers - 1))
        tokens = np.flatnonzero(matches.scores > 0)  # 0: nothing in common, or no counts yet
        found = []
        for target in range(layer + 1, min(layer + self._reach, num_layers - 1) + 1):
            rows = store.rows(matches.entries[tokens], target)
            shares = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1)
            decay = np.float32(1 - (target - layer) / (num_layers + 1))
            found += most_likely(target, tokens, shares * decay, self._top_k)
        return found

    wants_hidden = False
    wants_embeddings = False
    is_quick = False

    def observe_hidden(self, layer: int, hidden: Floats) -> list[Prediction]:
        """Nothing: hidden states are not asked for."""
        return []

    def end_step(self) -> None:
        """The step's experts belong to its requests from now on; nothing the second time."""
        if self._request_ids and self._num_seen == self._store.num_layers:
            self._counts.update(zip(self._request_ids, self._now, strict=True))
        self._request_ids = ()

    def forget(self, request_ids: Iterable[int]) -> None:
        """The requests' matrices enter the store, for the requests to come."""
        self.end_step()  # theirs may be the step at hand, and would come back with it
        known = [self._counts.pop(request) for request in request_ids if request in self._counts]
        if known:
            self.remember(np.stack(known))

    def remember(self, matrices: Floats) -> None:
        """Keep the counts [n, L, J] of requests that have ended; between two steps."""
        no_embeddings = np.zeros((len(matrices), 0), np.float32)
        self._store.add(no_embeddings, matrices.astype(np.float32))
