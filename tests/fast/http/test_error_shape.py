"""Whoever answers with an error, a client meets one shape; Anthropic's clients meet theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from fastapi import Body, FastAPI, HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from sgl_esft import __version__
from sgl_esft.http.error_shape import shaped, shaped_event
from tests.fast.http.stack import answers, install

FIELDS = {"message", "type", "param", "code"}
FLAT = {"object": "error", "message": "m", "type": "BadRequestError", "param": "n", "code": 400}
BUILT: list[tuple[int, Any, tuple[Any, ...]]] = [  # status, what a route says, the error
    (400, {"error": FLAT}, ("m", "BadRequestError", "n", 400)),
    (400, FLAT, ("m", "BadRequestError", "n", 400)),
    (400, {**FLAT, "type": "400"}, ("m", "BadRequestError", "n", 400)),
    (400, {"error": {"message": "m"}}, ("m", "BadRequestError", None, 400)),
    (404, {"detail": "Not Found"}, ("Not Found", "NotFoundError", None, 404)),
    (401, {"error": "Unauthorized"}, ("Unauthorized", "AuthenticationError", None, 401)),
    (405, {"detail": "m"}, ("m", "MethodNotAllowedError", None, 405)),
    (413, "too large", ("too large", "RequestTooLargeError", None, 413)),
    (429, "", ("Too Many Requests", "RateLimitError", None, 429)),
    (503, {"ready": False, "reason": "m"}, ("m", "ServiceUnavailableError", None, 503)),
    (500, "[1]", ("[1]", "InternalServerError", None, 500)),
    (404, {"error": {**FLAT, "code": "no_model"}}, ("m", "BadRequestError", "n", "no_model")),
]


def as_bytes(said: Any) -> bytes:
    return said.encode() if isinstance(said, str) else json.dumps(said).encode()


@pytest.mark.parametrize(("status", "said", "error"), BUILT)
def test_every_shape_becomes_one(status: int, said: Any, error: tuple[Any, ...]) -> None:
    found = json.loads(shaped("/generate", status, as_bytes(said)))
    assert tuple(found["error"][f] for f in ("message", "type", "param", "code")) == error
    assert set(found["error"]) == FIELDS
    assert "object" not in found
    assert shaped("/generate", status, json.dumps(found).encode()) == json.dumps(found).encode()


def test_what_an_answer_says_besides_is_kept() -> None:
    """SGLang's clients of its own routes read these."""
    said = {"success": False, "message": "m"}
    assert json.loads(shaped("/x", 400, as_bytes(said))).items() >= said.items()
    detail = {"detail": [{"loc": ["body"], "msg": "m"}]}
    found = json.loads(shaped("/x", 422, as_bytes(detail)))
    assert found["detail"] == detail["detail"]
    assert found["error"]["type"] == "UnprocessableEntityError"


def test_a_long_message_is_cut() -> None:
    found = json.loads(shaped("/x", 400, as_bytes({"detail": "x" * 9999})))
    assert len(found["error"]["message"]) == 4096


def test_error_events_of_streams() -> None:
    event = b'data: {"error": {"message": "m", "code": 503}}\n\ndata: [DONE]\n\n'
    first, last, _ = shaped_event("/generate", event).split(b"\n\n")
    error = {"message": "m", "type": "ServiceUnavailableError", "param": None, "code": 503}
    assert json.loads(first.removeprefix(b"data: ")) == {"error": error}
    assert last == b"data: [DONE]"
    named = shaped_event("/v1/messages", event)
    assert named.startswith(b'event: error\ndata: {"type": "error", "error": {')
    assert b'"type": "overloaded_error"' in named


def server() -> FastAPI:
    """Routes that fail in all the ways of SGLang's and FastAPI's."""
    app = FastAPI()

    def fail() -> None:
        raise HTTPException(400, "m")

    def miss() -> None:
        raise HTTPException(404, "no such response")

    def check(body: dict[str, int] = Body()) -> None:  # noqa: B008
        pass

    async def stream() -> Response:
        async def events() -> Any:
            yield b"data: 1\n\n"
            yield b'data: {"error": {"message": "m"}}\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    for path, endpoint in (
        ("/tokenize", fail),
        ("/v1/responses/{response_id}/cancel", miss),
        ("/detokenize", check),
        ("/v1/completions", lambda: JSONResponse(FLAT, 400)),
        ("/v1/chat/completions", lambda: PlainTextResponse("busy", 503)),
        ("/v1/messages", lambda: JSONResponse({"error": {"message": "m"}}, 503)),
        ("/generate", stream),
    ):
        app.add_api_route(path, endpoint, methods=["POST"])
    return install(app)


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("POST", "/tokenize", 400, "BadRequestError"),
        ("POST", "/detokenize", 400, "BadBodyError"),
        ("POST", "/v1/completions", 400, "BadRequestError"),
        ("POST", "/v1/chat/completions", 503, "ServiceUnavailableError"),
        ("POST", "/v1/messages", 503, "overloaded_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/tokenize", 405, "UnknownMethodError"),
        ("POST", "/v1/responses/x/cancel", 404, "NotFoundError"),
        ("GET", "/nowhere", 404, "UnknownRouteError"),
        ("POST", "/v1/embeddings", 404, "UnknownRouteError"),  # declared, and not there
    ],
)
def test_through_the_stack(method: str, path: str, status: int, name: str) -> None:
    body = {"x": "no number"} if path == "/detokenize" else {}
    (answer,) = asyncio.run(answers(server(), [(method, path, None, body)]))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert found["error"]["type"] == name
    assert set(found["error"]) == FIELDS
    assert found.get("type") == ("error" if "messages" in path else None)
    assert "x-request-id" in answer.headers
    assert "no number" not in answer.text


def test_a_defect_passes_all_layers_to_the_web_server_which_logs_it() -> None:
    app = FastAPI()

    @app.post("/generate")
    def generate() -> None:
        raise KeyError("of no client's")

    with pytest.raises(KeyError, match="of no client's"):
        asyncio.run(answers(install(app), [("POST", "/generate", None, {"text": "x"})]))


def test_a_stream_goes_on_after_the_start() -> None:
    (answer,) = asyncio.run(answers(server(), [("POST", "/generate", None, {"text": "x"})]))
    first, error, _ = answer.text.split("\n\n")
    assert first == "data: 1"
    assert set(json.loads(error.removeprefix("data: "))["error"]) == FIELDS


def test_openais_library_reads_it() -> None:
    transport = httpx.ASGITransport(app=server())

    async def ask() -> None:
        async with httpx.AsyncClient(transport=transport) as http:
            base = "http://127.0.0.1"
            one = openai.AsyncOpenAI(
                base_url=f"{base}/v1", api_key="k", max_retries=0, http_client=http
            )
            with pytest.raises(openai.BadRequestError) as bad:
                await one.completions.create(model="", prompt="x")
            assert (bad.value.type, bad.value.param) == ("BadRequestError", "n")

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/v1/scale", "--elastic --max-devices"),
        ("GET", "/v1/scale/scale-1", "--elastic"),
        ("GET", "/v1/instances", "--elastic"),
        ("GET", "/metrics", "--enable-metrics"),
        ("GET", "/v1/adapters/math", "--no-esft"),
    ],
)
def test_a_route_that_another_start_would_have_says_so(method: str, path: str, remedy: str) -> None:
    (answer,) = asyncio.run(answers(server(), [(method, path, None, {})]))
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "UnknownRouteError"
    assert remedy in answer.json()["error"]["message"]


def test_the_openapi_page_has_our_name() -> None:
    (answer,) = asyncio.run(answers(server(), [("GET", "/openapi.json", None, {})]))
    info = answer.json()["info"]
    assert (info["title"], info["version"]) == ("sgl-esft", __version__)
