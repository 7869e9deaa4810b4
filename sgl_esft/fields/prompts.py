"""How many prompts a document has.

document of a route --[prompts_of]--> Prompts: one, or a batch of so many
                                         └--> limits of a key; lists with one for each prompt;
                                              adapters, one for each prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sgl_esft.fields import request_classes
from sgl_esft.fields.described import PROMPTS

_QUESTIONS: Final = "questions"  # of /v1/decisions and /v1/systemone: a prompt each, and no batch


@dataclass(frozen=True)
class Prompts:
    """The prompts of one document."""

    num: int  # at least 1
    num_ids: int  # token ids in them, if they are given as such
    is_batch: bool  # whether they are a list, of which the scheduler makes a request each


def prompts_of(path: str, document: Mapping[str, Any]) -> Prompts:
    """The prompts of a document that is sent to a route. It need not be checked yet."""
    lists = [each for each in map(document.get, PROMPTS) if isinstance(each, list) and each]
    batches = [each for each in lists if _is_batch(path, each)]
    questions = document.get(_QUESTIONS)
    num_questions = len(questions) if isinstance(questions, list | dict) else 0
    num = max([1, num_questions, *map(len, batches)])
    return Prompts(num, sum(map(_num_ids, lists)), bool(batches))


def _is_batch(path: str, prompts: list[Any]) -> bool:
    """A list of token ids is one prompt; so are a conversation's messages, and one object."""
    if isinstance(prompts[0], dict):
        return len(prompts) > 1 and not request_classes.is_of_messages(path)
    return isinstance(prompts[0], str | list)


def _num_ids(prompts: list[Any]) -> int:
    """Of one prompt, or of several; pairs of texts to compare are lists too, and have none."""
    each = [prompts, *(inner for inner in prompts if isinstance(inner, list))]
    return sum(len(inner) for inner in each if inner and type(inner[0]) is int)
