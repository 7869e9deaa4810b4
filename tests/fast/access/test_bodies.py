"""What a body may hold; nothing else gets further than an error."""

from __future__ import annotations

import contextlib
import json
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from sgl_esft.access import ask as asking
from sgl_esft.access import bodies
from sgl_esft.access.ask import Ask
from sgl_esft.errors import BadBodyError
from sgl_esft.fields import request_classes, table
from sgl_esft.fields.described import CONTEXT, DESCRIBED, INTERNAL, MAX_PARTS, MEDIA
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.http.body import MAX_DEPTH, MAX_OBJECTS, parse
from tests.support.request_fuzz.cases import BODIES

BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
RULES = BodyRules()
DEEP = "((a{1,9}){1,9}){1,9}"
LENGTHS = {"properties": {f"p{number}": {"maxLength": number} for number in range(33)}}
EQUAL = json.dumps([{"maxLength": 9, "pattern": "a{9}"}] * 99)
ESCAPED = json.dumps(LENGTHS).replace("maxL", "max\\u004c")


def ask(body: Any, rules: BodyRules = RULES, path: str | None = None) -> Ask:
    raw = json.dumps(body).encode()
    path = path or route_of(body)
    return bodies.check_client_body(path, parse(raw), len(raw), rules, BOUNDS)


def route_of(body: Any) -> str:
    """The first route that has all these fields; refused ones are among them."""
    first = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses")
    paths = dict.fromkeys((*first, *table.routes()))
    return next(path for path in paths if body.keys() <= table.routes()[path].fields.keys())


def with_text(body: dict[str, Any]) -> dict[str, Any]:
    """With a prompt, where it is for /generate and has none."""
    is_for_it = body.keys() <= table.routes()["/generate"].fields.keys()
    return {**TEXT, **body} if is_for_it and "input_ids" not in body else body


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
    "logprob_start_len": (-2,),
    "top_k": (-2, (1 << 30) + 1),
    "input_ids": (["1"], [1, "-5"], [1.0], [True]),
    "prompt": ([1, "9"], ["9", 1], [True, "9"], [["9"]], [[1], ["9"]]),
    "label_token_ids": ([["1"]],),
    "items": ([1],),
    "query": ([1, "9"],),
    "priority": (1 << 31, (1 << 63) - 1, -(1 << 63), 1.5, "1", True),
    "max_thinking_tokens": (-5,),
}
NO_TOKEN_IDS: dict[str, tuple[Any, ...]] = {
    "input_ids": ([-1], [[1], [2, 300]], [1, 300]),
    "prompt": ([1, 300], [[300]]),
    "tokens": ([300],),
    "token_ids_logprob": ([[300]],),
    "logit_bias": ({"300": 1}, {"-1": 1}, {"²": 1}, {" 1": 1}),
}
NOT_SET = "not for clients to set"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({k: v}, f"{k} must be") for k, values in OUT_OF_RANGE.items() for v in values),
    *(({k: v}, f"{k}: a token id") for k, values in NO_TOKEN_IDS.items() for v in values),
    ({"image_data": "x"}, f"image_data {NOT_SET}"),
    ({"sampling_params": {"n": 5_000_000}}, "n must be an integer from 0 to 128"),
    ({"sampling_params": [{"n": 1}, {"n": 129}]}, "n must be"),
    ({"max_tokens": 1001}, "max_tokens must be an integer from 0 to 1000"),
    ({"sampling_params": {"max_new_tokens": 1 << 62}}, "max_new_tokens must be"),
    ({"sampling_params": {"min_new_tokens": 1001}}, "min_new_tokens must be"),
    ({"sampling_params": {"stop_token_ids": [300]}}, "stop_token_ids: a token id"),
    ({"sampling_params": {"stop_token_ids": ["1"]}}, "stop_token_ids must be a list of integers"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "300 entries"),
    ({"logit_bias": [1]}, "logit_bias must be an object of numbers"),
    ({"logit_bias": {"1": 3e38}}, "logit_bias must be a number from"),
    ({"sampling_params": {"repetition_penalty": 1e-40}}, "repetition_penalty must be"),
    ({"sampling_params": {"temperature": 1e39}}, "temperature must be"),
    ({"custom_logit_processor": "{}"}, "--enable-custom-logit-processor"),
    ({"custom_logit_processor": [None, "x"]}, "--enable-custom-logit-processor"),
    ({"bootstrap_room": 0}, "bootstrap_room: not for"),
    ({"custom_labels": {"a": "b"}}, "custom_labels: not for"),
    ({"custom_params": {"thinking_budget": -5}}, "thinking_budget must be an integer from 0"),
    ({"sampling_params": {"custom_params": {"thinking_budget": -5}}}, "thinking_budget must be"),
    ({"custom_params": {"__sglang_reasoning_in_grammar": True}}, "is not known here"),
    ({"custom_params": {"mine": 1}}, '"mine" is not known here'),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text"),
    ({"input": [{"text": "x", "image": "x"}], "encoding_format": "float"}, f"image {NOT_SET}"),
    ({"input": [{"content": [{"type": "input_image"}]}]}, "input: the model takes text"),
    ({"messages": [{"rol": "user"}]}, '"rol" is not known here; did you mean "role"'),
    ({"tools": [{"function": {"strikt": True}}]}, 'did you mean "strict"'),
    ({"state": "x", "questions": {"a": {"criterion": "x"}}}, 'did you mean "criteria"'),
    ({"stream_options": {"include_usag": True}}, 'did you mean "include_usage"'),
    ({"response_format": {"json_shema": {}}}, 'did you mean "json_schema"'),
    ({"sampling_params": {"regex": "a" * 1025}}, "regex may have 1024 characters"),
    ({"sampling_params": {"regex": DEEP}}, "regex may have bounded repeats, such as"),
    ({"sampling_params": {"ebnf": f'root ::= "x" {DEEP}'}}, "ebnf may have bounded repeats"),
    ({"sampling_params": {"json_schema": f'{{"pattern": "{DEEP}"}}'}}, "json_schema may have"),
    ({"sampling_params": {"ebnf": "root ::= " + '"a"{1,9} ' * 33}}, "ebnf may have 32 bounded"),
    ({"sampling_params": {"json_schema": json.dumps(LENGTHS)}}, "json_schema may have 32 bounded"),
    ({"sampling_params": {"json_schema": ESCAPED}}, "json_schema may have 32 bounded"),
    ({"response_format": {"json_schema": {"schema": LENGTHS}}}, "_format may have 32 bounded"),
    (
        {"response_format": {"json_schema": {"schema": {"pattern": DEEP}}}},
        "_format may have bounded",
    ),
    ({"sampling_params": {"stop": "a" * 1025}}, "stop may have 1024"),
    ({"stop": ["a"] * 17}, "stop may have 16 entries"),
    ({"stop": ["a", "b" * 1025]}, "stop may have 1024"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences may have 16 entries"),
    ({"stop_sequences": ["a" * 1025]}, "stop_sequences may have 1024"),
    ({"response_format": {"json_schema": {"schema": {"a": "a" * (1 << 16)}}}}, "may have 65536"),
    ({"rid": "a" * 257}, "rid may have 256"),
    ({"rid": ["a"]}, "rid: a list is for a list of prompts"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid: a list is for a list of prompts"),
    ({"prompt": [1, 2], "rid": ["a"]}, "rid: a list is for a list of prompts"),
    ({"input_ids": [1], "return_hidden_states": [False]}, "return_hidden_states: a list is for"),
    ({"text": ["x", "y"], "return_hidden_states": ["last"]}, "return_hidden_states: a list is for"),
    ({"text": "x", "input_ids": [[0]]}, "either text or input_ids"),
    ({"sampling_params": {"n": None}}, "n must be an integer; leave it out"),
    ({"top_logprobs_num": [1]}, "top_logprobs_num: a list is for"),
    ({"token_ids_logprob": [[1]]}, "token_ids_logprob: a list is for"),
    ({"messages": [], "cache_salt": ["a"]}, "cache_salt: a list is for"),
    ({"sampling_params": [{}]}, "sampling_params: a list is for"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "a list of different strings"),
    ({"input_ids": []}, "input_ids must not be empty"),
    ({"prompt": [[1], []]}, "prompt must not be empty"),
    ({"stop_regex": "a"}, "it needs a server with --allow-stop-regex"),
    ({"sampling_params": {"stop_regex": ["a"]}}, "--allow-stop-regex"),
    ({"sampling_params": [{"n": 2}, {"temperature": "1"}]}, "temperature must be a number"),
    ({"sampling_params": {"stop_regex_strs": ["(a+)+"]}}, "stop_regex_strs: not for clients"),
    ({"sampling_params": {"n": 2.0}}, "n must be an integer"),
    ({"session_params": []}, "session_params must be an object"),
    ({"session_params": {"offset": True}}, "offset must be an integer"),
    ({"session_params": {"else": "x"}}, '"else" is not known here'),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "--trust-request-chat-template"),
    ({"chat_template_kwargs": {"padding": "max_length"}}, "holds values of the template"),
    ({"questions": [{"type": "yes_no"}] * 257}, "256 prompts"),
    ({"state": "x", "questions": {str(number): {} for number in range(257)}}, "256 prompts"),
    ({"text": ["x"] * 257}, "256 prompts"),
    ({"text": ["x"] * 256, "sampling_params": {"n": 5}}, "1024 sequences"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadBodyError, match=message):
        ask(with_text(body))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": None, "logprobs": True, "top_logprobs": None, "stop": None, "logit_bias": None},
        {"custom_logit_processor": None, "lora_id": None, "image_data": [], "extra_key": None},
        {"max_tokens": 1000, "top_k": -1, "logit_bias": {"299": -100}, "cache_salt": "x"},
        {"max_tokens": 16.0, "temperature": 1},
        {"sampling_params": {"regex": "[a-z]{1,9}" * 32}},
        {"sampling_params": {"json_schema": json.dumps(LENGTHS).replace("32", "31")}},
        {"sampling_params": {"json_schema": EQUAL}},
        {"sampling_params": {"regex": "((25[0-5]|1?[0-9]{1,2})[.]){3}"}},
        {"input_ids": [0, 299], "return_logprob": True, "logprob_start_len": -1},
        {"text": ["x", "y"], "sampling_params": [{"n": 2}, {"max_new_tokens": 3}]},
        {"text": ["x", "y"], "rid": ["a", "b"], "session_params": {"id": "a", "rid": None}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": None, "questions": None},
        {"text": ["x", "y"], "top_logprobs_num": [1, 2], "token_ids_logprob": [[1], [2]]},
        {"token_ids_logprob": [1, 2], "return_hidden_states": "last"},
        {"text": ["x"], "rid": ["a"], "return_logprob": [True]},
        {"priority": -(1 << 31), "model": "x", "adapter": ["any", 7]},
        {"prompt": ["x", "1"]},
        {"items": ["999999"], "query": "999999"},
        {"input": "999999"},
        {"prompt": [[1, 2], [3]]},
        {"input": [{"role": "user", "content": ["999999"]}]},
        {"sampling_params": {"stop_regex": []}},
        {"stop_regex": None},
        {"stop_sequences": ["a"] * 16},
        {"text": "a" * (1 << 17)},
        {"custom_params": {"thinking_budget": 1000}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "annotations": []}]},
        {"tools": [{"function": {"parameters": {"properties": {"n": {"maximum": 10**12}}}}}]},
        {"input": "x", "tools": [{"type": "file_search", "vector_store_ids": ["a"]}]},
    ],
)
def test_taken(body: dict[str, Any]) -> None:
    ask(with_text(body))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_route_of_two_classes_takes_the_fields_of_each(path: str) -> None:
    ask({"prompt": "x", "add_special_tokens": False}, path=path)
    ask({"messages": [{"role": "user", "content": "x"}], "user": "x"}, path=path)


def test_an_object_of_several_classes_takes_the_fields_of_each() -> None:
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": False}
    contents = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    ask({"messages": contents, "max_tokens": 1}, path="/v1/messages")


SAMPLING = (request_classes.part_classes()["sampling_params"],)
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
        {"stop_regex": ["a" * 256, r"[.!?]\s+$"]},
    ],
)
def test_what_a_server_can_be_started_to_take(body: dict[str, Any]) -> None:
    ask(body, EVERYTHING)
    with pytest.raises(BadBodyError):
        ask(body)


def test_the_fuzzers_small_bodies_are_right() -> None:
    """One that is refused would be refused whatever else is put into it."""
    for path, body in BODIES.items():
        ask(body, path=path)
        kind, *_ = request_classes.route_classes().get(path, (None,))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind.model_validate({**body})  # SGLang fills it


PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": [PICTURE]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"system": [PICTURE]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PICTURE]}]}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [RESULT]}]},
        ),
        ("/v1/responses", {"input": [{"type": "input_image", "image_url": "x"}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": [PICTURE]}]}),
    ],
)
def test_media_are_refused_wherever_they_are(path: str, body: dict[str, Any]) -> None:
    ask(body, EVERYTHING, path)
    with pytest.raises(BadBodyError, match=f"{next(iter(body))}: the model takes text only"):
        ask(body, path=path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        *((p, "must be a regular expression") for p in ("(", "*", "a{3,1}", "(" * 200, ["a", "("])),
        ("a" * 257, "may have 256"),
        (["a"] * 17, "16 entries"),
    ],
)
def test_patterns_that_are_none_or_too_long_or_too_many(pattern: object, message: str) -> None:
    with pytest.raises(BadBodyError, match=f"stop_regex .*{message}"):
        ask({"stop_regex": pattern}, EVERYTHING)


STRAY = {**dict.fromkeys(INTERNAL, "x"), "is_normalized": True}


@pytest.mark.parametrize("field", INTERNAL)
def test_fields_of_sglangs_own_are_refused_wherever_they_are(field: str) -> None:
    found = 0
    for path, part in table.routes().items():
        if field in part.fields:
            found += 1
            with pytest.raises(BadBodyError, match=f"{field}: {NOT_SET}"):
                ask({field: STRAY[field]}, EVERYTHING, path)
            ask({field: None}, path=path)
    if field in table.part_of(SAMPLING).fields:
        found += 1
        with pytest.raises(BadBodyError, match=f"{field}: {NOT_SET}"):
            ask({"sampling_params": {field: STRAY[field]}}, EVERYTHING)
    assert found


@pytest.mark.parametrize(
    ("body", "sequences", "tokens"),
    [
        ({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}, 1, 8),
        ({"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 5, "n": 3}}, 6, 33),
        ({"prompt": [1, 2], "max_tokens": 10, "n": 2}, 2, 22),
        ({"input_ids": [1]}, 1, 129),
        ({"input_ids": [1], "sampling_params": {"beam_width": 4, "max_new_tokens": 1}}, 4, 5),
        ({"prompt": [1], "best_of": 3, "max_tokens": 1}, 3, 4),
        ({"messages": [], "max_completion_tokens": 1000}, 1, 1012),
        ({"input": "x", "max_output_tokens": 1000}, 1, 1011),
        ({"text": "x" * 4000}, 1, 1132),  # a token for each four bytes, and what may be generated
        ({"text": ["x", "y"], "sampling_params": [{"n": 2}, {}]}, 4, None),
        ({"messages": [{"content": "x"}, {"content": "y"}], "max_tokens": 1}, 1, None),
        ({"input": [{"role": "user"}, {"role": "user"}]}, 1, None),
        ({"input": ["a", "b", "c"], "encoding_format": "float"}, 3, None),
        ({"input": "x", "questions": [{}, {}]}, 2, None),
        ({"items": [[1, 2], [3]]}, 2, 3 + 2 * 128),
    ],
)
def test_what_is_asked_for(body: Any, sequences: int, tokens: int | None) -> None:
    found = ask(body)
    assert found.sequences == sequences
    assert found.tokens == tokens or tokens is None


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_objects_to_embed_are_prompts_and_messages_are_one(path: str) -> None:
    part = {"text": "x"} if path == "/v1/embeddings" else {"role": "user", "content": "x"}
    assert ask({"input": [part] * 3}, path=path).sequences == (3 if "text" in part else 1)
    if "text" in part:
        ask({"input": [part] * 2, "rid": ["a", "b"]}, path=path)
        ask({"input": [part], "rid": "a"}, path=path)  # one alone is no batch to SGLang
        with pytest.raises(BadBodyError, match="rid: a list is for a list of prompts"):
            ask({"input": [part], "rid": ["a"]}, path=path)
        with pytest.raises(BadBodyError, match="256 prompts"):
            ask({"input": [part] * 257}, path=path)


def test_pairs_of_texts_are_charged_by_their_bytes() -> None:
    """They are lists in a list, as prompts of token ids are."""
    pairs = {"text": [["x" * 4000, "y"]], "is_cross_encoder_request": True}
    assert ask(pairs, path="/encode").prompt_tokens > 1000


@pytest.mark.parametrize("field", asking.NEW_TOKENS)
def test_no_field_takes_tokens_back(field: str) -> None:
    """A reservation below zero would let a key use more than it may."""
    assert DESCRIBED[field].integers == (0, CONTEXT)


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
NAMES = sorted({*DESCRIBED, *INTERNAL, *MEDIA})
PARAMETERS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)


@given(
    st.sampled_from(["/generate", "/v1/chat/completions", "/v1/messages", "/v1/score"]),
    PARAMETERS,
    st.none() | PARAMETERS | st.lists(PARAMETERS, max_size=3),
)
def test_whatever_a_client_sends_is_taken_or_refused(path: str, outer: Any, inner: Any) -> None:
    known = table.routes()[path].fields
    body = {name: value for name, value in outer.items() if name in known}
    if "sampling_params" in known:
        body["sampling_params"] = inner
    try:
        found = ask(body, path=path)
    except BadBodyError:
        return
    assert 1 <= found.sequences <= asking.MAX_SEQUENCES
    assert found.tokens >= 1


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


ARGUMENTS = set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
# The template's own, and those that are asked for in fields of their own.
OF_TEMPLATES = {"self", "kwargs", "chat_template", "documents", "continue_final_message"}


@pytest.mark.parametrize("name", sorted(ARGUMENTS - OF_TEMPLATES))
def test_a_template_is_given_no_arguments_of_the_tokenizer(name: str) -> None:
    with pytest.raises(BadBodyError, match="holds values of the template"):
        ask({"messages": [], "chat_template_kwargs": {name: True}}, EVERYTHING)


@pytest.mark.parametrize("field", ["messages", "input"])
@pytest.mark.parametrize(
    "kind",
    [
        *("audio_url", "document", "file", "image", "image_url"),
        *("input_audio", "input_file", "input_image", "video_url"),
    ],
)
def test_parts_of_messages_that_are_no_text(kind: str, field: str) -> None:
    path = {"messages": "/v1/chat/completions", "input": "/v1/responses"}[field]
    with pytest.raises(BadBodyError, match=f"{field}: the model takes text only"):
        ask({field: [{"role": "user", "content": [{"type": kind}]}]}, path=path)


def of_parts(num: int) -> list[tuple[str, dict[str, Any]]]:
    parts = [{"type": "text", "text": "x"}] * num
    return [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * (num + 1)}),
        ("/v1/messages", {"messages": [{"role": "user", "content": parts}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": parts}]}),
        ("/v1/responses", {"input": [0] * (num + 1)}),
        ("/v1/chat/completions", {"messages": [], "tools": [{}] * (num + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "annotations": parts}]}),
    ]


@pytest.mark.parametrize("at", range(len(of_parts(0))))
def test_what_is_tried_as_many_classes_is_bounded(at: int) -> None:
    """Of 100,000 empty parts of a message, the route took 41 s, in which nobody else was served."""
    path, most = of_parts(MAX_PARTS - 1)[at]
    ask(most, path=path)
    path, more = of_parts(MAX_PARTS)[at]
    with pytest.raises(BadBodyError, match=f"{MAX_PARTS} messages, parts of messages and tools"):
        ask(more, path=path)


def test_the_objects_of_a_body_are_bounded() -> None:
    most = {"prompt": [{}] * (MAX_OBJECTS - 1)}
    parse(json.dumps(most).encode())
    with pytest.raises(BadBodyError, match=f"{MAX_OBJECTS} objects"):
        parse(json.dumps({"prompt": [{}] * MAX_OBJECTS}).encode())


@pytest.mark.parametrize("path", ["/classify", "/encode", "/v1/embeddings", "/v1/classify"])
def test_prompts_to_embed_have_an_id_each(path: str) -> None:
    name = "text" if path in ("/classify", "/encode") else "input"
    ask({name: ["x", "y"], "rid": ["a", "b"]}, path=path)
    ask({name: "x", "rid": "a"}, path=path)
    with pytest.raises(BadBodyError, match="rid: a list of prompts needs a list"):
        ask({name: ["x", "y"], "rid": "a"}, path=path)
