"""Around a whole server: ids on every answer, outcomes, errors by type, the access line."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sgl_esft.errors import EsftError, KeyLimitError, RequestTimeoutError, UnknownAdapterError
from sgl_esft.http import record
from sgl_esft.http.answers import App, Message, Receive, Scope, Send, end_stream, send_error
from sgl_esft.http.record import request_id_of
from sgl_esft.observe.json_logs import (
    ACCESS_LOGGER,
    AccessLog,
    JsonFormatter,
    start_loop_for_nobody,
)
from sgl_esft.observe.middleware import Observer
from sgl_esft.observe.request_metrics import OUTCOMES, RequestMetrics

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


def body(raw: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": raw, "more_body": more}


class Seen:
    """An application behind an Observer, and what came out of it."""

    def __init__(self, app: App, *, client_leaves: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.lines: list[logging.LogRecord] = []
        self.sent: list[Message] = []
        self._client_leaves = client_leaves
        self._observer = Observer(
            app,
            lambda method, path: path == "/generate",
            RequestMetrics(self.registry),
            AccessLog(logging.INFO),
        )

    async def _receive(self) -> Message:
        return {"type": "http.disconnect" if self._client_leaves else "http.request"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def call(self, path: str = "/generate", **headers: str) -> Seen:
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "client": ("127.0.0.1", 4),
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
            ],
        }
        handler = SimpleNamespace(level=logging.INFO, handle=self.lines.append)
        logger = logging.getLogger(ACCESS_LOGGER)
        logger.addHandler(handler)  # type: ignore[arg-type]
        try:
            asyncio.run(self._observer(scope, self._receive, self._send))
        finally:
            logger.removeHandler(handler)  # type: ignore[arg-type]
        return self

    @property
    def request_id(self) -> str:
        return dict(self.sent[0]["headers"])[b"x-request-id"].decode()

    @property
    def line(self) -> dict[str, Any]:
        (found,) = self.lines
        parsed: dict[str, Any] = json.loads(JsonFormatter().format(found))
        return parsed

    def outcomes(self) -> dict[str, float]:
        return self._values("sgl_esft:requests_total", "outcome")

    def errors(self) -> dict[str, float]:
        return self._values("sgl_esft:request_errors_total", "type")

    def _values(self, name: str, label: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value
        }


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    request = record.current()
    request.key_name = "team-a"
    request.prompt_tokens = 3
    state = SimpleNamespace(
        obj=SimpleNamespace(lora_path="math", stream=True),
        output_ids=[1, 2],
        time_stats=SimpleNamespace(first_token_time=request.started_s + 0.25),
    )
    request.sequences.append(state)
    await send(START)
    await send(body(b"{}"))


def test_an_answer_has_an_id_and_a_line() -> None:
    seen = Seen(fine).call(x_request_id="client-7.a:b_c")
    assert seen.request_id == "client-7.a:b_c"
    line = seen.line
    assert line.pop("duration_s") >= 0
    assert {key: line[key] for key in line if key not in ("time", "process", "level")} == {
        "logger": ACCESS_LOGGER,
        "message": "POST /generate 200",
        "request_id": "client-7.a:b_c",
        "method": "POST",
        "path": "/generate",
        "status": 200,
        "client": "127.0.0.1",
        "key": "team-a",
        "outcome": "ok",
        "error": None,
        "adapters": ["math"],
        "prompt_tokens": 3,
        "generated_tokens": 2,
        "ttft_s": 0.25,
    }
    assert seen.outcomes() == {"ok": 1}
    assert seen.errors() == {}


@pytest.mark.parametrize(
    "given", ["", "a b", "x" * 129, "é", 'a"b', "a\nb", "<script>", "../x"], ids=repr
)
def test_an_id_that_is_not_sane_is_replaced(given: str) -> None:
    found = request_id_of([(b"x-request-id", given.encode("latin-1"))])
    assert found != given
    assert len(found) == 32
    assert found != request_id_of([]), "ids that are made differ"
    assert request_id_of([(b"X-Request-Id", b"a"), (b"x-request-id", b"b")]) not in ("a", "b")


def says(*messages: Message) -> App:
    """An application that answers so, whatever it is asked."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def gives(error: EsftError) -> App:
    """One that answers with an error."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, error)

    return app


async def timed_out(scope: Scope, receive: Receive, send: Send) -> None:
    await says(START, EVENT)(scope, receive, send)
    await end_stream(send, RequestTimeoutError("too long"))


EVENT = body(b"data: {}\n\n", more=True)
ERROR_EVENT = body(b'data: {"error": {"message": "m", "type": "Abort"}}\n\n', more=True)
refused = gives(KeyLimitError("busy"))
unknown = gives(UnknownAdapterError("adapter 'x' is not loaded"))
sglang_error = says(
    {**START, "status": 400},
    body(b'{"object": "error", "message": "m", "type": "BadRequest", ', more=True),
    body(b'"code": 400}'),
)
broken = says({**START, "status": 500}, body(b"Internal Server Error"))
streams = says(START, body(b""))


@pytest.mark.parametrize(
    ("app", "outcome", "error"),
    [
        (refused, "refused", "KeyLimitError"),
        (unknown, "refused", "UnknownAdapterError"),
        (timed_out, "timeout", "RequestTimeoutError"),
        (sglang_error, "refused", "BadRequest"),
        (broken, "failed", "other"),
        (says(START, EVENT), "failed", None),
        (says(START, ERROR_EVENT, body(b"data: [DONE]\n\n")), "failed", "Abort"),
    ],
)
def test_outcomes_and_errors(app: App, outcome: str, error: str | None) -> None:
    seen = Seen(app).call()
    assert outcome in OUTCOMES
    assert seen.outcomes() == {outcome: 1}
    assert seen.errors() == ({} if error is None else {error: 1})
    assert seen.line["outcome"] == outcome
    assert seen.request_id == seen.line["request_id"]


def test_an_application_that_raises_is_seen() -> None:
    async def raises(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    seen = Seen(raises)
    with pytest.raises(RuntimeError):
        seen.call()
    assert seen.outcomes() == {"failed": 1}
    assert seen.line["status"] is None


def test_a_client_that_leaves_has_cancelled() -> None:
    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        assert (await receive())["type"] == "http.disconnect"

    assert Seen(waits, client_leaves=True).call().outcomes() == {"cancelled": 1}


def test_an_error_that_a_client_got_before_it_left_is_a_failure() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await says(START, ERROR_EVENT)(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    seen = Seen(fails, client_leaves=True).call()
    assert (seen.outcomes(), seen.errors()) == ({"failed": 1}, {"Abort": 1})


@pytest.mark.parametrize("answer", [sglang_error, streams])
def test_what_is_answered_to_nobody_is_no_error_and_no_success(answer: App) -> None:
    """SGLang answers 400, or ends its stream, when it finds that the client has left."""

    async def finds_out(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"
        await answer(scope, receive, send)

    seen = Seen(finds_out, client_leaves=True).call()
    assert seen.outcomes() == {"cancelled": 1}
    assert seen.errors() == {}
    assert (seen.line["outcome"], seen.line["error"]) == ("cancelled", None)


def test_a_request_has_ended_with_its_last_byte() -> None:
    """SGLang's application lives on for seconds after a stream."""

    async def lingers(scope: Scope, receive: Receive, send: Send) -> None:
        await fine(scope, receive, send)
        assert seen.outcomes() == {"ok": 1}
        await send(body(b""))  # what a server would refuse

    seen = Seen(lingers)
    assert seen.call().outcomes() == {"ok": 1}
    assert len(seen.lines) == 1


@pytest.mark.parametrize("headers", [[(b"Content-Length", b"0")], [(b"content-length", b"0")]])
def test_an_empty_answer_has_ended_with_its_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """As /health answers: a client that has them asks for more, and finds this one counted."""

    async def says_nothing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**START, "headers": headers})
        assert (seen.outcomes(), len(seen.lines)) == ({"ok": 1}, 1)
        await send(body(b""))

    seen = Seen(says_nothing)
    assert seen.call().outcomes() == {"ok": 1}
    assert len(seen.lines) == 1
    assert [message["type"] for message in seen.sent] == [START["type"], body(b"")["type"]]


def test_other_routes_count_errors_only() -> None:
    seen = Seen(refused).call("/v1/models")
    assert seen.outcomes() == {}
    assert seen.errors() == {"KeyLimitError": 1}


def test_long_paths_are_cut_and_no_line_has_a_body() -> None:
    seen = Seen(unknown).call("/" + "a" * 5000)
    assert len(seen.line["path"]) == 200
    assert "is not loaded" not in JsonFormatter().format(seen.lines[0])


def entry_of(text: str, *args: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("sglang.x", level, "f", 1, text, args, None)


def test_lines_of_other_loggers_name_the_request() -> None:
    made: list[str] = []

    async def logs(scope: Scope, receive: Receive, send: Send) -> None:
        made.append(JsonFormatter(" TP0").format(entry_of("a %s", "b", level=logging.WARNING)))
        await fine(scope, receive, send)

    seen = Seen(logs).call()
    line = json.loads(made[0])
    assert line["request_id"] == seen.request_id
    assert (line["level"], line["message"], line["rank"]) == ("WARNING", "a b", "TP0")


def test_lines_of_the_loop_that_the_first_request_starts_name_no_request() -> None:
    made: list[str] = []

    async def loop() -> None:
        made.append(JsonFormatter().format(entry_of("outputs")))

    async def starts(scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Task[None]] = []
        start_loop_for_nobody(lambda _: tasks.append(asyncio.create_task(loop())), None)
        await tasks[0]
        assert record.current() is not None
        await fine(scope, receive, send)

    Seen(starts).call()
    assert "request_id" not in json.loads(made[0])


def test_an_exception_is_one_line() -> None:
    try:
        raise ValueError("x\ny")
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    entry = logging.LogRecord("sglang", logging.ERROR, "f", 1, "failed", (), found)
    text = JsonFormatter().format(entry)
    assert "\n" not in text
    assert "ValueError" in json.loads(text)["exception"]
