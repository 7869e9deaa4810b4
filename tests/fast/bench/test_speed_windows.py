"""What bench.finemoe.speed predicts is what its windows measure: the same requests and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.finemoe.speed import SpeedBench, long_enough, window_work, workload_of
from sgl_esft.offload.step_work import BASE, DecodedRequest, TracedRequests
from sgl_esft.offload.trace import TraceHeader
from sgl_esft.tools.decode_windows import SPARE_TOKENS, WARM_TOKENS

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
