"""What a body may hold; nothing else gets further than an error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_esft.access import bodies
from sgl_esft.access.bodies import FIELDS, SAMPLING_INTERNAL, TYPES, Ask, BodyRules, ModelBounds
from sgl_esft.errors import BadBodyError
from sgl_esft.http.body import MAX_DEPTH, parse

BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
RULES = BodyRules()


def ask(body: Any, rules: BodyRules = RULES) -> Ask:
    raw = json.dumps(body).encode()
    return bodies.check_client_body(parse(raw), len(raw), rules, BOUNDS)


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
        parse(raw)


@pytest.mark.parametrize(
    "raw",
    [b"{}", b"[]", b"7", b'"x"', b"null", nested(32), b'{"a": [9223372036854775807, -1.5e300]}'],
)
def test_parsed(raw: bytes) -> None:
    assert parse(raw) == json.loads(raw)


TEXT = {"text": "x"}
# Values out of a field's range; token ids that there are not; fields that are SGLang's own.
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "n": (-1, 1.5, "5000000", {"a": 1}),
    "best_of": (1 << 40,),
    "max_completion_tokens": (-1,),
    "top_logprobs_num": (1_000_000_000, [1, 101]),
    "top_logprobs": (101,),
    "logprobs": (101,),
    "logprob_start_len": (-2,),
    "top_k": (-2, (1 << 30) + 1),
}
NO_TOKEN_IDS: dict[str, tuple[Any, ...]] = {
    "input_ids": ([-1], [[1], [2, 300]], [1.0, 300.0], ["1"], [1, "-5"]),
    "prompt": ([1, 300], [1, "999999"], ["999999", 1], [True, "999999"]),
    "tokens": ([300],),
    "stop_token_ids": (["1"], "1"),
    "token_ids_logprob": ([[300]], ["1"]),
    "label_token_ids": ([["1"]],),
    "items": ([["-1"]],),
    "query": ([1, "999999"],),
    "input": ([1, {"a": 1}],),
    "logit_bias": ({"300": 1}, {"-1": 1}, {"²": 1}, {" 1": 1}),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({k: v}, f"{k} must be") for k, values in OUT_OF_RANGE.items() for v in values),
    *(({k: v}, f"{k}: a token id") for k, values in NO_TOKEN_IDS.items() for v in values),
    *(({name: "x"}, f"{name}: not for clients") for name in (*bodies.INTERNAL, "image_data")),
    ({"sampling_params": {"n": 5_000_000}}, "n must be an integer from 0 to 128"),
    ({"sampling_params": [{"n": 1}, {"n": 129}]}, "n must be"),
    ({"max_tokens": 1001}, "max_tokens must be an integer from 0 to 1000"),
    ({"sampling_params": {"max_new_tokens": 1 << 62}}, "max_new_tokens must be"),
    ({"sampling_params": {"min_new_tokens": 1001}}, "min_new_tokens must be"),
    ({"options": {"num_predict": 1001}}, "num_predict must be"),
    ({"options": {"num_predict": -1}}, "num_predict must be an integer from 0 to 1000"),
    ({"prompt": "x", "n": 128, "num_predict": -2}, "num_predict must be"),
    ({"input_ids": [1, 300]}, "input_ids: a token id must be from 0 to 299"),
    ({"sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids: a token id"),
    ({"prompt": [["999999"]]}, "prompt: a token id"),
    ({"prompt": [[1], ["999999"]]}, "prompt: a token id"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "300 entries"),
    ({"logit_bias": [1]}, "300 entries"),
    ({"custom_logit_processor": "{}"}, "--enable-custom-logit-processor"),
    ({"custom_logit_processor": [None, "x"]}, "--enable-custom-logit-processor"),
    ({"bootstrap_room": 0}, "bootstrap_room: not for"),
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
    ({"rid": ["a"]}, "rid is a string, or with a list"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid is a string, or with a list"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "a list of different strings"),
    ({"input_ids": []}, "input_ids must not be empty"),
    ({"prompt": [[1], []]}, "prompt must not be empty"),
    ({"stop_regex": "a"}, "it needs a server with --allow-stop-regex"),
    ({"sampling_params": {"stop_regex": ["a"]}}, "--allow-stop-regex"),
    ({"sampling_params": [{"n": 2}, {"temperature": "1"}]}, "temperature must be a number"),
    ({"sampling_params": {"stop_regex_strs": ["(a+)+"]}}, "stop_regex_strs: not for clients"),
    ({"sampling_params": {"n": 2.0}}, "n must be an integer"),
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
        {"stop_regex": None, "sampling_params": {"stop_regex": []}},
        {"stop_sequences": ["a"] * 16, "text": "a" * (1 << 17), "response_format": {"type": "x"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": "x", "input": 7, "sampling_params": "x", "options": [1, "x"]},
        {"tools": [{"function": {"parameters": {"properties": {"n": {"maximum": 10**12}}}}}]},
    ],
)
def test_taken(body: dict[str, Any]) -> None:
    ask({**TEXT, **body})


EVERYTHING = BodyRules(
    takes_logit_processors=True, takes_templates=True, takes_stop_regex=True, takes_media=True
)


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {**TEXT, "custom_logit_processor": "x", "sampling_params": {"custom_params": {"a": 1}}},
        {"messages": [{"content": [{"type": "image_url"}]}]},
        {**TEXT, "image_data": "x"},
        {**TEXT, "stop_regex": ["a" * 256, r"[.!?]\s+$"]},
    ],
)
def test_what_a_server_can_be_started_to_take(body: dict[str, Any]) -> None:
    ask(body, EVERYTHING)
    with pytest.raises(BadBodyError):
        ask(body)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        *((p, "must be a regular expression") for p in ("(", "*", "a{3,1}", "(" * 200, ["a", "("])),
        ("a" * 257, "may have 256"),
        (["a"] * 17, "too many"),
    ],
)
def test_patterns_that_are_none_or_too_long_or_too_many(pattern: object, message: str) -> None:
    with pytest.raises(BadBodyError, match=f"stop_regex .*{message}"):
        ask({**TEXT, "stop_regex": pattern}, EVERYTHING)


GOOD: dict[str, list[Any]] = {
    "a number": [0, 0.5, -1.5],
    "an integer": [0, 7],
    "a boolean": [True, False],
    "a string": ["", "x"],
    "a string or a list of strings": ["x", [], ["x", "y"]],
    "a list of integers": [[], [1, 2]],
    "an object of numbers": [{}, {"1": 0.5, "2": 1}],
}
SCALARS: list[Any] = [0, 0.5, True, "x"]
LISTS: list[Any] = [["x"], [1], [None], [True], [[1]]]
ANYTHING = [*SCALARS, *LISTS, {"1": "x"}, {"1": 0.5}, {"1": None}]


@pytest.mark.parametrize("field", sorted(name for name in FIELDS if FIELDS[name].type))
def test_each_sampling_parameter_takes_its_type_only(field: str) -> None:
    """SGLang sends them to its scheduler as they came."""
    kind = FIELDS[field].type
    for value in (*GOOD[kind], None):
        ask({"sampling_params": {field: value, "unknown": {}}}, EVERYTHING)
    refused = [value for value in ANYTHING if not TYPES[kind](value)]
    assert len(refused) >= 5
    for value in refused:
        with pytest.raises(BadBodyError, match=f"{field} must be {kind}"):
            ask({"sampling_params": {field: value}}, EVERYTHING)


@pytest.mark.parametrize("field", sorted(SAMPLING_INTERNAL))
def test_sampling_parameters_of_sglangs_own_are_refused(field: str) -> None:
    for value in ("x", [], ""):
        with pytest.raises(BadBodyError, match=f"{field}: not for clients"):
            ask({"sampling_params": {field: value}})
    ask({"sampling_params": {field: None}})


def test_every_sampling_parameter_of_sglangs_is_known() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    typed = {name for name, field in FIELDS.items() if field.type}
    assert fields - typed - {*SAMPLING_INTERNAL, *bodies.INTERNAL} == set()
    assert fields >= {*SAMPLING_INTERNAL}


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


@pytest.mark.parametrize("field", bodies.NEW_TOKENS)
def test_no_field_takes_tokens_back(field: str) -> None:
    """A reservation below zero would let a key use more than it may."""
    assert FIELDS[field].range == (0, "context_length")


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
NAMES = sorted({*FIELDS, *bodies.INTERNAL, *bodies.MEDIA, *bodies.NESTED, "messages"})
PARAMETERS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)


@given(PARAMETERS, st.none() | PARAMETERS | st.lists(PARAMETERS, max_size=3))
def test_whatever_a_client_sends_is_taken_or_refused(outer: Any, inner: Any) -> None:
    body = {**outer, "sampling_params": inner}
    try:
        found = ask(body)
    except BadBodyError:
        return
    assert 1 <= found.sequences <= bodies.MAX_SEQUENCES
    assert found.tokens >= 1
    for name, field in FIELDS.items():
        for value in bodies._flat(body.get(name)):
            assert field.range is None or value is None or -2 <= value <= 1 << 30


@given(st.binary(max_size=60) | st.text('[]{}",:1e9-.n ul', max_size=30).map(str.encode))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadBodyError):
        assert parse(raw) == json.loads(raw)


@given(st.integers(1, 40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_depth_is_counted_through_lists_and_objects(depth: int, kinds: list[bool]) -> None:
    value: Any = 1
    for is_list in kinds[:depth]:
        value = [value] if is_list else {"a": value}
    raw = json.dumps(value).encode()
    if depth <= MAX_DEPTH:
        assert parse(raw) == value
    else:
        with pytest.raises(BadBodyError, match="32 levels deep"):
            parse(raw)
