"""Grammars that take a rank's thread too long end their own requests, on every rank, with a 400."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_esft.plugin import grammar_hooks
from sgl_esft.plugin.grammar_hooks import LEAST_S, MAX_STEP_S


class Clock:
    """Processor time that goes on where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, grammar: object, seconds: float) -> str:
        self.now += seconds
        return "taken"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "thread_time", lambda: clock.now)
    monkeypatch.setattr(grammar_hooks, "_step", grammar_hooks._Step())
    return clock


def request(rid: str, grammar: object) -> Any:
    parameters = SamplingParams(max_new_tokens=4)
    req = Req(rid, "", array("q", [1]), parameters, vocab_size=3)
    req.grammar = grammar
    return req


def rank_of(*reqs: Any) -> Any:
    return SimpleNamespace(collect_inflight_reqs=lambda: set(reqs))


def ended(rank: Any) -> list[str]:
    return sorted(each.rid for each in grammar_hooks.end_slow([], rank))


def test_the_grammar_that_took_the_step_is_aborted(clock: Clock) -> None:
    slow, quick = object(), object()
    rank = rank_of(request("slow", slow), request("quick", quick), request("none", None))
    assert grammar_hooks.timed(clock.spend, slow, MAX_STEP_S) == "taken"
    grammar_hooks.timed(clock.spend, quick, LEAST_S / 2)
    assert ended(rank) == ["slow"]
    assert ended(rank) == [], "the next step has taken nothing"


def test_many_that_are_slow_together_are_aborted(clock: Clock) -> None:
    reqs = [request(str(number), object()) for number in range(30)]
    for req in reqs:
        grammar_hooks.timed(clock.spend, req.grammar, LEAST_S * 1.01)
    assert len(ended(rank_of(*reqs))) == 30


def test_a_step_within_its_time_ends_nobody(clock: Clock) -> None:
    req = request("0", object())
    grammar_hooks.timed(clock.spend, req.grammar, MAX_STEP_S * 0.9)
    assert ended(rank_of(req)) == []
    grammar_hooks.timed(clock.spend, req.grammar, MAX_STEP_S * 0.9)
    assert ended(rank_of(req)) == [], "each step has its own time"


def test_a_grammar_in_another_one_that_raises_is_found(clock: Clock) -> None:
    inner = object()

    def fail(grammar: object) -> None:
        clock.spend(grammar, 1.0)
        raise ValueError("Tokens not accepted")

    with pytest.raises(ValueError, match="not accepted"):
        grammar_hooks.timed(fail, inner)
    reasons_first = SimpleNamespace(grammar=inner)
    assert ended(rank_of(request("0", reasons_first))) == ["0"]


def test_what_ends_already_is_not_aborted_again(clock: Clock) -> None:
    req = request("0", object())
    req.to_finish = FINISH_ABORT("because")
    grammar_hooks.timed(clock.spend, req.grammar, 1.0)
    assert ended(rank_of(req)) == []


def test_sglangs_own_aborts_stay(clock: Clock) -> None:
    req = request("0", object())
    assert grammar_hooks.end_slow(["its own"], rank_of(req)) == ["its own"]
    grammar_hooks.timed(clock.spend, req.grammar, 1.0)
    assert grammar_hooks.end_slow(["its own"], rank_of(req))[0] == "its own"


def test_the_client_is_told_which_error_it_was(clock: Clock) -> None:
    req, other = request("0", object()), request("01", object())
    rank = rank_of(req, other)
    grammar_hooks.timed(clock.spend, req.grammar, 1.0)
    [abort] = grammar_hooks.end_slow([], rank)
    grammar_hooks.blame_grammar(None, rank, abort)
    found = req.to_finish.to_json()
    assert found["status_code"] == 400
    assert found["message"].startswith("GrammarTooSlowError: ")
    assert other.to_finish is None


def test_other_aborts_are_left(clock: Clock) -> None:
    req = request("0", object())
    grammar_hooks.blame_grammar(None, rank_of(req), SimpleNamespace(rid="0", abort_message=None))
    assert req.to_finish is None
