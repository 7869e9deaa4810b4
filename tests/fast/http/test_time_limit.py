"""Work on the event loop ends at its limit, and its request with the named error."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from sgl_esft.errors import TextParserError, TextTimeoutError
from sgl_esft.http import time_limit
from sgl_esft.plugin import text_hooks
from tests.fast.http.stack import answers

pytestmark = pytest.mark.anyio

LIMIT_S = 0.2  # CPU is shared with other tests
TOTAL_S = 0.5
LONG_S = 5.0  # what would take so long is ended
FAIL = "fail"


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    tests_own = signal.setitimer(signal.ITIMER_REAL, 0)
    monkeypatch.setattr(time_limit, "CALL_S", LIMIT_S)
    monkeypatch.setattr(time_limit, "_allowance", time_limit._Allowance())
    time_limit.start(TOTAL_S)
    yield
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *tests_own)


def _spin(seconds: float = LONG_S) -> str:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return "done"


def _spin_and_catch() -> None:
    """As parsers do: what goes wrong with a piece of text is left out."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        try:
            _spin()
        except Exception:  # noqa: BLE001
            continue


def _spin_and_catch_all() -> None:
    try:
        _spin()
    except:  # noqa: E722
        _spin()


def _match() -> None:
    re.match("(a|aa)+$", "a" * 60 + "b")


@pytest.mark.parametrize("work", [_spin, _spin_and_catch, _spin_and_catch_all, _match])
def test_work_ends_at_its_limit(work: Any) -> None:
    started = time.monotonic()
    with pytest.raises(TextTimeoutError, match=r"work holds up .*0\.2 s at once"):
        time_limit.run("work", work)
    assert time.monotonic() - started < LONG_S / 2


def _elapsed(work: Any) -> float:
    started = time.monotonic()
    with pytest.raises(TextTimeoutError):
        time_limit.run("work", work)
    return time.monotonic() - started


def test_many_long_calls_share_what_one_may_take() -> None:
    """And short ones, and later ones, are as they were."""
    assert sum(_elapsed(_spin) for _ in range(8)) < 6 * LIMIT_S
    assert time_limit.run("work", _spin, 0.001) == "done"
    time.sleep(3 * LIMIT_S)
    assert _elapsed(_spin) >= LIMIT_S


def test_work_within_its_limit_is_as_it_is() -> None:
    assert time_limit.run("work", _spin, 0.001) == "done"
    with pytest.raises(KeyError):
        time_limit.run("work", {}.__getitem__, "x")
    time.sleep(2 * LIMIT_S)  # no alarm is left


def test_a_late_alarm_ends_nothing() -> None:
    signal.raise_signal(signal.SIGALRM)


def test_other_threads_and_forked_jobs_have_no_limit() -> None:
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(time_limit.run("work", _spin, 2 * LIMIT_S))
    )
    thread.start()
    thread.join()
    assert results == ["done"]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a job's own limit, which must stay
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    try:
        assert time_limit.run("work", _spin, 2 * LIMIT_S) == "done"
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_limits_within_limits_are_the_outer_one() -> None:
    def outer() -> None:
        time_limit.run("inner", _spin, 0.001)
        _spin()

    with pytest.raises(TextTimeoutError, match="outer"):
        time_limit.run("outer", outer)


def test_calls_on_one_object_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # What all requests share is counted by the clock, and would end first on a busy machine.
    monkeypatch.setattr(time_limit, "LEAST_S", LIMIT_S)
    parser = SimpleNamespace()

    def parse() -> None:
        for _ in range(100):
            time_limit.run_for(parser, "parser", _spin, 0.02)

    with pytest.raises(TextTimeoutError, match=r"0\.5 s in all"):
        parse()
    assert TOTAL_S / 2 < vars(parser)["_sgl_esft_spent_s"] < TOTAL_S + LIMIT_S
    time_limit.run_for(SimpleNamespace(), "parser", _spin, 0.001)


class _Detector:
    pass


class _Parser:
    """As SGLang's FunctionCallParser."""

    ToolCallParserEnum = {"other": int, "slow47": _Detector}  # noqa: RUF012

    def __init__(self) -> None:
        self.detector = _Detector()

    def parse(self, text: str) -> str:
        if text == FAIL:
            raise AttributeError("'NoneType' object has no attribute 'group'")
        return _spin(float(text))


def _parse(text: str) -> Any:
    return text_hooks.parse(_Parser.parse, _Parser(), text)


def test_a_parser_that_fails_is_named() -> None:
    assert _parse("0.001") == "done"
    with pytest.raises(TextParserError, match=r"'slow47' cannot read this text \(AttributeError\)"):
        _parse(FAIL)
    with pytest.raises(TextTimeoutError, match="'slow47'"):
        _parse("5")


def _app() -> Any:
    app = FastAPI()

    @app.post("/whole/{text}")
    async def whole(text: str) -> Any:
        try:
            return {"text": _parse(text)}
        except Exception:  # noqa: BLE001
            return {"text": "as it is"}  # as SGLang does with tool calls

    @app.post("/refused/{text}")
    async def refused(text: str) -> Any:
        try:
            return {"text": _parse(text)}
        except ValueError as error:
            return JSONResponse({"object": "error", "message": str(error)}, 400)

    @app.post("/raised/{text}")
    async def raised(text: str) -> Any:
        return {"text": _parse(text)}

    @app.post("/streamed/{text}")
    async def streamed(text: str, caught: bool = True) -> Any:
        async def events() -> Any:
            yield "data: {}\n\n"
            try:
                yield f"data: {_parse(text)}\n\n"
            except ValueError as error:
                if not caught:
                    raise
                yield f'data: {{"error": {{"message": "{type(error)}", "code": 400}}}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return time_limit.NamedErrors(app)


@pytest.mark.parametrize("route", ["whole", "refused", "raised"])
async def test_an_answer_that_took_too_long_is_the_named_error(route: str) -> None:
    calls = [("POST", f"/{route}/{text}", None, {}) for text in ("5", "0.001")]
    late, good = await answers(_app(), calls)
    assert (late.status_code, late.json()["error"]["type"]) == (413, "TextTimeoutError")
    assert (good.status_code, good.json()) == (200, {"text": "done"})


async def test_a_failed_parser_is_named_where_the_answer_is_an_error() -> None:
    calls = [("POST", f"/{route}/{FAIL}", None, {}) for route in ("whole", "refused", "raised")]
    whole, *named = await answers(_app(), calls)
    assert (whole.status_code, whole.json()) == (200, {"text": "as it is"})
    for answer in named:
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "TextParserError")


@pytest.mark.parametrize("caught", ["true", "false"])
@pytest.mark.parametrize(("text", "error"), [("5", "TextTimeoutError"), (FAIL, "TextParserError")])
async def test_a_stream_ends_with_the_named_error(text: str, error: str, caught: str) -> None:
    call = ("POST", f"/streamed/{text}?caught={caught}", None, {})
    (answer,) = await answers(_app(), [call])
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
    assert events[0] == "{}"
    assert json.loads(events[1])["error"]["type"] == error
