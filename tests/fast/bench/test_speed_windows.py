"""What bench.finemoe.speed predicts is what its windows measure: the same requests and tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.finemoe.reference import Reference, TimedWindows, at_usual_speed, usual_s
from bench.finemoe.speed import SpeedRounds, rows_of, tokens_per_s
from bench.finemoe.speed_plan import (
    GridPoint,
    Recorded,
    SpeedBench,
    SpeedServer,
    mixed_order,
    round_of,
    works_of,
)
from sgl_esft.offload.speed import SpeedPoint, StepCosts
from sgl_esft.offload.step_work import BASE, DecodedRequest, step_of
from sgl_esft.offload.trace import SlotChange, TraceEvent, TraceHeader
from sgl_esft.tools.decode_windows import SPARE_TOKENS, WARM_TOKENS

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_KINDS = 2, 8, 2, 2
BENCH = SpeedBench(
    num_tokens=WARM_TOKENS + SPARE_TOKENS + 6,
    grid=(SpeedServer(TOP_K / NUM_EXPERTS, 0.3),),
    grid_batches=(1,),
    rounds=1,
    num_requests=2,
)
NUM_COUNTED = BENCH.window_end - WARM_TOKENS
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


def request(
    adapter_slot: int, first: int, then: int, num_tokens: int = BENCH.window_end
) -> DecodedRequest:
    """Experts `first` and the next one while windows have not begun, `then` and the next after."""
    ids = np.empty((num_tokens, NUM_LAYERS, TOP_K), dtype=np.int64)
    ids[:WARM_TOKENS] = first, first + 1
    ids[WARM_TOKENS:] = then, then + 1
    return DecodedRequest(adapter_slot, ids)


def events_of(requests: Sequence[DecodedRequest], prompt: Sequence[int] | None) -> list[TraceEvent]:
    """As a server records them one after the other; each prompt asks for experts `prompt`, or for
    those of the request's first token.
    """
    events: list[TraceEvent] = [SlotChange(MAPS)]
    for number, each in enumerate(requests):
        tokens = [(each.adapter_slot, ids) for ids in each.topk_ids]
        ids = np.broadcast_to(prompt or each.topk_ids[0, 0], (NUM_LAYERS, TOP_K))
        asked = replace(step_of(HEADER, [(each.adapter_slot, ids)]), request_ids=())
        decoded = [replace(step_of(HEADER, [token]), request_ids=(number,)) for token in tokens]
        events += [asked, *decoded]
    return events


def recorded(
    *requests: DecodedRequest, bench: SpeedBench = BENCH, prompt: Sequence[int] | None = None
) -> Recorded:
    return Recorded.of(HEADER, events_of(requests, prompt), bench)


ALIKE = [request(BASE, 4, 4)] * 2


# ---- what is predicted ----


def test_only_the_windows_tokens_are_counted() -> None:
    """Two rows: what a window asks for is read at its first token, and stays."""
    works = works_of(recorded(*[request(BASE, 0, 4)] * 2, *ALIKE), BENCH, NUM_KINDS)
    base = works[GridPoint(BENCH.grid[0], 1, False)]
    assert base.num_tokens == 1
    assert base.num_needed == NUM_LAYERS * TOP_K
    assert base.num_loads == pytest.approx(NUM_LAYERS * TOP_K / NUM_COUNTED)
    mixed = works[GridPoint(BENCH.grid[0], 1, True)]
    assert mixed.num_loads == 0, "what the first tokens read is read by then"


def test_what_fills_the_rows_is_not_counted() -> None:
    """The first of the mixed requests does, which reads in its window; the other one does not."""
    found = recorded(*ALIKE, request(BASE, 0, 4), request(BASE, 4, 4))
    mixed = works_of(found, BENCH, NUM_KINDS)[GridPoint(BENCH.grid[0], 1, True)]
    assert mixed.num_loads == pytest.approx(NUM_LAYERS * TOP_K / (2 * NUM_COUNTED))


def test_requests_begin_together() -> None:
    bench = replace(BENCH, grid_batches=(2,))
    found = recorded(*ALIKE, request(BASE, 0, 4), request(0, 0, 4), bench=bench)
    work = works_of(found, bench, NUM_KINDS)[GridPoint(bench.grid[0], 2, True)]
    assert work.num_tokens == 2
    assert work.num_needed == 2 * NUM_LAYERS * TOP_K, "the adapter's experts are others"


def test_what_a_server_was_asked_before_counts() -> None:
    """Rows for four: those of the base's windows are there still, unless others come between."""
    roomy = SpeedServer(2 * TOP_K / NUM_EXPERTS, 0.3)
    bench = replace(BENCH, grid=(roomy,), rounds=2, num_requests=2)
    same = works_of(recorded(*ALIKE, *ALIKE, bench=bench), bench, NUM_KINDS)
    assert same[GridPoint(roomy, 1, False)].num_loads == 0
    others = [request(0, 0, 2), request(0, 4, 6)]
    between = works_of(recorded(*[request(BASE, 0, 4)] * 2, *others, bench=bench), bench, NUM_KINDS)
    assert between[GridPoint(roomy, 1, False)].num_loads > 0


def test_prompts_go_through_the_rows() -> None:
    """What a window asks for first is there in the second round, where its prompt asked for it."""
    roomy = SpeedServer(5 / NUM_EXPERTS, 0.3)
    bench, point = replace(BENCH, grid=(roomy,), rounds=2), GridPoint(roomy, 1, False)
    requests = [request(BASE, 0, 4), request(0, 4, 4)]
    same, others = (
        recorded(*(each for each in requests for _ in range(2)), bench=bench, prompt=prompt)
        for prompt in ((4, 5), (6, 7))
    )
    read = works_of(others, bench, NUM_KINDS)[point].num_loads
    assert works_of(same, bench, NUM_KINDS)[point].num_loads == pytest.approx(read / 2)
    assert read > 0


def test_what_was_asked_is_what_was_recorded() -> None:
    short = request(BASE, 0, 4, BENCH.window_end - 1)
    base, mixed = [request(BASE, n, 4) for n in (0, 1)], [request(BASE, 2, 4), request(0, 3, 4)]
    found = recorded(short, *base, short, *mixed)
    of_base, of_both = ([r.decoded for r in each] for each in found.requests.values())
    for got, asked in zip([*of_base, *of_both], [*base, *mixed], strict=True):
        assert got.adapter_slot == asked.adapter_slot
        np.testing.assert_array_equal(got.topk_ids, asked.topk_ids)
    with pytest.raises(ValueError, match="3 requests were recorded, of 4 that were asked"):
        recorded(*base, mixed[0], short)


# ---- what windows ask ----


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 6])
def test_windows_ask_each_request_about_as_often(batch: int, with_adapters: bool) -> None:
    bench = SpeedBench(num_requests=12, rounds=4)
    point = GridPoint(bench.grid[0], batch, with_adapters)
    every = [w for number in range(4) for w in round_of(point.server, number, bench, 3)]
    groups = [g for w in every if w.is_measured and w.point == point for g in w.groups]
    assert {len(group) for group in groups} == {batch}
    asked = Counter(number for group in groups for number in group)
    assert set(asked) == set(range(12))
    assert max(asked.values()) - min(asked.values()) <= 1


def test_rounds_go_forth_and_back_and_rows_are_filled_first() -> None:
    bench, server = SpeedBench(), SpeedBench.grid[0]
    forth, back = (round_of(server, number, bench, 3) for number in (0, 1))
    assert [w.is_measured for w in forth] == [False] + [True] * 6
    assert [w.point for w in back[1:]] == [w.point for w in forth[1:]][::-1]
    assert [w.point for w in forth[1:]] == bench.points(server)


def test_groups_of_adapters_and_the_base_are_mixed_alike() -> None:
    turn = mixed_order(12, 3, random.Random(1))
    groups = [[next(turn) for _ in range(3)] for _ in range(8)]
    assert all({number % 3 for number in group} == {0, 1, 2} for group in groups)
    assert sorted(n for group in groups[:4] for n in group) == list(range(12))
    assert groups[:4] != groups[4:], "again in another order"


def test_the_speed_is_that_of_an_average_step() -> None:
    """Half the windows read nothing: a median would say that none does."""
    assert tokens_per_s([window(1.0), window(1.0), window(4.0, 3.0)]) == pytest.approx(0.5)


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
