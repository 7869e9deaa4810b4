"""The load test's own parts: a check that cannot fail would prove nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.common.recorded_client import (
    NOT_SENT,
    Fold,
    Request,
    noting_errors,
    read_requests,
    record_of,
    recorded,
)
from bench.soak import lifecycle_checks as checks
from bench.soak import lifecycle_load
from bench.soak.lifecycle_load import verdict
from bench.soak.lifecycle_operator import CYCLE, Done, History, Operation, Planner, carry_out
from bench.soak.lifecycle_versions import Versions, clear_texts, names, write_versions
from sgl_esft import zoo
from sgl_esft.formats.manifest import read_manifest
from sgl_esft.formats.model_spec import read_moe_spec
from tests.fast import result_samples

LIVE = {name: Versions(name, name, f"{name}.v2") for name in ("a", "b", "c")}
TEXTS = {("a", "p"): "old", ("a.v2", "p"): "new", ("b", "p"): "other", ("b.v2", "p"): "fourth"}


def request(began_s: float, *token_s: float, adapter: str = "a", text: str = "old") -> Request:
    ended_s = token_s[-1] if token_s else began_s + 1.0
    return Request(adapter, "p", began_s, ended_s, token_s, text, "" if token_s else "HTTP 500")


def done(kind: Any, name: str, folder: str, sent_s: float, returned_s: float) -> Done:
    return Done(Operation(kind, name, folder), sent_s, returned_s, 200, "")


# Versions: which answers are right when.


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


def test_a_change_back_is_a_change_too_and_a_failed_one_proves_nothing() -> None:
    there = done("replace", "a", "a.v2", 10.0, 11.0)
    back = done("load_live", "a", "a", 20.0, 21.0)
    assert History.of(LIVE, [there, back]).allowed("a", 22.0, 23.0) == {"a"}
    failed = replace(back, answer="refused", status=503)
    assert History.of(LIVE, [there, failed]).allowed("a", 22.0, 23.0) == {"a", "a.v2"}


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


def test_an_adapter_that_did_not_come_back_stays_unknown() -> None:
    failed = replace(done("load_live", "a", "a.v2", 11.5, 12.0), answer="no", status=500)
    history = History.of(LIVE, [done("unload_live", "a", "a", 10.0, 11.0), failed])
    assert history.may_be_unknown("a", 99.0, 99.1)


# Pace: running streams during loads over without.


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


def test_pace_leaves_pins_out() -> None:
    busy = checks.Span(0.0, 10.0)
    slow = [steady(0.5, 1.0, 3.0), steady(0.02, 3.0, 20.0)]
    operations = [done("pin", "a", "", 1.0, 3.0), done("load", "x", "", 4.0, 5.0)]
    assert checks.pace(slow, operations, [busy]).loads_over_none == pytest.approx(1.0)


# Waiting and memory.


def test_overtakes_count_who_came_later_and_began_earlier() -> None:
    late = request(0.0, 10.0)
    others = [request(1.0, 2.0), request(3.0, 4.0), request(5.0, 11.0), request(0.5)]
    assert checks.overtakes([late, *others]) == [2, 0, 0, 0]


def test_waits_are_by_adapter() -> None:
    found = checks.waits([request(0.0, 2.0), request(1.0, 2.0, adapter="b"), request(0.0)])
    assert found == {"a": [2.0], "b": [1.0]}


def test_growth_sees_a_leak_and_not_the_warm_up() -> None:
    warm = [100.0 + 10 * i for i in range(30)]
    assert checks.growth([*warm, *[400.0] * 70]).share == 0.0
    leak = checks.growth([*warm, *[400.0 + i for i in range(70)]])
    assert leak.share == pytest.approx(56 / 406, abs=0.01)


# The operator.


def test_a_cycle_has_every_kind_and_leaves_nothing_behind() -> None:
    planner = Planner(LIVE, ["x", "y"], seed=3)
    for _ in range(20):
        seen = []
        for _ in CYCLE:
            operation = planner.next()
            assert operation.kind in ("load", "unload") or operation.name in LIVE
            if operation.kind in ("replace", "load_live"):
                assert operation.folder != planner.meaning[operation.name]
            seen.append(operation.kind)
            planner.took(operation)
        assert tuple(seen) == CYCLE
        assert planner.pinned is None
        assert planner.absent is None
        assert not planner._loaded


def test_what_is_pinned_is_left_alone() -> None:
    planner = Planner(LIVE, ["x"], seed=1)
    for _ in range(200):
        operation = planner.next()
        assert operation.kind == "unpin" or operation.name != planner.pinned
        planner.took(operation)


async def _answer(
    operation: Operation, *answers: web.Response
) -> tuple[Done, list[tuple[str, str, Any]]]:
    """A server that gives these answers, one after the other."""
    seen = []
    coming = iter(answers)

    async def handle(http: web.Request) -> web.Response:
        body = await http.json() if http.can_read_body else None
        seen.append((http.method, http.path_qs, body))
        return next(coming)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            host, port = runner.addresses[0][:2]
            one = await carry_out(session, f"http://{host}:{port}", operation)
    finally:
        await runner.cleanup()
    return one, seen


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("load", ("POST", "/v1/adapters?wait=true", {"name": "a", "path": "a.v2"})),
        ("replace", ("PATCH", "/v1/adapters/a?wait=true", {"path": "a.v2"})),
        ("pin", ("PATCH", "/v1/adapters/a?wait=true", {"pinned": True})),
        ("unpin", ("PATCH", "/v1/adapters/a?wait=true", {"pinned": False})),
        ("unload_live", ("DELETE", "/v1/adapters/a?wait=true", None)),
    ],
)
def test_operations_are_calls_and_refusals_are_kept(kind: Any, call: Any) -> None:
    operation = Operation(kind, "a", "a.v2")
    good, seen = asyncio.run(_answer(operation, web.Response(text="said")))
    assert (seen, good.answer) == ([call], "")
    assert good.returned_s > good.sent_s
    refused, _ = asyncio.run(_answer(operation, web.Response(status=409, text="said")))
    assert (refused.status, refused.answer) == (409, "said")


def test_what_is_busy_is_asked_again_when_it_says() -> None:
    busy = web.Response(status=409, text="busy", headers={"Retry-After": "0"})
    operation = Operation("replace", "a", "a.v2")
    done, seen = asyncio.run(_answer(operation, busy, web.Response(text="said")))
    assert (len(seen), done.status, done.answer) == (2, 200, "")


@pytest.mark.parametrize(("state", "is_good"), [("succeeded", True), ("rolled_back", False)])
def test_a_scale_ends_well_or_says_how(state: str, is_good: bool) -> None:
    begun = web.json_response({"id": "scale-1", "state": "running"}, status=202)
    ended = web.json_response({"id": "scale-1", "state": state})
    done, seen = asyncio.run(_answer(Operation("scale", "", "", 2), begun, ended))
    assert seen == [("POST", "/v1/scale", {"dp_size": 2}), ("GET", "/v1/scale/scale-1", None)]
    assert (not done.answer, done.status) == (is_good, 200 if is_good else 0)


def test_an_elastic_server_is_scaled_after_each_cycle() -> None:
    planner = Planner(LIVE, ["x"], sizes=(2, 1))
    sizes = []
    for number in range(3 * (len(CYCLE) + 1)):
        operation = planner.next()
        planner.took(operation)
        if operation.kind == "scale":
            assert (number + 1) % (len(CYCLE) + 1) == 0
            sizes.append(operation.dp_size)
    assert sizes == [2, 1, 2]


# The client's records.

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


def test_an_error_inside_a_stream_is_the_answer() -> None:
    events, answer = [], output(ttft=0.0, itl=[])
    note = noting_errors(lambda data, output: events.append(data))
    note({"text": ""}, answer)
    assert not answer.error
    note({"error": {"message": "UnknownAdapterError: adapter 'a' is not loaded"}}, answer)
    assert len(events) == 2
    assert "UnknownAdapterError" in record_of(ASKED, answer, 0.0, 1.0).error


def test_an_answer_without_text_is_a_failure() -> None:
    assert record_of(ASKED, output(ttft=0.0, itl=[]), 0.0, 1.0).error == "an answer without text"
    assert record_of(ASKED, output(success=False, error="why", ttft=0.0), 0.0, 1.0).error == "why"
    assert record_of(ASKED, output(success=False, error="", ttft=0.0), 0.0, 1.0).error


def test_nothing_is_sent_or_recorded_when_the_time_is_over() -> None:
    sent = []

    async def send(request_func_input: Any, pbar: Any) -> Any:
        sent.append(request_func_input)
        return output()

    def failed(asked: Any, reason: str) -> Any:
        return output(success=False, error=reason)

    for until_s, count in ((float("inf"), 1), (0.0, 0)):
        sent.clear()
        file = io.StringIO()
        answer = asyncio.run(recorded(send, failed, file, until_s, Fold(0.0, 1.0))(ASKED))
        assert (len(sent), len(file.getvalue().splitlines())) == (count, count)
        assert answer.error == ("" if count else NOT_SENT)


def test_every_second_span_asks_for_the_fold() -> None:
    fold = Fold(100.0, 8.0, ("x", "y"))
    assert [fold.is_folded(at) for at in (100.0, 107.9, 108.1, 115.9, 116.1)] == [
        False, False, True, True, False
    ]  # fmt: skip
    assert not Fold(100.0, 8.0).is_folded(109.0)


def test_turns_are_compared_with_their_neighbours() -> None:
    """20 ms between tokens in the first span, 10 ms in the second, and so on."""
    spans = [
        steady(0.02 if span % 2 == 0 else 0.01, 8.0 * span, 8.0 * span + 8) for span in range(5)
    ]
    ratios = checks.turn_ratios(spans, 8.0, 1.0)
    assert ratios == pytest.approx([0.5, 0.5], rel=0.02)


# The adapters and the verdict.


def test_every_version_is_an_adapter_of_its_own(tmp_path: Path) -> None:
    found = write_versions(tmp_path)
    assert tuple(found) == names()
    folders = [folder for each in found.values() for folder in (each.old, each.new)]
    spec = read_moe_spec(zoo.base_path())
    for folder in folders:
        read_manifest(tmp_path / folder, spec)
    assert len({(tmp_path / f / "model.safetensors").read_bytes() for f in folders}) == 20


def test_a_prompt_on_which_any_model_ties_is_left_out() -> None:
    def answer(gap: float) -> dict[str, Any]:
        return {"text": "t", "meta_info": {"output_top_logprobs": [[[-1.0], [-1.0 - gap]]]}}

    found = {"a": [answer(1.0), answer(1.0)], "b": [answer(1.0), answer(0.0)]}
    assert clear_texts(["p", "q"], found) == {("a", "p"): "t", ("b", "p"): "t"}


def test_the_result_is_written_after_each_pattern(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def server(arguments: list[str]) -> Iterator[str]:
        assert "--max-adapters" in arguments
        yield "http://nowhere"

    def run_pattern(name: str, *more: Any) -> tuple[dict[str, Any], list[Done]]:
        return {"pattern": name}, [*more[-1], done("pin", "a", "a", 0.0, 1.0)]

    monkeypatch.setattr(lifecycle_load.serving, "server", server)
    monkeypatch.setattr(lifecycle_load, "run_pattern", run_pattern)
    ground = lifecycle_load.Ground(tmp_path, LIVE, ["x"], TEXTS)
    written: list[Any] = []
    plan = lifecycle_load.Plan(turns=0)
    lifecycle_load.measure(
        ground, plan, lambda found: written.append(json.loads(json.dumps(found)))
    )
    assert [[row["pattern"] for row in each["rows"]] for each in written] == [
        ["zipf"],
        ["zipf", "round_robin"],
    ]
    assert [each["is_complete"] for each in written] == [False, True]


def test_the_verdict_names_what_is_wrong() -> None:
    (good, _) = result_samples.lifecycle_load()["rows"]
    assert verdict(good) == []
    grown = {**good["memory"], "rss_bytes": {"early": 100.0, "late": 106.0}}
    bad = {**good, "failed": 3, "loads_over_none": 2.5, "most_overtakes": 99, "memory": grown}
    assert verdict(bad) == [
        "zipf: 3 failed",
        "zipf: loads slow streams 2.50 times",
        "zipf: a request was overtaken 99 times",
        "zipf: rss_bytes grew from 100 to 106",
    ]
    assert len(verdict({**bad, "seconds": 15.0})) == 3
