"""What is asked of a predictor, when, and by which slots its answers are meant."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sgl_esft.offload.ahead import MAX_TOKENS, STEPS_UNTIL_ENDED, Ahead
from sgl_esft.offload.decisions import Decisions
from sgl_esft.offload.policies import POLICIES
from sgl_esft.offload.routing import Floats, Ints, Prediction, StepTokens

ONE = np.zeros((1, 4), np.float32)


class Told:
    """A predictor that says the same every time and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.forgotten: list[int] = []

    def begin_step(self, tokens: StepTokens) -> list[Prediction]:
        self.calls.append(("begin", tokens.request_ids))
        return []

    def observe(self, layer: int, probs: Floats) -> list[Prediction]:
        self.calls.append(layer)
        if layer + 1 > 2:
            return []
        ids = np.array([1, 3], np.int64)
        return [Prediction(layer + 1, 0, ids, np.array([0.6, 0.2], np.float32))]

    def end_step(self) -> None:
        self.calls.append("end")

    def forget(self, request_ids: Iterable[int]) -> None:
        self.forgotten += request_ids


def make(slots_of: object = lambda layer, adapter_slot, ids: ids) -> tuple[Ahead, Told, Decisions]:
    decisions = Decisions(3, 12, 6, POLICIES["finemoe"], num_base=8, loads_per_layer=2.0)
    told = Told()
    return Ahead(decisions, told, slots_of), told, decisions  # type: ignore[arg-type]


def test_a_step_is_begun_followed_and_ended() -> None:
    ahead, told, _ = make()
    ahead.begin(StepTokens((5,), (-1,)))
    ahead.embedded(ONE)
    for layer in range(3):
        ahead.routed(layer, np.ones((1, 8), np.float32))
    assert told.calls == [("begin", (5,)), 0, 1, 2, "end"]


def test_predictions_are_of_the_adapters_slots_that_this_rank_has() -> None:
    def slots_of(layer: int, adapter_slot: int, ids: Ints) -> Ints:
        assert adapter_slot == 2
        return np.where(ids == 1, 9, -1)

    ahead, _, decisions = make(slots_of)
    ahead.begin(StepTokens((5,), (2,)))
    ahead.embedded(ONE)
    loads = ahead.routed(0, np.ones((1, 8), np.float32))
    assert [(load.layer, load.slot) for load in loads] == [(1, 9)]
    assert decisions.where(1)[9] >= 0


def test_large_batches_and_prompts_are_not_predicted_for() -> None:
    ahead, told, _ = make()
    many = tuple(range(MAX_TOKENS + 1))
    for tokens in (None, StepTokens(many, many)):
        ahead.begin(tokens)
        assert not ahead.is_on
        assert ahead.embedded(ONE) == ()
        assert ahead.routed(0, None) == ()
    assert told.calls == []


def test_requests_that_were_not_seen_for_long_are_forgotten_once() -> None:
    ahead, told, _ = make()
    ahead.begin(StepTokens((5, 6), (-1, -1)))
    for _ in range(STEPS_UNTIL_ENDED):
        ahead.begin(StepTokens((6,), (-1,)))
    assert told.forgotten == []
    for _ in range(3):
        ahead.begin(StepTokens((6,), (-1,)))
    assert told.forgotten == [5]
