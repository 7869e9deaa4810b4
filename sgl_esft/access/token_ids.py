"""Token ids of a body: what becomes an index on the device is an id of the vocabulary.

    prompts, lists of ids, logit_bias --> [check_ids, check_biases] --> SGLang

SGLang's routes make a number of a text where they want one: `["7"]`, or a text beside numbers. So a
text passes only where a prompt may be one, and there only among texts.
"""

from __future__ import annotations

from typing import Any, Final

from sgl_esft.errors import BadBodyError

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
