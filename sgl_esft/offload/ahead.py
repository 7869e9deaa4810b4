"""Looking ahead: from what a router said to the loads that are worth starting. Pure.

    StepTokens, embeddings, router distributions -> predictor -> expert ids of each token
        -> its adapter's slots -> decisions.expect -> [Ahead] -> decisions.prefetches

The same calls in the same order by the server's thread (tier.py) and by the simulator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from sgl_esft.offload.decisions import Decisions, Load
from sgl_esft.offload.predictors.predictor import Predictor
from sgl_esft.offload.routing import Floats, Ints, Prediction, StepTokens

# (layer, adapter slot or -1, [n] expert ids) -> [n] virtual slots, -1 for another rank's
SlotsOf = Callable[[int, int, Ints], Ints]

STEPS_UNTIL_ENDED = 64  # that decode, without a request: it has ended, or waits for very long
MAX_TOKENS = 8  # from some more requests on everything is touched (offload_notes, section 5)


class Ahead:
    """One rank's predictor, or only the budget where a policy streams without one."""

    def __init__(
        self, decisions: Decisions, predictor: Predictor | None, slots_of: SlotsOf
    ) -> None:
        self._decisions = decisions
        self._predictor = predictor
        self._slots_of = slots_of
        self._tokens: StepTokens | None = None
        self._has_begun = False
        self._step = 0
        self._last_step: OrderedDict[int, int] = OrderedDict()  # by request, longest ago first

    @property
    def is_on(self) -> bool:
        """Whether the pass at hand is predicted."""
        return self._predictor is not None and self._tokens is not None

    def begin(self, tokens: StepTokens | None) -> None:
        """A forward pass begins."""
        few = tokens is not None and 0 < len(tokens.request_ids) <= MAX_TOKENS
        self._tokens = tokens if few else None
        self._has_begun = False
        if tokens is not None and self._predictor is not None:
            self._predictor.forget(self._ended(tokens.request_ids))

    def _ended(self, request_ids: Sequence[int]) -> list[int]:
        """Requests that were in none of the last passes: nobody says when one has ended."""
        self._step += 1
        for request_id in request_ids:
            self._last_step[request_id] = self._step
            self._last_step.move_to_end(request_id)
        ended = []
        while next(iter(self._last_step.values()), self._step) < self._step - STEPS_UNTIL_ENDED:
            ended.append(self._last_step.popitem(last=False)[0])
        return ended

    def embedded(self, embeddings: Floats | None) -> tuple[Load, ...]:
        """Before the first MoE layer: by the tokens' embeddings, where they are wanted."""
        if self._predictor is None or self._tokens is None:
            return ()
        tokens = replace(self._tokens, embeddings=embeddings)
        self._decisions.recall.watch()
        self._expect(-1, self._predictor.begin_step(tokens))
        self._has_begun = True
        return self._decisions.prefetches(-1)

    @property
    def wants_embeddings(self) -> bool:
        """Whether the pass at hand is predicted by its tokens' embeddings."""
        return self.is_on and self._predictor is not None and self._predictor.wants_embeddings

    def is_quick(self, layer: int) -> bool:
        """Whether to look ahead at this layer takes less than to wake a thread for it.

        At the last one a predictor may learn, which takes what it takes.
        """
        if not self.is_on or self._predictor is None:
            return True
        return self._predictor.is_quick and layer < self._decisions.num_layers - 1

    @property
    def wants_hidden(self) -> bool:
        """Whether the pass at hand is predicted by hidden states."""
        return self.is_on and self._predictor is not None and self._predictor.wants_hidden

    def routed(
        self, layer: int, probs: Floats | None, hidden: Floats | None = None
    ) -> tuple[Load, ...]:
        """While MoE layer `layer` is computed: by what its router said, [num_tokens, J].

        hidden: [num_tokens, H], what the router was given, where it is wanted.
        """
        if self._predictor is not None and self._has_begun and probs is not None:
            self._expect(layer, self._predictor.observe(layer, probs))
            if hidden is not None:
                self._expect(layer, self._predictor.observe_hidden(layer, hidden))
            if layer == self._decisions.num_layers - 1:
                self._predictor.end_step()
        return self._decisions.prefetches(layer)

    def _expect(self, layer: int, predictions: Sequence[Prediction]) -> None:
        """What was said at `layer`, -1 = before the first."""
        assert self._tokens is not None
        for each in predictions:
            adapter_slot = self._tokens.adapter_slots[each.token]
            slots = self._slots_of(each.layer, adapter_slot, each.expert_ids)
            is_ours = slots >= 0
            self._decisions.expect(each.layer, slots[is_ours], each.probs[is_ours])
            self._decisions.recall.named(each.layer, each.layer - layer, slots[is_ours])
