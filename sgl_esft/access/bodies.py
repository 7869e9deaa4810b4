"""What a body of a route for clients may hold, checked before it costs work.

    document (http/body.py) --[check_client_body]--> its fields, each alone (sgl_esft/fields)
                            --> fields that depend on each other, or on what they hold
                            --> Ask: what it would use at most, for the key's limits

Messages name a field and its bounds, never what a client sent in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from sgl_esft.access.ask import Ask, Document, ask_of, flat, sampling_parts
from sgl_esft.errors import BadBodyError
from sgl_esft.fields.check import check_fields
from sgl_esft.fields.prompts import Prompts, prompts_of
from sgl_esft.fields.request_classes import makes_ids_of_one
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.fields.table import fields_of_prompts

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
_HOLDS_PARTS: Final = ("content", "output")
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


def check_client_body(
    path: str, document: object, num_bytes: int, rules: BodyRules, bounds: ModelBounds
) -> Ask:
    """Check a body of a route for clients, of so many bytes. Raises BadBodyError."""
    if not isinstance(document, dict):
        raise BadBodyError("the body must be a JSON object")
    check_fields(path, document, rules, bounds)
    for part in sampling_parts(document):
        _check_biases(part.get("logit_bias"), bounds.vocab_size)
        _check_patterns(part.get("stop_regex"))
    prompts = prompts_of(path, document)
    _check_one_for_each_prompt(path, document, prompts)
    _check_template(document.get(TEMPLATE_FIELD), rules)
    if not rules.takes_media:
        _check_no_media_parts(document)
    return ask_of(document, prompts, num_bytes)


def _check_patterns(value: object) -> None:
    for each in flat(value):
        try:
            re.compile(each if isinstance(each, str) else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise BadBodyError("stop_regex must be a regular expression of Python") from error


def _check_biases(value: dict[str, float] | None, vocab_size: int) -> None:
    for token in value or ():
        # int() takes signs, spaces and other scripts' digits; SGLang would take them too.
        if not (
            token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size
        ):
            raise BadBodyError(f"logit_bias: a token id must be from 0 to {vocab_size - 1}")


def _check_template(values: object, rules: BodyRules) -> None:
    if not isinstance(values, dict):
        return  # the route refuses it
    if not values.keys().isdisjoint(_TEMPLATE_INTERNAL):
        raise BadBodyError(f"{TEMPLATE_FIELD} holds values of the template, no other arguments")
    if _TEMPLATE in values and not rules.takes_templates:
        raise BadBodyError(
            f"{_TEMPLATE} is code: it needs a server with --trust-request-chat-template"
        )


def _check_one_for_each_prompt(path: str, document: Document, prompts: Prompts) -> None:
    """A list is for a batch, with one for each prompt: the scheduler fails on others."""
    kinds = [field for field in ("text", "input_ids") if document.get(field) is not None]
    if len(kinds) > 1:
        raise BadBodyError(f"a prompt is either {' or '.join(kinds)}: leave one of them out")
    for field in fields_of_prompts(path):
        value: Any = document.get(field.name)
        if field.shape.is_list_of(value) and not (prompts.is_batch and len(value) == prompts.num):
            raise BadBodyError(f"{field.name}: a list is for a list of prompts, one for each")
    ids = document.get("rid")
    if isinstance(ids, str) and prompts.is_batch and not makes_ids_of_one(path):
        raise BadBodyError("rid: a list of prompts needs a list, one for each")
    if isinstance(ids, list) and len(set(map(str, ids))) != len(ids):
        raise BadBodyError("rid is a string, or with a list of prompts a list of different strings")


def _check_no_media_parts(document: Document) -> None:
    for field in ("messages", "input", "system"):
        if any(map(_is_media, _parts(document.get(field)))):
            raise BadBodyError(f"{field}: the model takes text only")


def _parts(value: object) -> Iterator[Document]:
    """Messages, their parts, and what results of tools hold."""
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield each
            for name in _HOLDS_PARTS:
                yield from _parts(each.get(name))


def _is_media(part: Document) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in MEDIA_PARTS
