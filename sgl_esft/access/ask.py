"""What a body asks for at most, for its key's limits.

document that was checked, its Prompts --[ask_of]--> Ask: sequences, tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sgl_esft.errors import BadBodyError
from sgl_esft.fields.described import MAX_PROMPTS
from sgl_esft.fields.prompts import Prompts

Document: TypeAlias = Mapping[str, Any]

MAX_SEQUENCES: Final = 1024
# What SGLang generates where a body does not say; only an estimate depends on it.
_USUAL_NEW_TOKENS: Final = 128
# A token of text is about four bytes; a settled request is charged what it really had.
_BYTES_PER_TOKEN: Final = 4
NEW_TOKENS: Final = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
)
SAMPLING: Final = "sampling_params"


@dataclass(frozen=True)
class Ask:
    """What a request would use at most."""

    sequences: int
    tokens: int
    prompt_tokens: int = 0  # of these


def sampling_parts(document: Document) -> list[Document]:
    """The objects in a body that hold sampling parameters; it is one itself."""
    inner = document.get(SAMPLING)
    each = inner if isinstance(inner, list) else [inner]
    return [document, *(part for part in each if isinstance(part, dict))]


def ask_of(document: Document, prompts: Prompts, num_bytes: int) -> Ask:
    """Raises BadBodyError for more than a request may have."""
    parts = sampling_parts(document)
    copies = max([1, *(_largest(part, ("n", "best_of", "beam_width")) for part in parts)])
    sequences = prompts.num * copies
    if prompts.num > MAX_PROMPTS or sequences > MAX_SEQUENCES:
        raise BadBodyError(
            f"a request may have {MAX_PROMPTS} prompts and {MAX_SEQUENCES} sequences"
        )
    new_tokens = max(_largest(part, NEW_TOKENS) for part in parts) or _USUAL_NEW_TOKENS
    prompt_tokens = prompts.num_ids or 1 + num_bytes // _BYTES_PER_TOKEN
    return Ask(sequences, prompt_tokens + sequences * new_tokens, prompt_tokens)


def _largest(part: Document, fields: Iterable[str]) -> int:
    values = (each for field in fields for each in flat(part.get(field)))
    return max((int(v) for v in values if isinstance(v, int | float)), default=0)


def flat(value: object) -> Iterator[object]:
    """A value, or the values in a list, or in a list of lists."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting.extend(each)
        else:
            yield each
