"""/parse_function_call of SGLang's, behind our layers: no text makes a parser fail without a name.

every parser that SGLang knows x odd texts in its own tokens, odd tools -> 200, 400 or 422
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from transformers import AutoTokenizer

from sgl_esft import zoo
from sgl_esft.plugin import hook_table
from tests.fast.http.stack import answers, install

# SGLang's, and no error where it serves.
deprecated = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
pytestmark = [pytest.mark.anyio, deprecated]

ROUTE = "/parse_function_call"
PARSERS = tuple(FunctionCallParser.ToolCallParserEnum)
MAY_BE = {200, 400, 422}
HALF = "\\ud800"  # in JSON: half of a pair of UTF-16, which no UTF-8 can hold
INSIDE = (
    *("", "f", "null", "7", '"f"', "[1, null, 2.5]", "{}", '{"a":' * 300),
    *('{"name": "f"}', '{"name": ["f"], "arguments": "x"}', '{"name": {"a": 1}}'),
    *(
        f'{{"name": "f", "arguments": {each}}}'
        for each in ("null", "[1]", "7", f'{{"a": "{HALF}"}}')
    ),
    *(f'[{{"name": "{name}", "parameters": {{"a": "{HALF}"}}}}]' for name in ("f", HALF)),
    *("f(a=1, b=None, c=[1])", "[f(a=1), 5]", f"[f(a='{HALF}')]"),
    *("<function=f><function=f><parameter=a>", '<invoke name="f"><parameter name="a">[1]'),
    "f<arg_key>a</arg_key><arg_value>[1]</arg_value><arg_key>b",
)
FUNCTIONS: tuple[dict[str, Any], ...] = (
    *({"name": "f"}, {"name": "f", "parameters": None}, {"parameters": {}}, {"name": None}),
    *({"name": "f", "parameters": each} for each in ({"properties": None}, {"properties": [1]})),
    {"name": "f", "parameters": {"$ref": "#", "properties": {"a": None}, "anyOf": [5]}},
)


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """What parsers log has half pairs in it, and a report with those reaches no other process."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    """SGLang's route with what it needs of a started server, the parsers as our hooks have them."""
    found = FastAPI()
    found.router.routes += [
        each for each in http_server.app.router.routes if getattr(each, "path", "") == ROUTE
    ]
    found.state.openai_serving_chat = SimpleNamespace(
        chat_encoding_spec=None, encoding_adapter=None
    )
    manager = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(zoo.base_path()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
        for hook in hook_table.LAUNCHER_HOOKS:
            if hook.target.startswith("sglang.srt.function_call."):
                wrapped = _wrap_fn(hook.resolve(), hook.function, HookType(hook.kind.value))
                patch.setattr(*hook.owner(), wrapped)
        yield install(found)


async def _asked(
    app: FastAPI, parser: str, texts: list[str], *functions: dict[str, Any]
) -> list[httpx.Response]:
    tools = [{"type": "function", "function": each} for each in functions]
    bodies = [{"text": text, "tools": tools, "tool_call_parser": parser} for text in texts]
    calls = [("POST", ROUTE, None, body) for body in bodies]
    found: list[httpx.Response] = await answers(app, calls, raise_app_exceptions=False)
    return found


def _tokens(parser: str) -> tuple[str, str]:
    """What a call begins and ends with; GLM's where a parser does not say."""
    detector: Any = FunctionCallParser.ToolCallParserEnum[parser]
    try:
        made = detector()
    except ValueError:  # response_template: the tokenizer's own
        made = None
    begin, end = getattr(made, "bot_token", ""), getattr(made, "eot_token", "")
    return begin or "<tool_call>", end or "</tool_call>"


def _texts(begin: str, end: str) -> list[str]:
    nested = [begin * 40, begin * 2 + "f" + end * 2, (begin + "f") * 3, end + begin]
    return ["x", *nested, *(begin + each + end for each in INSIDE), begin + '{"name": "f", "ar']


@pytest.mark.parametrize("parser", PARSERS)
async def test_no_text_and_no_tool_makes_a_parser_fail_without_a_name(
    app: FastAPI, parser: str
) -> None:
    begin, end = _tokens(parser)
    texts = _texts(begin, end)
    found = await _asked(app, parser, texts, {"name": "f", "parameters": {}})
    for function in FUNCTIONS:
        some = [begin * 3, begin + '{"name": "f", "arguments": {"a": [1]}}' + end]
        texts += some
        found += await _asked(app, parser, some, function)
    failed = {
        ascii(text[:80]): ascii(answer.text)
        for text, answer in zip(texts, found, strict=True)
        if answer.status_code not in MAY_BE
    }
    assert failed == {}


async def test_a_parser_that_reads_more_of_tools_than_the_route_has_answers(app: FastAPI) -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>7</arg_value></tool_call>"
    number = {"type": "object", "properties": {"a": {"type": "number"}}}
    (found,) = await _asked(app, "glm47", [text], {"name": "f", "parameters": number})
    assert found.status_code == 200, found.text
    (call,) = found.json()["calls"]
    assert (call["name"], json.loads(call["parameters"])) == ("f", {"a": 7})


async def test_half_a_pair_of_utf16_comes_back_as_it_was_written(app: FastAPI) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"a": "{HALF}"}}}}\n</tool_call>'
    (found,) = await _asked(app, "qwen25", [text], {"name": "f", "parameters": {}})
    assert found.status_code == 200, found.text
    (call,) = found.json()["calls"]
    assert json.loads(call["parameters"]) == {"a": "\ud800"}
