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
