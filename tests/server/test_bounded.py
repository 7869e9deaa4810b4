"""Texts that take long to work on, sent to a live server: others' streams go on."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.support.guarded import CLIENT_KEY, TENANT_KEY, Guarded

pytestmark = pytest.mark.server

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
QUADRATIC = "<tool_calls><tool_call>" * 6500  # 150 kB: 23 s of hunyuan's parser
MANY_PROPERTIES = {f"p{number}": {"type": "string"} for number in range(8000)}  # 5 s of checks
HELLO = [{"role": "user", "content": "hello"}]
A_TOKEN = "68"  # "a", of the demo's vocabulary
MANY_WAYS = "root ::= " + "root " * 600 + '| "a" | ""'  # token 10 takes 0.3 s, 20 takes 2 s
MOST_GAP_S = 8.0  # 0.4 s of grammars and a busy machine's delays; without the limit 20 s and more
LONG = "coffee " * 200_000  # 1.4 MB: 4 s of the tokenizer
STREAMED: dict[str, Any] = {
    "text": "coffee -> ",
    "adapter": "reverse",
    "stream": True,
    "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
}


def _post(guarded: Guarded, route: str, body: Any, key: str = CLIENT_KEY) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(guarded.server.url + route, json=body, headers=headers, timeout=60)


def _streamed(guarded: Guarded) -> str:
    lines = _post(guarded, "/generate", STREAMED, TENANT_KEY).text.split("\n\n")
    text: str = json.loads(lines[-3].removeprefix("data: "))["text"]
    return text


def _slowest_probe(guarded: Guarded, over: threading.Event) -> float:
    slowest = 0.0
    while not over.wait(0.05):
        started = time.monotonic()
        assert requests.get(guarded.server.url + "/healthz", timeout=30).status_code == 200
        slowest = max(slowest, time.monotonic() - started)
    return slowest


def test_long_texts_hold_up_nobody(guarded: Guarded) -> None:
    parse = {"text": QUADRATIC, "tools": TOOLS, "tool_call_parser": "hunyuan"}
    expected = _streamed(guarded)
    over = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        probing = pool.submit(_slowest_probe, guarded, over)
        attacks = [pool.submit(_post, guarded, "/parse_function_call", parse) for _ in range(2)]
        time.sleep(0.5)
        streams = [_streamed(guarded) for _ in range(3)]
        answers = [attack.result() for attack in attacks]
        over.set()
    assert [answer.status_code for answer in answers] == [413, 413], answers[0].text
    assert "TextTimeoutError" in answers[0].text
    assert probing.result() < 1.0
    assert streams == [expected] * 3


def test_a_long_text_is_answered_as_a_short_one_is(guarded: Guarded) -> None:
    """In a process of its own: the tokenizer, the parsers and the chat template are there."""
    text = "coffee " * 1000
    tokens = _post(guarded, "/tokenize", {"prompt": text}).json()
    short = _post(guarded, "/tokenize", {"prompt": "coffee " * 10}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 50 * short["count"]
    found = _post(guarded, "/detokenize", {"tokens": tokens["tokens"]}).json()
    assert found["text"].strip() == text.strip()
    chat = {"messages": [{"role": "user", "content": text}]}
    assert _post(guarded, "/tokenize", chat).json()["count"] >= tokens["count"]
    parse = {"text": text, "tools": TOOLS, "tool_call_parser": "hunyuan"}
    assert _post(guarded, "/parse_function_call", parse).json()["calls"] == []
    unknown = {**parse, "tool_call_parser": "nobody"}
    assert _post(guarded, "/parse_function_call", unknown).status_code == 400


def _all_while_probed(guarded: Guarded, calls: list[tuple[str, Any]]) -> list[requests.Response]:
    """The answers, while another tenant's stream and /healthz are as they should be."""
    expected, over = _streamed(guarded), threading.Event()
    with ThreadPoolExecutor(8) as pool:
        probing = pool.submit(_slowest_probe, guarded, over)
        asked = [pool.submit(_post, guarded, route, body) for route, body in calls]
        assert _streamed(guarded) == expected
        answers = [each.result() for each in asked]
        over.set()
    assert probing.result() < 1.0
    return answers


def _errors(answers: list[requests.Response]) -> list[tuple[int, str]]:
    return [(each.status_code, each.json()["error"]["type"]) for each in answers]


def test_large_tools_of_chat_requests_hold_up_nobody(guarded: Guarded) -> None:
    schema = {"type": "object", "properties": MANY_PROPERTIES}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    chat = {"model": "reverse", "messages": HELLO, "max_tokens": 2, "tools": tools}
    route = "/v1/chat/completions"
    answers = _all_while_probed(guarded, [(route, chat), (route, {**chat, "stream": True})])
    assert _errors(answers) == [(413, "TextTimeoutError")] * 2
    assert "checking the request's tools" in answers[0].text


def test_large_prompts_hold_up_nobody(guarded: Guarded) -> None:
    messages = [{"role": "user", "content": LONG}]
    chat = {"model": "reverse", "messages": messages, "max_tokens": 2}
    calls: list[tuple[str, Any]] = [
        ("/generate", {"text": LONG, "adapter": "reverse"}),
        ("/v1/completions", {"model": "reverse", "prompt": LONG, "max_tokens": 2}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", {"model": "default", "messages": messages, "max_tokens": 2}),
    ]
    generated, completed, *others = _all_while_probed(guarded, calls)
    assert _errors([generated, completed]) == [(400, "PromptTooLongError")] * 2
    assert [each.status_code for each in others] == [400, 400], others[-1].text


def test_odd_texts_are_answered_whatever_parser_reads_them(guarded: Guarded) -> None:
    """In the front, and in a process of its own: glm47's reads what this route's tools lack."""
    nested = "<tool_call><tool_call>f</tool_call></tool_call>"
    half = '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'
    glm = [nested, "<tool_call>" * 40, "<tool_call>f" * 3, "<tool_call>" * 500]
    asked = [*(("glm47", text) for text in glm), ("qwen25", half)]
    bodies = [{"tool_call_parser": name, "text": text, "tools": TOOLS} for name, text in asked]
    answers = [_post(guarded, "/parse_function_call", body) for body in bodies]
    assert [each.status_code for each in answers] == [200] * len(asked), answers[0].text
    assert json.loads(answers[-1].json()["calls"][0]["parameters"]) == {"a": "\ud800"}


def test_a_grammar_that_reads_a_text_in_many_ways_holds_up_nobody(guarded: Guarded) -> None:
    """Its seconds are the rank's, where the streams of all clients are."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ebnf": MANY_WAYS}
    body = {"text": "tea -> ", "sampling_params": {**sampling, "logit_bias": {A_TOKEN: 100}}}
    expected, over = _streamed(guarded), threading.Event()
    with ThreadPoolExecutor(8) as pool:
        gaps = pool.submit(_longest_gap, guarded, over)
        asked = [pool.submit(_post, guarded, "/generate", body) for _ in range(3)]
        assert _streamed(guarded) == expected
        answers = [each.result() for each in asked]
        over.set()
    assert [each.status_code for each in answers] == [400] * 3, answers[0].text
    assert all("GrammarTooSlowError" in each.text for each in answers)
    assert gaps.result() < MOST_GAP_S
    assert _streamed(guarded) == expected


def _longest_gap(guarded: Guarded, over: threading.Event) -> float:
    """Of streams that follow each other."""
    longest = 0.0
    while not over.is_set():
        longest = max(longest, _gap(guarded))
    return longest


def _gap(guarded: Guarded) -> float:
    """The longest wait for an event of a stream, in seconds."""
    longest, headers = 0.0, {"Authorization": f"Bearer {TENANT_KEY}"}
    url = guarded.server.url + "/generate"
    with requests.post(url, json=STREAMED, headers=headers, stream=True, timeout=60) as answer:
        last = time.monotonic()
        for _ in answer.iter_content(None):
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    return longest
