"""What a body of a route for clients may hold: one table of fields, checked before it costs work.

    document (http/body.py) --[check_client_body]--> every field of FIELDS, in it and in its parts
                            --> Ask: what it would use at most, for the key's limits

A number that becomes an index, a count or a size on the device has bounds here: a worker that
meets a wrong one ends, and every client's requests with it. Types are checked in sampling
parameters only, which SGLang sends to its scheduler as they came; elsewhere its routes declare
them. Messages name a field of ours and its bounds, never what a client sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sgl_esft.errors import BadBodyError

Document: TypeAlias = Mapping[str, Any]

DEFAULT_MAX_BODY_BYTES: Final = 2 << 20
MAX_PROMPTS: Final = 256
MAX_SEQUENCES: Final = 1024
MAX_STOPS: Final = 16
MAX_LOGIT_BIASES: Final = 300
# What SGLang generates where a body does not say; only an estimate depends on it.
_USUAL_NEW_TOKENS: Final = 128
# A token of text is about four bytes; a settled request is charged what it really had.
_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class ModelBounds:
    """What depends on the model that is served."""

    vocab_size: int
    context_length: int


@dataclass(frozen=True)
class BodyRules:
    """What this server takes."""

    max_bytes: int = DEFAULT_MAX_BODY_BYTES
    takes_logit_processors: bool = False  # they are unpickled code
    takes_templates: bool = False  # they are programs, which need not end
    takes_stop_regex: bool = False  # some take for ever to search for, in every client's scheduler
    takes_media: bool = False  # SGLang would fetch it from wherever the client says


@dataclass(frozen=True)
class Ask:
    """What a request would use at most."""

    sequences: int
    tokens: int
    prompt_tokens: int = 0  # of these


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_list_of(is_one: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


TYPES: Final[Mapping[str, Callable[[object], bool]]] = {
    "a number": _is_number,
    "an integer": _is_integer,
    "a boolean": lambda value: isinstance(value, bool),
    "a string": _is_string,
    "a string or a list of strings": lambda value: (
        _is_string(value) or _is_list_of(_is_string, value)
    ),
    "a list of integers": lambda value: _is_list_of(_is_integer, value),
    "an object of numbers": lambda value: (
        isinstance(value, dict) and all(map(_is_number, value.values()))
    ),
}
CONTEXT: Final = "context_length"  # of the model, as a bound


@dataclass(frozen=True)
class Field:
    """What a field may hold; null is none given."""

    type: str | None = None  # of TYPES, where it is a sampling parameter
    range: tuple[int, int | str] | None = None  # of every number in it, which must be an integer
    max_chars: int | None = None  # of every string in it
    max_json_chars: int | None = None  # if it is an object, as JSON
    max_items: int | None = None
    holds_ids: bool = False  # every number in it is a token id
    is_prompt: bool = False  # may be strings in place of token ids
    may_be_empty: bool = True


_COUNT = (0, CONTEXT)  # of tokens; SGLang fails on Ollama's -1 and -2, which mean no end
_NEW_OR_LEAST = ("max_new_tokens", "max_tokens", "min_new_tokens", "num_predict")
_OTHER_COUNTS = (
    "max_completion_tokens",
    "max_output_tokens",
    "max_thinking_tokens",
    "min_tokens",
    "routed_experts_start_len",
)
_PENALTIES = ("frequency_penalty", "presence_penalty", "repeat_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")
FIELDS: Final[Mapping[str, Field]] = {
    # Counts, sizes and indices on the device.
    **dict.fromkeys(_NEW_OR_LEAST, Field("an integer", _COUNT)),
    **dict.fromkeys(_OTHER_COUNTS, Field(range=_COUNT)),
    **dict.fromkeys(("logprobs", "top_logprobs", "top_logprobs_num"), Field(range=(0, 100))),
    **dict.fromkeys(("num_ctx", "sampling_seed", "seed"), Field("an integer")),
    "beam_width": Field("an integer", (0, 16)),
    "best_of": Field(range=(0, 128)),
    "logprob_start_len": Field(range=(-1, CONTEXT)),
    "n": Field("an integer", (0, 128)),
    "stream_interval": Field("an integer", (0, 1 << 30)),
    "top_k": Field("an integer", (-1, 1 << 30)),
    "top_n": Field(range=(0, MAX_PROMPTS)),
    **dict.fromkeys((*_PENALTIES, "min_p", "temperature", "top_p"), Field("a number")),
    **dict.fromkeys(_FLAGS, Field("a boolean")),
    # Patterns and grammars are compiled, some in time that grows fast with their length.
    "ebnf": Field("a string", max_chars=16 << 10),
    "json_schema": Field("a string", max_chars=64 << 10),
    "regex": Field("a string", max_chars=1024),
    "structural_tag": Field("a string", max_chars=64 << 10),
    "stop": Field("a string or a list of strings", max_chars=1024, max_items=MAX_STOPS),
    "stop_regex": Field("a string or a list of strings", max_chars=256, max_items=MAX_STOPS),
    # What Anthropic's route calls `stop`.
    "stop_sequences": Field(max_chars=1024, max_items=MAX_STOPS),
    "rid": Field(max_chars=256, max_items=MAX_PROMPTS),
    # A grammar's schema is in these; /generate has strings in `text`, which may be longer.
    "response_format": Field(max_json_chars=64 << 10),
    "text": Field(max_json_chars=64 << 10),
    # Token ids: a string of digits would be made a number by SGLang's routes.
    "input_ids": Field(holds_ids=True, may_be_empty=False),
    "label_token_ids": Field(holds_ids=True),
    "stop_token_ids": Field("a list of integers", holds_ids=True),
    "token_ids_logprob": Field(holds_ids=True),
    "tokens": Field(holds_ids=True),
    "input": Field(holds_ids=True, is_prompt=True, may_be_empty=False),
    "items": Field(holds_ids=True, is_prompt=True, may_be_empty=False),
    "prompt": Field(holds_ids=True, is_prompt=True, may_be_empty=False),
    "query": Field(holds_ids=True, is_prompt=True),
    "logit_bias": Field("an object of numbers"),
}
# The same of `session_params`, which has no other fields.
_SESSION: Final[Mapping[str, str]] = {
    "id": "a string",
    "rid": "a string",
    "offset": "an integer",
    "replace": "a boolean",
    "drop_previous_output": "a boolean",
}
# Fields of SGLang's requests that are its own processes' to set, or that reach into them.
INTERNAL: Final = (
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
    "decision_layout",  # spans of a prompt, which /v1/systemone works out itself
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "embed_override_token_id",
    "embed_overrides",
    "encoder_urls",
    "external_trace_header",
    "extra_key",  # the prefix cache's key begins with it and ends with the adapter's id
    "http_worker_ipc",
    "input_embeds",
    "item_embed_overrides",
    "lora_id",  # an adapter that no list of allowed ones would see
    "multi_item_delimiter_indices",  # indices of hidden states, with no bound
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "positional_embed_overrides",
    "query_embed_overrides",
    "received_time",
    "token_indices_to_pool",  # the same
    "watermark",  # whether and by which key answers are marked is the server's to say
)
# The same of sampling parameters: made of fields that were checked, so that giving them would pass
# the checks by.
CUSTOM_PARAMS: Final = "custom_params"  # parameters of custom logit processors
SAMPLING_INTERNAL: Final = (
    CUSTOM_PARAMS,
    "ebnf_full_assistant",
    "is_normalized",
    "stop_regex_max_len",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_strs",
)
MEDIA: Final = (
    "audio_data",
    "image_data",
    "images",
    "mm_content_hashes",
    "mm_hashes",
    "mm_processor_kwargs",
    "video_data",
)
MEDIA_PARTS: Final = frozenset(
    {
        "audio_url",
        "document",
        "file",
        "image",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video_url",
    }
)
LOGIT_PROCESSOR: Final = "custom_logit_processor"
_NOTHING: Final[tuple[object, ...]] = (None, "", [], {})
# Arguments of transformers' apply_chat_template. What a body gives to it is passed on as such, and
# one is another template: a program, which runs in the process that serves HTTP and need not end.
# SGLang looks for it on some of its routes only.
TEMPLATE_FIELD: Final = "chat_template_kwargs"
_TEMPLATE: Final = "chat_template"
_TEMPLATE_INTERNAL: Final = frozenset(
    {
        "add_generation_prompt",
        "conversation",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
NEW_TOKENS: Final = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
)
_PROMPTS: Final = ("text", "prompt", "input_ids", "input", "items")
_QUESTIONS: Final = "questions"  # of /v1/decisions and /v1/systemone: a prompt each
NESTED: Final = ("sampling_params", "options", "parameters", "instances")


def check_client_body(
    document: object, num_bytes: int, rules: BodyRules, bounds: ModelBounds
) -> Ask:
    """Check a body of a route for clients, of so many bytes. Raises BadBodyError."""
    if not isinstance(document, dict):
        raise BadBodyError("the body must be a JSON object")
    parts = [document, *_nested(document)]
    for part in parts:
        is_sampling = part is not document
        _check_refused(part, rules, is_sampling=is_sampling)
        for name in part.keys() & FIELDS.keys():
            if part[name] is not None:
                _check_field(name, part[name], bounds, is_sampling=is_sampling)
    _check_session(document.get("session_params"))
    _check_request_ids(document)
    _check_template(document.get(TEMPLATE_FIELD), rules)
    if not rules.takes_media:
        _check_no_media_parts(document)
    return _ask(document, parts, num_bytes)


def _nested(document: Document) -> Iterator[Document]:
    """The objects in a body that hold sampling parameters."""
    for field in NESTED:
        inner = document.get(field)
        for each in inner if isinstance(inner, list) else [inner]:
            if isinstance(each, dict):
                yield each


def _check_refused(part: Document, rules: BodyRules, *, is_sampling: bool) -> None:
    refused = [field for field in INTERNAL if part.get(field) not in _NOTHING]
    if not rules.takes_media:
        refused += [field for field in MEDIA if part.get(field) not in _NOTHING]
    if is_sampling:
        given = [field for field in SAMPLING_INTERNAL if part.get(field) is not None]
        refused += [f for f in given if f != CUSTOM_PARAMS or not rules.takes_logit_processors]
    if refused:
        raise BadBodyError(f"{', '.join(refused)}: not for clients to set; leave it out")
    if part.get(LOGIT_PROCESSOR) not in _NOTHING and not rules.takes_logit_processors:
        raise BadBodyError(
            f"{LOGIT_PROCESSOR} is code: it needs a server with --enable-custom-logit-processor"
        )
    if part.get("stop_regex") not in _NOTHING and not rules.takes_stop_regex:
        raise BadBodyError(
            "stop_regex is searched for after every token, and some take for ever: it needs a "
            "server with --allow-stop-regex"
        )


def _check_field(name: str, value: Any, bounds: ModelBounds, *, is_sampling: bool) -> None:
    field = FIELDS[name]
    if is_sampling and field.type is not None and not TYPES[field.type](value):
        raise BadBodyError(f"{name} must be {field.type}")
    if field.range is not None:
        _check_range(name, value, field.range, bounds)
    if isinstance(value, list) and not field.may_be_empty and (not value or [] in value):
        raise BadBodyError(f"{name} must not be empty")
    if field.holds_ids:
        _check_ids(name, value, bounds.vocab_size)
    _check_lengths(name, value, field)
    if name == "stop_regex":
        _check_patterns(value)
    if name == "logit_bias":
        _check_biases(value, bounds.vocab_size)


def _check_range(
    name: str, value: object, limits: tuple[int, int | str], bounds: ModelBounds
) -> None:
    low, high = limits
    if isinstance(high, str):
        high = int(getattr(bounds, high))
    for each in _flat(value):
        if each is None or isinstance(each, bool):
            continue
        if not isinstance(each, int | float) or each != int(each) or not low <= each <= high:
            raise BadBodyError(f"{name} must be an integer from {low} to {high}")


def _check_lengths(name: str, value: object, field: Field) -> None:
    if field.max_items is not None and isinstance(value, list) and len(value) > field.max_items:
        raise BadBodyError(f"{name} has too many entries")
    limit = field.max_json_chars if isinstance(value, dict) else field.max_chars
    texts = [json.dumps(value)] if isinstance(value, dict) and limit else _flat(value)
    if limit and any(isinstance(each, str) and len(each) > limit for each in texts):
        raise BadBodyError(f"{name} may have {limit} characters")


def _check_patterns(value: object) -> None:
    for each in _flat(value):
        try:
            re.compile(each if isinstance(each, str) else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise BadBodyError("stop_regex must be a regular expression of Python") from error


def _check_ids(name: str, value: object, vocab_size: int) -> None:
    """A string passes only where a prompt may be one, and there only among strings."""
    is_prompt = FIELDS[name].is_prompt
    if isinstance(value, list):
        _check_list(name, value, vocab_size, takes_strings=is_prompt)
    elif not is_prompt or isinstance(value, int | float):
        _check_list(name, [value], vocab_size, takes_strings=False)


def _check_list(name: str, values: list[Any], vocab_size: int, *, takes_strings: bool) -> None:
    kinds = set(map(type, values))
    if kinds == {int}:
        values = [min(values), max(values)]
    is_of_ids = not takes_strings or bool(kinds & {int, float, bool})
    for each in values:
        if isinstance(each, list):
            _check_list(name, each, vocab_size, takes_strings=False)
        elif is_of_ids and each is not None and not _is_id(each, vocab_size):
            raise BadBodyError(f"{name}: a token id must be from 0 to {vocab_size - 1}")


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int | float) and 0 <= value < vocab_size


def _check_biases(value: object, vocab_size: int) -> None:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise BadBodyError(f"logit_bias is an object of {MAX_LOGIT_BIASES} entries at most")
    for token in value:
        # int() takes signs, spaces and other scripts' digits; SGLang would take them too.
        if not (
            token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size
        ):
            raise BadBodyError(f"logit_bias: a token id must be from 0 to {vocab_size - 1}")


def _check_session(session: object) -> None:
    if session is None:
        return
    if not isinstance(session, dict) or not all(
        field in _SESSION and (value is None or TYPES[_SESSION[field]](value))
        for field, value in session.items()
    ):
        fields = ", ".join(f"{field} ({kind})" for field, kind in _SESSION.items())
        raise BadBodyError(f"session_params is an object of {fields}")


def _check_template(values: object, rules: BodyRules) -> None:
    if not isinstance(values, dict):
        return  # the route refuses it
    if not values.keys().isdisjoint(_TEMPLATE_INTERNAL):
        raise BadBodyError(f"{TEMPLATE_FIELD} holds values of the template, no other arguments")
    if _TEMPLATE in values and not rules.takes_templates:
        raise BadBodyError(
            f"{_TEMPLATE} is code: it needs a server with --trust-request-chat-template"
        )


def _check_request_ids(document: Document) -> None:
    """One for each prompt; SGLang fails on a list for a single prompt."""
    ids = document.get("rid")
    if isinstance(ids, list) and (
        len(ids) != _prompts(document)[0]
        or not any(isinstance(document.get(field), list) for field in _PROMPTS)
        or len(set(map(str, ids))) != len(ids)
    ):
        raise BadBodyError("rid is a string, or with a list of prompts a list of different strings")


def _check_no_media_parts(document: Document) -> None:
    for field in ("messages", "input"):
        messages = document.get(field)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in MEDIA_PARTS:
                    raise BadBodyError(f"{field}: the model takes text only")


def _flat(value: object) -> Iterator[object]:
    """A value, or the values in a list, or in a list of lists."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        else:
            yield each


def _ask(document: Document, parts: list[Document], num_bytes: int) -> Ask:
    prompts, num_ids = _prompts(document)
    copies = max([1, *(_largest(part, ("n", "best_of", "beam_width")) for part in parts)])
    sequences = prompts * copies
    if prompts > MAX_PROMPTS or sequences > MAX_SEQUENCES:
        raise BadBodyError(
            f"a request may have {MAX_PROMPTS} prompts and {MAX_SEQUENCES} sequences"
        )
    new_tokens = max(_largest(part, NEW_TOKENS) for part in parts) or _USUAL_NEW_TOKENS
    prompt_tokens = num_ids or 1 + num_bytes // _BYTES_PER_TOKEN
    return Ask(sequences, prompt_tokens + sequences * new_tokens, prompt_tokens)


def _largest(part: Document, fields: Iterable[str]) -> int:
    values = (each for field in fields for each in _flat(part.get(field)))
    return max((int(v) for v in values if isinstance(v, int | float)), default=0)


def _prompts(document: Document) -> tuple[int, int]:
    """How many prompts, and how many token ids are in them if they are given as such."""
    questions = document.get(_QUESTIONS)
    prompts = max(1, len(questions)) if isinstance(questions, list | dict) else 1
    num_ids = 0
    for field in _PROMPTS:
        value = document.get(field)
        if not isinstance(value, list) or not value:
            continue
        if type(value[0]) is int:
            num_ids += len(value)
            continue
        if isinstance(value[0], str | list):  # else they are one conversation's messages
            prompts = max(prompts, len(value))
        num_ids += sum(len(each) for each in value if isinstance(each, list))
    return prompts, num_ids
