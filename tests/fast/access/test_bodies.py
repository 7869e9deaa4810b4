"""What a body may hold; nothing else gets further than an error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.access import bodies, sampling
from sgl_esft.access.bodies import Ask, BodyRules, ModelBounds
from sgl_esft.errors import BadBodyError, BodyTooLargeError, HeadersTooLargeError

BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
RULES = BodyRules()


def ask(body: Any, rules: BodyRules = RULES) -> Ask:
    raw = json.dumps(body).encode()
    return bodies.check_client_body(bodies.parse(raw), len(raw), rules, BOUNDS)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 1}}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 9223372036854775808}',
        b'{"a": [-9223372036854775809, 1]}',
        b'{"a": [1, 9223372036854775808, 2]}',
        b'{"a": [1, "x", 9223372036854775808]}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        b'{"a": "\xff"}',
        nested(33),
        nested(100_000),
        b'{"a": ' + nested(32) + b"}",
        b"{} {}",
    ],
)
def test_not_parsed(raw: bytes) -> None:
    with pytest.raises(BadBodyError):
        bodies.parse(raw)


@pytest.mark.parametrize(
    "raw",
    [b"{}", b"[]", b"7", b'"x"', b"null", nested(32), b'{"a": [9223372036854775807, -1.5e300]}'],
)
def test_parsed(raw: bytes) -> None:
    assert bodies.parse(raw) == json.loads(raw)


TEXT = {"text": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"n": 5_000_000}}, "n must be a whole number from 0 to 128"),
    ({"sampling_params": {"n": -1}}, "n must be"),
    ({"sampling_params": [{"n": 1}, {"n": 129}]}, "n must be"),
    ({"n": "5000000"}, "n must be"),
    ({"n": 1.5}, "n must be"),
    ({"n": {"a": 1}}, "n must be"),
    ({"best_of": 1 << 40}, "best_of must be"),
    ({"max_tokens": 1001}, "max_tokens must be a whole number from 0 to 1000"),
    ({"max_completion_tokens": -1}, "max_completion_tokens must be"),
    ({"sampling_params": {"max_new_tokens": 1 << 62}}, "max_new_tokens must be"),
    ({"sampling_params": {"min_new_tokens": 1001}}, "min_new_tokens must be"),
    ({"options": {"num_predict": 1001}}, "num_predict must be"),
    ({"options": {"num_predict": -1}}, "num_predict must be a whole number from 0 to 1000"),
    ({"prompt": "x", "n": 128, "num_predict": -2}, "num_predict must be"),
    ({"top_logprobs_num": 1_000_000_000}, "top_logprobs_num must be"),
    ({"top_logprobs_num": [1, 101]}, "top_logprobs_num must be"),
    ({"top_logprobs": 101}, "top_logprobs must be"),
    ({"logprobs": 101}, "logprobs must be"),
    ({"logprob_start_len": -2}, "logprob_start_len must be"),
    ({"top_k": -2}, "top_k must be"),
    ({"top_k": (1 << 30) + 1}, "top_k must be"),
    ({"input_ids": [1, 300]}, "input_ids: a token id must be from 0 to 299"),
    ({"input_ids": [-1]}, "input_ids: a token id"),
    ({"input_ids": [[1], [2, 300]]}, "input_ids: a token id"),
    ({"input_ids": [1.0, 300.0]}, "input_ids: a token id"),
    ({"prompt": [1, 300]}, "prompt: a token id"),
    ({"tokens": [300]}, "tokens: a token id"),
    ({"sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids: a token id"),
    ({"token_ids_logprob": [[300]]}, "token_ids_logprob: a token id"),
    ({"input_ids": ["1"]}, "input_ids: a token id"),
    ({"input_ids": [1, "-5"]}, "input_ids: a token id"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids: a token id"),
    ({"stop_token_ids": "1"}, "stop_token_ids: a token id"),
    ({"token_ids_logprob": ["1"]}, "token_ids_logprob: a token id"),
    ({"label_token_ids": [["1"]]}, "label_token_ids: a token id"),
    ({"prompt": [1, "999999"]}, "prompt: a token id"),
    ({"prompt": ["999999", 1]}, "prompt: a token id"),
    ({"prompt": [True, "999999"]}, "prompt: a token id"),
    ({"prompt": [["999999"]]}, "prompt: a token id"),
    ({"prompt": [[1], ["999999"]]}, "prompt: a token id"),
    ({"items": [["-1"]]}, "items: a token id"),
    ({"query": [1, "999999"]}, "query: a token id"),
    ({"input": [1, {"a": 1}]}, "input: a token id"),
    ({"logit_bias": {"300": 1}}, "logit_bias: a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: a token id"),
    ({"logit_bias": {"²": 1}}, "logit_bias: a token id"),
    ({"logit_bias": {" 1": 1}}, "logit_bias: a token id"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "300 entries"),
    ({"logit_bias": [1]}, "300 entries"),
    ({"custom_logit_processor": "{}"}, "--enable-custom-logit-processor"),
    ({"custom_logit_processor": [None, "x"]}, "--enable-custom-logit-processor"),
    ({"lora_id": "00ff"}, "lora_id: not for clients"),
    ({"extra_key": "00ff"}, "extra_key: not for clients"),
    ({"http_worker_ipc": "ipc://x"}, "http_worker_ipc: not for"),
    ({"encoder_urls": ["http://x"]}, "encoder_urls: not for"),
    ({"bootstrap_room": 0}, "bootstrap_room: not for"),
    ({"input_embeds": [[0.5]]}, "input_embeds: not for"),
    ({"token_indices_to_pool": [1 << 40]}, "token_indices_to_pool: not for"),
    ({"multi_item_delimiter_indices": [[9]]}, "multi_item_delimiter_indices: not for"),
    ({"query_embed_overrides": [[0.5]]}, "query_embed_overrides: not for"),
    ({"item_embed_overrides": [[[0.5]]]}, "item_embed_overrides: not for"),
    ({"embed_overrides": [[[0.5]]]}, "embed_overrides: not for"),
    ({"embed_override_token_id": -1}, "embed_override_token_id: not for"),
    ({"image_data": "http://169.254.169.254/"}, "image_data: not for"),
    ({"parameters": {"lora_id": "x"}}, "lora_id: not for"),
    ({"messages": [{"content": [{"type": "image_url"}]}]}, "messages: the model takes text"),
    ({"input": [{"content": [{"type": "input_image"}]}]}, "input: the model takes text"),
    ({"sampling_params": {"regex": "a" * 1025}}, "regex may have 1024 characters"),
    ({"stop": "a" * 1025}, "stop may have 1024"),
    ({"stop": ["a"] * 17}, "stop has too many"),
    ({"stop": ["a", "b" * 1025]}, "stop may have 1024"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences has too many"),
    ({"stop_sequences": ["a" * 1025]}, "stop_sequences may have 1024"),
    ({"response_format": {"schema": "a" * (1 << 16)}}, "response_format may have 65536"),
    ({"text": {"format": {"schema": "a" * (1 << 16)}}}, "text may have 65536"),
    ({"rid": "a" * 257}, "rid may have 256"),
    ({"rid": ["a"]}, "rid is a text, or with a list"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid is a text, or with a list"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "a list of different texts"),
    ({"input_ids": []}, "input_ids must not be empty"),
    ({"prompt": [[1], []]}, "prompt must not be empty"),
    ({"stop_regex": "(a+)+"}, "stop_regex may match 256 characters"),
    ({"sampling_params": [{"n": 2}, {"temperature": "1"}]}, "temperature must be a number"),
    ({"sampling_params": {"n": 2.0}}, "n must be a whole number"),
    ({"sampling_params": {"stop_regex_strs": ["(a+)+"]}}, "stop_regex_strs: not for clients"),
    ({"session_params": []}, "session_params is an object"),
    ({"session_params": {"offset": True}}, "session_params is an object"),
    ({"session_params": {"else": "x"}}, "session_params is an object"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "--trust-request-chat-template"),
    ({"chat_template_kwargs": {"padding": "max_length"}}, "holds values of the template"),
    ({"questions": [{"type": "yes_no"}] * 257}, "256 prompts"),
    ({"questions": {str(number): {} for number in range(257)}}, "256 prompts"),
    ({"text": ["x"] * 257}, "256 prompts"),
    ({"text": ["x"] * 256, "sampling_params": {"n": 5}}, "1024 sequences"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadBodyError, match=message):
        ask({**TEXT, **body})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": None, "top_logprobs": None, "logprobs": True, "stop": None, "logit_bias": None},
        {"custom_logit_processor": None, "lora_id": None, "image_data": [], "extra_key": ""},
        {"max_tokens": 1000, "top_k": -1, "logit_bias": {"299": -100}, "cache_salt": "x"},
        {"input_ids": [0, 299], "return_logprob": True, "logprob_start_len": -1},
        {"text": ["x", "y"], "sampling_params": [{"n": 2}, {"max_new_tokens": 3}]},
        {"text": ["x", "y"], "rid": ["a", "b"], "session_params": {"id": "a", "rid": None}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": None, "questions": None},
        {"top_logprobs_num": [1, None], "token_ids_logprob": [[1], None]},
        {"prompt": ["x", "1"], "items": ["999999"], "query": "999999", "input": "999999"},
        {"prompt": [[1, 2], [3]], "input": [{"role": "user", "content": ["999999"]}]},
        {"stop_sequences": ["a"] * 16, "text": "a" * (1 << 17), "response_format": {"type": "x"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": "x", "input": 7, "sampling_params": "x", "options": [1, "x"]},
        {"tools": [{"function": {"parameters": {"properties": {"n": {"maximum": 10**12}}}}}]},
    ],
)
def test_taken(body: dict[str, Any]) -> None:
    ask({**TEXT, **body})


def test_what_a_server_can_be_started_to_take() -> None:
    rules = BodyRules(takes_logit_processors=True, takes_templates=True, takes_media=True)
    ask({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, rules)
    ask({**TEXT, "custom_logit_processor": "x", "image_data": "x"}, rules)
    ask({"messages": [{"content": [{"type": "image_url"}]}]}, rules)


@pytest.mark.parametrize(
    ("body", "sequences", "tokens"),
    [
        ({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}, 1, 8),
        ({"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 5, "n": 3}}, 6, 33),
        ({"prompt": [1, 2], "max_tokens": 10, "n": 2}, 2, 22),
        ({"input_ids": [1]}, 1, 129),
        ({"text": ["x", "y"], "sampling_params": [{"n": 2}, {}]}, 4, None),
        ({"messages": [{"content": "x"}, {"content": "y"}], "max_tokens": 1}, 1, None),
        ({"input": [{"role": "user"}, {"role": "user"}]}, 1, None),
        ({"input": ["a", "b", "c"]}, 3, None),
        ({"input": "x", "questions": [{}, {}]}, 2, None),
    ],
)
def test_what_is_asked_for(body: Any, sequences: int, tokens: int | None) -> None:
    found = ask(body)
    assert found.sequences == sequences
    assert found.tokens == tokens or tokens is None


@pytest.mark.parametrize("field", bodies._NEW_TOKENS)
def test_no_field_takes_tokens_back(field: str) -> None:
    """A reservation below zero would let a key use more than it may."""
    assert bodies._RANGES[field] == (0, "context_length")


def test_sizes() -> None:
    bodies.check_size(RULES.max_bytes, RULES)
    with pytest.raises(BodyTooLargeError, match="2097152 bytes; --max-body-bytes"):
        bodies.check_size(RULES.max_bytes + 1, RULES)
    bodies.check_headers([(b"a", b"b")] * 100)
    with pytest.raises(HeadersTooLargeError, match="100 headers"):
        bodies.check_headers([(b"a", b"b")] * 101)
    bodies.check_headers([(b"a", b"b" * 16383)])
    with pytest.raises(HeadersTooLargeError, match="16384 bytes"):
        bodies.check_headers([(b"a", b"b" * 16384)])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["image_url", "9" * 30]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
FIELDS = sorted(
    {
        *bodies._RANGES,
        *bodies._INTERNAL,
        *bodies._MEDIA,
        *sampling.FIELDS,
        *bodies._TEXT_LENGTHS,
        *bodies._NESTED,
        "logit_bias",
        "messages",
        "text",
    }
)
PARAMETERS = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6)


@given(PARAMETERS, st.none() | PARAMETERS | st.lists(PARAMETERS, max_size=3))
def test_whatever_a_client_sends_is_taken_or_refused(outer: Any, inner: Any) -> None:
    body = {**outer, "sampling_params": inner}
    try:
        found = ask(body)
    except BadBodyError:
        return
    assert 1 <= found.sequences <= bodies.MAX_SEQUENCES
    assert found.tokens >= 1
    for field in bodies._RANGES:
        for value in bodies._flat(body.get(field)):
            assert value is None or -2 <= value <= 1 << 30


@given(st.binary(max_size=60) | st.text('[]{}",:1e9-.n ul', max_size=30).map(str.encode))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadBodyError):
        assert bodies.parse(raw) == json.loads(raw)


@given(st.integers(1, 40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_depth_is_counted_through_lists_and_objects(depth: int, kinds: list[bool]) -> None:
    value: Any = 1
    for is_list in kinds[:depth]:
        value = [value] if is_list else {"a": value}
    raw = json.dumps(value).encode()
    if depth <= bodies.MAX_DEPTH:
        assert bodies.parse(raw) == value
    else:
        with pytest.raises(BadBodyError, match="32 levels deep"):
            bodies.parse(raw)
