"""The load test's own parts: a check that cannot fail would prove nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.record import RESULTS
from bench.common.recorded_client import Request, noting_errors, read_requests, record_of
from bench.elasticmoe.traffic import Served
from bench.soak import lifecycle_checks as checks
from bench.soak import turns
from bench.soak.lifecycle_load import MOST_GROWTH, verdict
from bench.soak.lifecycle_operator import Done, History, Operation
from bench.soak.lifecycle_versions import Versions, clear_texts

LIVE = {name: Versions(name, name, f"{name}.v2") for name in ("a", "b", "c")}
TEXTS = {("a", "p"): "old", ("a.v2", "p"): "new", ("b", "p"): "other", ("b.v2", "p"): "fourth"}


def request(began_s: float, *token_s: float, adapter: str = "a", text: str = "old") -> Request:
    ended_s = token_s[-1] if token_s else began_s + 1.0
    return Request(adapter, "p", began_s, ended_s, token_s, text, "" if token_s else "HTTP 500")


def done(kind: Any, name: str, folder: str, sent_s: float, returned_s: float) -> Done:
    return Done(Operation(kind, name, folder), sent_s, returned_s, 200, "")


@pytest.mark.parametrize(
    ("began_s", "first_token_s", "allowed"),
    [
        (1.0, 9.0, {"a"}),  # it had begun before the change was asked for
        (1.0, 10.5, {"a", "a.v2"}),
        (10.5, 10.9, {"a", "a.v2"}),
        (10.5, 14.0, {"a", "a.v2"}),
        (12.0, 14.0, {"a.v2"}),  # asked for after the change had returned
    ],
)
def test_versions_an_answer_may_be_of(
    began_s: float, first_token_s: float, allowed: set[str]
) -> None:
    history = History.of(LIVE, [done("replace", "a", "a.v2", 10.0, 11.0)])
    assert history.allowed("a", began_s, first_token_s) == allowed
    assert history.allowed("b", began_s, first_token_s) == {"b"}


def test_a_wrong_answer_is_found_and_said_whose_it_is() -> None:
    history = History.of(LIVE, [done("replace", "a", "a.v2", 10.0, 11.0)])
    stale = request(12.0, 13.0)
    fresh = replace(stale, text="new")
    foreign = replace(stale, text="other")
    assert checks.wrong_answers([fresh], history, TEXTS) == []
    found = checks.wrong_answers([stale, foreign, fresh], history, TEXTS)
    assert [(wrong.request, wrong.allowed, wrong.of) for wrong in found] == [
        (stale, ("a.v2",), ("a",)),
        (foreign, ("a.v2",), ("b",)),
    ]


def test_only_a_named_limit_excuses_a_failure() -> None:
    failed = request(0.0)
    limited = replace(failed, error='Service Unavailable: {"type": "NoFreeSlotError"}')
    history = History.of(LIVE, [])
    assert checks.failures([request(0.0, 1.0), failed, limited], history) == [failed]


@pytest.mark.parametrize(
    ("began_s", "count"), [(5.0, 1), (9.5, 0), (10.5, 0), (11.5, 0), (12.5, 1)]
)
def test_an_unloaded_adapter_is_unknown_until_it_is_loaded(began_s: float, count: int) -> None:
    history = History.of(
        LIVE,
        [done("unload_live", "a", "a", 10.0, 11.0), done("load_live", "a", "a.v2", 11.5, 12.0)],
    )
    unknown = replace(request(began_s), error='Not Found: {"type": "UnknownAdapterError"}')
    assert len(checks.failures([unknown], history)) == count
    assert checks.failures([replace(unknown, error="HTTP 500")], history)
    assert checks.failures([replace(unknown, adapter="b")], history)
    assert history.allowed("a", 13.0, 14.0) == {"a.v2"}


def steady(gap_s: float, begin_s: float, end_s: float) -> Request:
    count = int((end_s - begin_s) / gap_s)
    return request(begin_s, *(begin_s + i * gap_s for i in range(count + 1)))


def test_gaps_are_those_that_overlap() -> None:
    gaps = checks.gaps_of([request(0.0, 1.0, 2.0, 5.0, 6.0)])
    assert checks.gaps_during(gaps, [checks.Span(2.5, 3.0)]) == [3.0]
    assert checks.gaps_during(gaps, [checks.Span(5.5, 9.0)]) == [1.0]
    assert checks.gaps_during(gaps, [checks.Span(7.0, 9.0)]) == []


@pytest.mark.parametrize(("slow_s", "ratio"), [(0.02, 1.0), (0.1, 5.0)])
def test_pace_compares_loads_with_the_same_spans_without(slow_s: float, ratio: float) -> None:
    """Gaps of 20 ms, and in the busy window of `slow_s` while something loads."""
    busy = checks.Span(0.0, 10.0)
    streams = [
        steady(slow_s, 1.0, 3.0), steady(0.02, 3.0, 10.0), steady(0.02, 10.0, 20.0)
    ]  # fmt: skip
    found = checks.pace(streams, [done("load", "x", "", 1.0, 3.0)], [busy])
    assert found.loads_over_none == pytest.approx(ratio)
    assert len(found.busy_over_quiet) == 1
    pinned = [done("pin", "a", "", 1.0, 3.0), done("load", "x", "", 4.0, 5.0)]
    assert checks.pace(streams, pinned, [busy]).loads_over_none == pytest.approx(1.0)


def test_overtakes_count_who_came_later_and_began_earlier() -> None:
    late = request(0.0, 10.0)
    others = [request(1.0, 2.0), request(3.0, 4.0), request(5.0, 11.0), request(0.5)]
    assert checks.overtakes([late, *others]) == [2, 0, 0, 0]


def test_growth_sees_a_leak_and_not_the_warm_up() -> None:
    warm = [100.0 + 10 * i for i in range(30)]
    alike = [5] * 100
    assert checks.growth([*warm, *[400.0] * 70], alike).share == 0.0
    leak = checks.growth([*warm, *[400.0 + i for i in range(70)]], alike)
    assert leak.share == pytest.approx(56 / 406, abs=0.01)


def test_a_server_that_ends_larger_did_not_leak() -> None:
    """One rank and two by turns, and an odd number of scales."""
    ranks = [1 + i // 20 % 2 for i in range(100)][::-1]
    held = [400.0 * each for each in ranks]
    assert checks.growth(held, ranks, warm_up=0.0).share == 0.0
    leaking = [value + i for i, value in enumerate(held)]
    assert checks.growth(leaking, ranks, warm_up=0.0).share > 0.1


def test_processes_that_scales_leave_behind_are_seen() -> None:
    ranks = [1 + i // 20 % 2 for i in range(100)]
    assert checks.process_growth(ranks, warm_up=0.0).share == 0.0
    left = [each + i // 40 for i, each in enumerate(ranks)]
    assert checks.process_growth(left, warm_up=0.0).share > 0.0


ASKED = SimpleNamespace(lora_name="a", prompt="p")


def output(**fields: Any) -> SimpleNamespace:
    found = {"success": True, "error": "", "ttft": 1.0, "itl": [0.5, 0.25], "generated_text": "t"}
    return SimpleNamespace(**{**found, **fields})


def test_a_record_says_when_each_token_came(tmp_path: Path) -> None:
    record = record_of(ASKED, output(), 10.0, 12.0)
    assert record == Request("a", "p", 10.0, 12.0, (11.0, 11.5, 11.75), "t", "")
    path = tmp_path / "records"
    path.write_text(json.dumps(vars(record)) + "\n")
    assert read_requests(path) == [record]
    path.write_text('{"adapter": "a"}\n')
    with pytest.raises(ValueError, match="not a record"):
        read_requests(path)


def test_an_error_inside_a_stream_or_an_answer_without_text_is_a_failure() -> None:
    events, answer = [], output(ttft=0.0, itl=[])
    note = noting_errors(lambda data, output: events.append(data))
    note({"text": ""}, answer)
    assert not answer.error
    note({"error": {"message": "UnknownAdapterError: adapter 'a' is not loaded"}}, answer)
    assert len(events) == 2
    assert "UnknownAdapterError" in record_of(ASKED, answer, 0.0, 1.0).error
    assert record_of(ASKED, output(ttft=0.0, itl=[]), 0.0, 1.0).error == "an answer without text"
    assert record_of(ASKED, output(success=False, error="why", ttft=0.0), 0.0, 1.0).error == "why"
    assert record_of(ASKED, output(success=False, error="", ttft=0.0), 0.0, 1.0).error


def test_turns_are_compared_with_their_neighbours() -> None:
    """20 ms between tokens in the first span, 10 ms in the second, and so on."""
    spans = [
        steady(0.02 if span % 2 == 0 else 0.01, 8.0 * span, 8.0 * span + 8) for span in range(5)
    ]
    ratios = checks.turn_ratios(spans, 8.0, 1.0)
    assert ratios == pytest.approx([0.5, 0.5], rel=0.02)


def test_a_prompt_on_which_any_model_ties_is_left_out() -> None:
    def answer(gap: float) -> dict[str, Any]:
        return {"text": "t", "meta_info": {"output_top_logprobs": [[[-1.0], [-1.0 - gap]]]}}

    found = {"a": [answer(1.0), answer(1.0)], "b": [answer(1.0), answer(0.0)]}
    assert clear_texts(["p", "q"], found) == {("a", "p"): "t", ("b", "p"): "t"}


def test_the_verdict_names_what_is_wrong() -> None:
    row = json.loads((RESULTS / "lifecycle_load.json").read_text())["rows"][0]
    good = {**row, "memory": {key: {"early": 100.0, "late": 100.0} for key in MOST_GROWTH}}
    assert verdict(good) == []
    memory = good["memory"] | {"num_processes": {"early": 8.0, "late": 9.0}}
    grown = {**memory, "rss_bytes": {"early": 100.0, "late": 106.0}}
    bad = {**good, "failed": 3, "loads_over_none": 2.5, "most_overtakes": 99, "memory": grown}
    assert verdict(bad) == [
        "zipf: 3 failed",
        "zipf: loads slow streams 2.50 times",
        "zipf: a request was overtaken 99 times",
        "zipf: rss_bytes grew from 100 to 106",
        "zipf: num_processes grew from 8 to 9",
    ]
    assert len(verdict({**bad, "seconds": 15.0})) == 3


def test_turns_are_compared_with_as_large_a_batch() -> None:
    found = {
        turns.FEW: Served(100.0, 0.01),
        turns.MANY: Served(60.0, 0.015),
        turns.HALF: Served(80.0, 0.0125),
    }
    row = turns.row_of("plain", [found])
    rates = [row[f"{pair}_rate"]["median"] for pair in ("many_over_few", "half_over_few")]
    assert [*rates, row["many_over_half_rate"]["median"]] == [0.6, 0.8, 0.75]
    assert row["many_over_half_cpu"]["median"] == pytest.approx(1.2)
    asks = turns.asks_of(["a", "b"])
    assert [ask.adapter for ask in asks[:3]] == ["a", "b", "a"]
