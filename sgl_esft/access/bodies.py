"""What a request may hold, checked before it costs work.

    bytes --> [parse] --> values: depth, whole numbers, finite numbers
          --> [check_client_body] --> fields that are refused, ranges, token ids --> Ask

A number that becomes an index, a count or a size on the device has bounds here: a worker that
meets a wrong one ends, and every client's requests with it. Messages name a field of ours and its
bounds, never what a client sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sgl_esft.access import sampling
from sgl_esft.access.patterns import check_patterns
from sgl_esft.access.sampling import check_session, check_types
from sgl_esft.errors import BadBodyError, BodyTooLargeError, HeadersTooLargeError

Document: TypeAlias = Mapping[str, Any]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

DEFAULT_MAX_BODY_BYTES: Final = 2 << 20
MAX_HEADERS: Final = 100
MAX_HEADER_BYTES: Final = 16 << 10
MAX_DEPTH: Final = 32
MAX_PROMPTS: Final = 256
MAX_SEQUENCES: Final = 1024
MAX_STOPS: Final = 16
_INT64_LOW, _INT64_HIGH = -(1 << 63), (1 << 63) - 1
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
    takes_media: bool = False  # SGLang would fetch it from wherever the client says


@dataclass(frozen=True)
class Ask:
    """What a request would use at most."""

    sequences: int
    tokens: int
    prompt_tokens: int = 0  # of these


# Fields of SGLang's requests that are its own processes' to set, or that reach into them.
_INTERNAL = (
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
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
)
_MEDIA = ("audio_data", "image_data", "mm_content_hashes", "mm_hashes", "video_data")
_MEDIA_PARTS = frozenset(
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
_LOGIT_PROCESSOR = "custom_logit_processor"
_NOTHING: tuple[object, ...] = (None, "", [], {})

# Field -> its least and greatest value; a name stands for the model's bound.
_CONTEXT, _VOCAB = "context_length", "vocab_size"
_RANGES: Mapping[str, tuple[int, int | str]] = {
    "beam_width": (0, 16),
    "best_of": (0, 128),
    "logprob_start_len": (-1, _CONTEXT),
    "logprobs": (0, 100),
    "max_completion_tokens": (0, _CONTEXT),
    "max_new_tokens": (0, _CONTEXT),
    "max_output_tokens": (0, _CONTEXT),
    "max_thinking_tokens": (0, _CONTEXT),
    "max_tokens": (0, _CONTEXT),
    "min_new_tokens": (0, _CONTEXT),
    "min_tokens": (0, _CONTEXT),
    "n": (0, 128),
    "num_predict": (0, _CONTEXT),  # SGLang fails on Ollama's -1 and -2, which mean no end
    "routed_experts_start_len": (0, _CONTEXT),
    "stream_interval": (0, 1 << 30),
    "top_k": (-1, 1 << 30),
    "top_logprobs": (0, 100),
    "top_logprobs_num": (0, 100),
    "top_n": (0, MAX_PROMPTS),
}
_NEW_TOKENS = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
)
_PROMPTS = ("text", "prompt", "input_ids", "input", "items")
_QUESTIONS = "questions"  # of /v1/decisions and /v1/systemone: a prompt each
# Patterns and grammars are compiled, some in time that grows fast with their length.
_TEXT_LENGTHS: Mapping[str, int] = {
    "ebnf": 16 << 10,
    "json_schema": 64 << 10,
    "regex": 1024,
    "rid": 256,
    "stop": 1024,
    "stop_regex": 256,
    "stop_sequences": 1024,  # what Anthropic's route calls `stop`
    "structural_tag": 64 << 10,
}
# The same as JSON objects: a grammar's schema is in them. /generate has texts in `text`.
_GRAMMAR_OBJECTS = ("response_format", "text")
_NESTED = ("sampling_params", "options", "parameters", "instances")


def check_headers(headers: Headers) -> None:
    """Raises HeadersTooLargeError."""
    if len(headers) > MAX_HEADERS:
        raise HeadersTooLargeError(f"a request may have {MAX_HEADERS} headers")
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise HeadersTooLargeError(f"a request's headers may have {MAX_HEADER_BYTES} bytes")


def check_size(num_bytes: int, rules: BodyRules) -> None:
    """Raises BodyTooLargeError."""
    if num_bytes > rules.max_bytes:
        raise BodyTooLargeError(
            f"a body may have {rules.max_bytes} bytes; --max-body-bytes of the server sets this"
        )


def parse(raw: bytes) -> object:
    """The JSON of a body, with its depth and its numbers checked. Raises BadBodyError."""
    try:
        document: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_not_finite
        )
    except (ValueError, RecursionError) as error:
        raise BadBodyError(
            "the body must be JSON in UTF-8, with no key twice and no NaN or Infinity"
        ) from error
    _check_values(document)
    return document


def check_client_body(
    document: object, num_bytes: int, rules: BodyRules, bounds: ModelBounds
) -> Ask:
    """Check a body of a route for clients. Raises BadBodyError."""
    if not isinstance(document, dict):
        raise BadBodyError("the body must be a JSON object")
    parts = list(_parts(document))
    for inner in parts[1:]:
        check_types(inner, takes_custom=rules.takes_logit_processors)
    check_session(document.get("session_params"))
    for part in parts:
        _check_refused(part, rules)
        for field in part.keys() & _RANGES.keys():
            _check_range(field, part[field], bounds)
        _check_ids(part, bounds.vocab_size)
        _check_texts(part)
    _check_request_ids(document)
    sampling.check_values(document.get(sampling.FIELD), takes_templates=rules.takes_templates)
    if not rules.takes_media:
        _check_no_media_parts(document)
    return _ask(document, parts, num_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of one body must not see two values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _not_finite(_: str) -> None:
    raise ValueError("a number is not finite")


def _check_values(document: object) -> None:
    waiting: list[tuple[Iterable[Any], int]] = [([document], 0)]
    while waiting:
        values, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise BadBodyError(f"a body may be {MAX_DEPTH} levels deep")
        if isinstance(values, list):
            values = _without_plain(values)
        for value in values:
            if isinstance(value, dict):
                waiting.append((value.values(), depth + 1))
            elif isinstance(value, list):
                waiting.append((value, depth + 1))
            else:
                _check_number(value)


def _without_plain(values: list[Any]) -> list[Any]:
    """A long list of token ids is checked by its least and greatest only."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return [min(values), max(values)]
    return [] if kinds == {str} else values


def _check_number(value: object) -> None:
    if isinstance(value, int) and not _INT64_LOW <= value <= _INT64_HIGH:
        raise BadBodyError("a whole number must have 64 bits at most")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadBodyError("a number must be finite")


def _parts(document: Document) -> Iterator[Document]:
    """The body and the objects in it that hold parameters too."""
    yield document
    for field in _NESTED:
        inner = document.get(field)
        for each in inner if isinstance(inner, list) else [inner]:
            if isinstance(each, dict):
                yield each


def _check_refused(part: Document, rules: BodyRules) -> None:
    refused = [field for field in _INTERNAL if part.get(field) not in _NOTHING]
    if not rules.takes_media:
        refused += [field for field in _MEDIA if part.get(field) not in _NOTHING]
    if refused:
        raise BadBodyError(f"{', '.join(refused)}: not for clients to set; leave it out")
    if part.get(_LOGIT_PROCESSOR) not in _NOTHING and not rules.takes_logit_processors:
        raise BadBodyError(
            f"{_LOGIT_PROCESSOR} is code: it needs a server with --enable-custom-logit-processor"
        )


def _check_request_ids(document: Document) -> None:
    """One for each prompt; SGLang fails on a list for a single prompt."""
    ids = document.get("rid")
    if isinstance(ids, list) and (
        len(ids) != _prompts(document)[0]
        or not any(isinstance(document.get(field), list) for field in _PROMPTS)
        or len(set(map(str, ids))) != len(ids)
    ):
        raise BadBodyError("rid is a text, or with a list of prompts a list of different texts")


def _check_range(field: str, value: object, bounds: ModelBounds) -> None:
    low, high = _RANGES[field]
    if isinstance(high, str):
        high = int(getattr(bounds, high))
    for each in _flat(value):
        if each is None or isinstance(each, bool):
            continue
        if not isinstance(each, int | float) or each != int(each) or not low <= each <= high:
            raise BadBodyError(f"{field} must be a whole number from {low} to {high}")


def _check_ids(part: Document, vocab_size: int) -> None:
    for field in sampling.FIELDS:
        value = part.get(field)
        if field in _PROMPTS and isinstance(value, list) and (not value or [] in value):
            raise BadBodyError(f"{field} must not be empty")
        sampling.check_ids(field, value, vocab_size)
    sampling.check_biases(part.get("logit_bias"), vocab_size)


def _flat(value: object) -> Iterator[object]:
    """A value, or the values in a list, or in a list of lists."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        else:
            yield each


def _check_texts(part: Document) -> None:
    for field, limit in _TEXT_LENGTHS.items():
        value = part.get(field)
        if isinstance(value, list) and len(value) > (MAX_STOPS if "stop" in field else MAX_PROMPTS):
            raise BadBodyError(f"{field} has too many entries")
        if any(isinstance(each, str) and len(each) > limit for each in _flat(value)):
            raise BadBodyError(f"{field} may have {limit} characters")
    limit = _TEXT_LENGTHS["json_schema"]
    for field in _GRAMMAR_OBJECTS:
        value = part.get(field)
        if isinstance(value, dict) and len(json.dumps(value)) > limit:
            raise BadBodyError(f"{field} may have {limit} characters")
    check_patterns(each for each in _flat(part.get("stop_regex")) if isinstance(each, str))


def _check_no_media_parts(document: Document) -> None:
    for field in ("messages", "input"):
        messages = document.get(field)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind in _MEDIA_PARTS:
                    raise BadBodyError(f"{field}: the model takes text only")


def _ask(document: Document, parts: list[Document], num_bytes: int) -> Ask:
    prompts, num_ids = _prompts(document)
    copies = max([1, *(_largest(part, ("n", "best_of", "beam_width")) for part in parts)])
    sequences = prompts * copies
    if prompts > MAX_PROMPTS or sequences > MAX_SEQUENCES:
        raise BadBodyError(
            f"a request may have {MAX_PROMPTS} prompts and {MAX_SEQUENCES} sequences"
        )
    new_tokens = max(_largest(part, _NEW_TOKENS) for part in parts) or _USUAL_NEW_TOKENS
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
