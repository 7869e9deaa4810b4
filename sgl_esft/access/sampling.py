"""The types of sampling parameters, which SGLang sends to its scheduler as they came.

    "sampling_params" of /generate, "options" of the Ollama routes --> [check_types] --> SGLang

The other routes declare their fields, so a wrong type is refused there. Here a text in place of a
number would end the scheduler, and a field of SGLang's own would set what was to be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sgl_esft.errors import BadBodyError

# Made of the fields that were checked; to give them would be to pass the checks by.
_INTERNAL: Final = frozenset(
    {
        "custom_params",  # parameters of custom logit processors
        "ebnf_full_assistant",
        "is_normalized",
        "stop_regex_max_len",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_strs",
    }
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))


def _is_wholes(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _is_biases(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_KINDS: Final[Mapping[str, tuple[Callable[[object], bool], tuple[str, ...]]]] = {
    "a number": (
        _is_number,
        (
            "frequency_penalty",
            "min_p",
            "presence_penalty",
            "repeat_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
        ),
    ),
    "a whole number": (
        _is_whole,
        (
            "beam_width",
            "max_new_tokens",
            "max_tokens",
            "min_new_tokens",
            "n",
            "num_ctx",
            "num_predict",
            "sampling_seed",
            "seed",
            "stream_interval",
            "top_k",
        ),
    ),
    "true or false": (
        _is_flag,
        ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"),
    ),
    "a text": (_is_text, ("ebnf", "json_schema", "regex", "structural_tag")),
    "a text or a list of texts": (_is_texts, ("stop", "stop_regex")),
    "a list of whole numbers": (_is_wholes, ("stop_token_ids",)),
    "an object of numbers": (_is_biases, ("logit_bias",)),
}
TYPES: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    field: (kind, is_one) for kind, (is_one, fields) in _KINDS.items() for field in fields
}


def check_types(parameters: Mapping[str, Any], *, takes_custom: bool = False) -> None:
    """Raises BadBodyError for a value of another type than its field's; null is none given."""
    for field in parameters.keys() & _INTERNAL:
        if parameters[field] is not None and not (takes_custom and field == "custom_params"):
            raise BadBodyError(f"{field}: not for clients to set; leave it out")
    for field in parameters.keys() & TYPES.keys():
        kind, is_one = TYPES[field]
        if parameters[field] is not None and not is_one(parameters[field]):
            raise BadBodyError(f"{field} must be {kind}")


def check_session(session: object) -> None:
    """The same for `session_params`. Raises BadBodyError."""
    if session is None:
        return
    texts, wholes, flags = ("id", "rid"), ("offset",), ("replace", "drop_previous_output")
    kinds = {
        **dict.fromkeys(texts, str),
        **dict.fromkeys(wholes, int),
        **dict.fromkeys(flags, bool),
    }
    if not isinstance(session, dict) or not all(
        field in kinds and (value is None or type(value) is kinds[field])
        for field, value in session.items()
    ):
        raise BadBodyError(
            "session_params is an object of id, rid (texts), offset (a whole number), replace and "
            "drop_previous_output (true or false)"
        )


# Token ids of a body: what becomes an index on the device is an id of the vocabulary.
#
#     prompts, lists of ids, logit_bias --> [check_ids, check_biases] --> SGLang
#
# SGLang's routes make a number of a text where they want one: `["7"]`, or a text beside numbers.
# So a
# text passes only where a prompt may be one, and there only among texts.

MAX_LOGIT_BIASES: Final = 300
IDS: Final = (
    "input_ids",
    "label_token_ids",
    "stop_token_ids",
    "token_ids_logprob",
    "tokens",
)
IDS_OR_TEXTS: Final = ("input", "items", "prompt", "query")
FIELDS: Final = IDS + IDS_OR_TEXTS


def check_ids(field: str, value: object, vocab_size: int) -> None:
    """Raises BadBodyError for what is no token id where only one can be."""
    if isinstance(value, list):
        _check_list(field, value, vocab_size, takes_texts=field in IDS_OR_TEXTS)
    elif field in IDS or isinstance(value, int | float):
        _check_list(field, [value], vocab_size, takes_texts=False)


def check_biases(value: object, vocab_size: int) -> None:
    """The same for `logit_bias`."""
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise BadBodyError(f"logit_bias is an object of {MAX_LOGIT_BIASES} entries at most")
    for token in value:
        # int() takes signs, spaces and other scripts' digits; SGLang would take them too.
        if not (
            token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size
        ):
            raise BadBodyError(f"logit_bias: a token id must be from 0 to {vocab_size - 1}")


def _check_list(field: str, values: list[Any], vocab_size: int, *, takes_texts: bool) -> None:
    kinds = set(map(type, values))
    if kinds == {int}:
        values = [min(values), max(values)]
    is_of_ids = not takes_texts or bool(kinds & {int, float, bool})
    for each in values:
        if isinstance(each, list):
            _check_list(field, each, vocab_size, takes_texts=False)
        elif is_of_ids and each is not None and not _is_id(each, vocab_size):
            raise BadBodyError(f"{field}: a token id must be from 0 to {vocab_size - 1}")


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int | float) and 0 <= value < vocab_size


# A chat template is the server's; a request gives values to it.
#
#     chat_template_kwargs --> [check_values] --> transformers' apply_chat_template
#
# The values are passed on as arguments, and one of those is another template: a program, which runs
# in the process that serves HTTP and need not end. SGLang looks for it on some of its routes only.

FIELD: Final = "chat_template_kwargs"
_TEMPLATE: Final = "chat_template"
# The other arguments that are no values of a template.
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


def check_values(values: object, *, takes_templates: bool) -> None:
    """Raises BadBodyError for arguments that are no values of the template."""
    if not isinstance(values, dict):
        return  # the route refuses it
    if not values.keys().isdisjoint(_TEMPLATE_INTERNAL):
        raise BadBodyError(f"{FIELD} holds values of the template, no other arguments")
    if _TEMPLATE in values and not takes_templates:
        raise BadBodyError(
            f"{_TEMPLATE} is code: it needs a server with --trust-request-chat-template"
        )
