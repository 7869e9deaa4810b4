"""The simulation of batches: its count of experts, and what its policies may and may not do."""

from __future__ import annotations

import numpy as np
import pytest

from bench.expertweave import batching
from bench.expertweave.batching import ROUTINGS, Engine, Workload
from bench.expertweave.batching_served import Answer, mean_adapters
from bench.expertweave.floor import expected_touched

SMALL = Workload("uniform", 8, 1.3, mean_steps=10, num_turnovers=30, seed=1)


def composition(**tokens: int) -> np.ndarray:
    """Tokens of each owner: `o3=2` gives owner 3 two."""
    found = np.zeros(1 + batching.NUM_ADAPTERS, dtype=np.int64)
    for owner, number in tokens.items():
        found[int(owner[1:])] = number
    return found


MIXED = composition(o0=3, o1=10, o2=1, o7=20, o20=4)


@pytest.mark.parametrize("experts", ROUTINGS)
def test_expected_experts_are_the_floors(experts: str) -> None:
    """The floor's formula, a layer at a time."""
    routing = ROUTINGS[experts]()
    layers = [
        expected_touched(
            [np.flatnonzero(row).tolist() for row in routing.is_tuned[1:, layer]],
            MIXED,
            num_experts=batching.NUM_EXPERTS,
            top_k=batching.TOP_K,
            selection=routing.selection[:, layer],
        )
        for layer in range(routing.is_tuned.shape[1])
    ]
    assert routing.expected_touched(MIXED) == pytest.approx(np.mean(layers))


def test_no_overtakes_is_first_come_first_served() -> None:
    engine = Engine(batching.make_trace(SMALL), SMALL.max_running, 0)
    for now in range(600):
        engine.step(now)
    starts = [engine.admitted_at[n] for n in sorted(engine.admitted_at)]
    assert starts == sorted(starts)
    assert len(starts) == len(engine.trace.arrivals)


def test_more_overtakes_leave_fewer_adapters_and_experts() -> None:
    routing = ROUTINGS["published"]()
    runs = [batching.simulate(SMALL, routing, bound) for bound in (0, 8, 64)]
    assert runs[0].adapters > runs[1].adapters > runs[2].adapters
    assert runs[0].experts > runs[1].experts > runs[2].experts
    assert [run.most_overtakes for run in runs[:2]] == [0, 8]


def test_adapters_that_run_at_once_are_counted_by_time() -> None:
    """From 1, when the first answer ends, to 3, when the last is asked for."""
    answers = [
        Answer("a", 0, 0.5, 1),
        Answer("a", 0, 1, 2),
        Answer("b", 0, 0.5, 3),
        Answer(None, 3, 3, 9),
    ]
    assert mean_adapters(answers) == pytest.approx(1.5, abs=0.01)
