"""What bench.finemoe.speed predicts is what its windows measure: the same requests and tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bench.finemoe.reference import Reference, TimedWindows, at_usual_speed, usual_s
from bench.finemoe.speed import (
    GridPoint,
    SpeedBench,
    SpeedRounds,
    SpeedServer,
    asks_of,
    in_turns,
    long_enough,
    rows_of,
    window_work,
    workload_of,
)
from sgl_esft.offload.speed import SpeedPoint, StepCosts
from sgl_esft.offload.step_work import BASE, DecodedRequest, TracedRequests
from sgl_esft.offload.trace import TraceHeader
from sgl_esft.tools.decode_windows import SPARE_TOKENS, WARM_TOKENS, DecodeAsk

BENCH = SpeedBench(num_tokens=WARM_TOKENS + SPARE_TOKENS + 6)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2
HEADER = TraceHeader(
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    num_base=NUM_EXPERTS,
    num_slots=2 * NUM_EXPERTS,
    top_k=TOP_K,
    embedding_size=4,
)
MAPS = np.broadcast_to(
    np.stack([np.arange(NUM_EXPERTS) + NUM_EXPERTS, np.arange(NUM_EXPERTS)]),
    (NUM_LAYERS, 2, NUM_EXPERTS),
).copy()


def request(adapter_slot: int, first: int, then: int) -> DecodedRequest:
    """Experts `first` and the next one while windows have not begun, `then` and the next after."""
    ids = np.empty((BENCH.window_end, NUM_LAYERS, TOP_K), dtype=np.int64)
    ids[:WARM_TOKENS] = first, first + 1
    ids[WARM_TOKENS:] = then, then + 1
    return DecodedRequest(adapter_slot, ids)


def traced(*requests: DecodedRequest) -> TracedRequests:
    return TracedRequests(HEADER, MAPS, requests)


def test_only_the_windows_tokens_are_counted() -> None:
    """Two rows: what a window asks for is read at its first token, and stays."""
    work = window_work(traced(request(BASE, 0, 4)), 1, TOP_K, BENCH)
    num_counted = BENCH.window_end - WARM_TOKENS
    assert work.num_needed == NUM_LAYERS * TOP_K
    assert work.num_loads == pytest.approx(NUM_LAYERS * TOP_K / num_counted)
    same = window_work(traced(request(BASE, 4, 4)), 1, TOP_K, BENCH)
    assert same.num_loads == 0, "what the first tokens read is read by then"


def test_requests_begin_together() -> None:
    pair = traced(request(BASE, 0, 4), request(0, 0, 4))
    work = window_work(pair, 2, 4 * TOP_K, BENCH)
    assert work.num_tokens == 2
    assert work.num_needed == 2 * NUM_LAYERS * TOP_K, "the adapter's experts are others"


def test_workloads_are_told_apart() -> None:
    base = [request(BASE, n, 4) for n in range(4)]
    mixed = [request(BASE, 5, 4), request(0, 0, 4), request(BASE, 6, 4), request(0, 1, 4)]
    every = traced(*base, *mixed)
    assert workload_of(every, False).requests == tuple(base)
    assert set(map(id, workload_of(every, True).requests)) == set(map(id, mixed))


def test_short_requests_are_left_out() -> None:
    whole = request(BASE, 0, 4)
    short = replace(whole, topk_ids=whole.topk_ids[:-1])
    assert long_enough(traced(short, whole), BENCH).requests == (whole,)


# ---- what windows ask ----


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_windows_ask_each_request_about_as_often(batch: int) -> None:
    bench = replace(BENCH, num_requests=24, rounds=4)
    every = [DecodeAsk(f"{number}") for number in range(bench.num_requests)]
    rounds = asks_of(every, GridPoint(SpeedServer(0.5, 0.3), batch, False), bench)
    assert len(rounds) == bench.rounds
    assert {len(asks) for windows in rounds for asks in windows} == {batch}
    asked = Counter(ask.text for windows in rounds for asks in windows for ask in asks)
    assert set(asked) == {ask.text for ask in every}
    assert max(asked.values()) - min(asked.values()) <= 1


def test_a_replay_has_each_request_in_other_company() -> None:
    """What two requests read together depends on which two they are."""
    requests = [request(BASE, 4 * (n % 2), 4 * (n % 2)) for n in range(4)]
    work = window_work(traced(*requests), 2, 2 * TOP_K, BENCH)
    # Two of them are alike or not: in one order alone all pairs would be, or a half, or none.
    share_unlike = float(work.layers[work.needed == 4.0].sum() / work.layers.sum())
    assert share_unlike not in (0.0, 0.5, 1.0)


def test_groups_of_adapters_and_the_base_are_mixed_alike() -> None:
    asks = [DecodeAsk(f"{n}", (None, "law", "math")[n % 3]) for n in range(12)]
    turn = in_turns(asks, lambda ask: ask.adapter, random.Random(1))
    groups = [[next(turn) for _ in range(3)] for _ in range(8)]
    assert all({ask.adapter for ask in group} == {None, "law", "math"} for group in groups)
    texts = [tuple(ask.text for ask in group) for group in groups]
    assert sorted(t for group in texts[:4] for t in group) == sorted(ask.text for ask in asks)
    assert texts[:4] != texts[4:], "again in another order"


# ---- the machine's drift ----


def window(step_s: float, stall_s: float = 0.0, num_tokens: int = 1) -> SpeedPoint:
    return SpeedPoint(num_tokens, 4, 3, False, step_s, stall_s, 6.0, 1.0 if stall_s else 0.0, 0.0)


def test_computing_beside_a_slow_reference_counts_as_at_usual_speed() -> None:
    reference_s = iter([9.0, 1.0, 1.0, 2.0, 2.0])  # the first one warms it; it slows down then
    reference = Reference(lambda: window(next(reference_s)))
    fast = reference.beside(lambda: [window(3.0, 1.0)])
    between = reference.beside(lambda: [window(4.0, 1.0)])
    slow = reference.beside(lambda: [window(5.0, 1.0)])
    assert [each.compute_s for each in (fast, between, slow)] == [1.0, 1.5, 2.0]
    usual = usual_s([fast, between, slow])
    assert usual == 1.5
    for each in (fast, between, slow):
        (found,) = at_usual_speed(each, usual)
        assert found.step_s == pytest.approx(4.0), "what is waited for takes as long"
        assert found.stall_s == 1.0


def _drifting(costs: StepCosts) -> Iterator[TimedWindows]:
    """A machine that is half as fast in every second window, all of it computing."""
    for number, batch in enumerate((1, 2, 4, 8) * 3):
        slow = 1 + number // 4 % 2
        step_s = slow * costs.compute_s(window(1.0, num_tokens=batch).work())
        yield TimedWindows((window(step_s, num_tokens=batch),), float(slow))


def test_drift_is_no_error() -> None:
    """Calibrated mostly on the fast machine, served on the slow one."""
    costs = StepCosts(1.0, 0.5, 0.0, 0.0, 0.0, None, 0.0, 0.0)
    point = GridPoint(SpeedServer(0.5, 0.3), 3, False)
    work = window(1.0, num_tokens=3).work()
    served = TimedWindows((window(2 * costs.compute_s(work), num_tokens=3),), 2.0)
    so = SpeedRounds(list(_drifting(costs)), {point: [served]})
    (right,) = rows_of(so, {point: work}, {0.3: 1}, so.usual_s())
    assert right["error"] == pytest.approx(0.0, abs=1e-6)
    (as_it_was,) = rows_of(so, {point: work}, {0.3: 1}, None)
    assert as_it_was["error"] > 0.5
