"""bench/gpu/elastic.py: what is counted of a swap, and how weights are hidden meanwhile."""

from __future__ import annotations

import pytest

from bench.elasticmoe.load import Ask, Stream
from bench.gpu import elastic
from bench.gpu.elastic import Driven, Swap

ASKS = [Ask(f"prompt {number}", None, 4) for number in range(3)]


def stream(ask: Ask, *token_s: float, ids: tuple[int, ...] = (1, 2, 3, 4)) -> Stream:
    return Stream(ask, token_s[0] - 0.5, list(token_s), ids)


def swap(*streams: Stream, killed_s: float = 10.0) -> Swap:
    phases = [{"name": "prepare", "seconds": 0.25}, {"name": "switch", "seconds": 0.5}]
    operation = {"created_s": 1000.125, "gap_s": 0.75, "phases": phases}
    return Swap(killed_s, 1000.0, operation, streams, reachable_bytes=0)


def test_a_pause_ends_with_its_longest_wait_after_the_kill() -> None:
    one = stream(ASKS[0], 9.0, 9.9, 10.1, 11.5, 11.6)  # 10.1 was on its way at the kill
    two = stream(ASKS[1], 9.5, 12.0, 12.1)
    before = stream(ASKS[2], 5.0, 9.0)
    after = stream(ASKS[2], 10.5, 13.0)  # had no token when the engine was killed
    assert elastic.resumed([one, two, before, after], 10.0) == [1.5, 2.0]


def test_phases_are_from_the_kill_on() -> None:
    met = swap(stream(ASKS[0], 9.0, 12.0), stream(ASKS[1], 9.0, 11.0))
    assert met.phases == {"notice": 0.125, "prepare": 0.25, "switch": 0.5, "tokens again": 1.0}


def driven(*after: Stream) -> Driven:
    usual = [stream(ask, 9.0, 12.0) for ask in ASKS]
    other = [*usual[:2], stream(ASKS[2], 1.0, 2.0, ids=(1, 2, 3, 5))]
    return Driven((usual[:1], usual[:1]), (usual, other), [swap(*(after or usual))])


def test_figures_of_all_swaps() -> None:
    found = driven().figures(cold_s=20.0, rounds=3)
    assert found["swap_over_cold_start"]["median"] == 2.0 / 20.0
    assert found["phase_s"]["prepare"]["median"] == 0.25
    assert (found["rounds"], found["rounds_left_out"], found["streams_met"]) == (1, 2, 3)
    assert found["weight_bytes_within_reach"] == 0
    assert found["different"] == {
        "alone": {"streams": 1, "different": 0},
        "without a swap": {"streams": 3, "different": 1},
        "with swaps": {"streams": 3, "different": 0},
    }


def test_a_broken_stream_is_no_result() -> None:
    broken = stream(ASKS[0], 9.0, 12.0)
    broken.error = "2 tokens of 4"
    with pytest.raises(ValueError, match="1 streams broke: 2 tokens of 4"):
        driven(broken).figures(20.0, 1)
    none = Driven(([], []), ([], []), [])
    with pytest.raises(ValueError, match="no swap in the time"):
        none.figures(20.0, 1)
