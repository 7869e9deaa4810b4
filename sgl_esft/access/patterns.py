"""Stop patterns that cannot hold up a server.

    stop_regex --> [check_patterns] --> bounded length, bounded ways to match --> SGLang's scheduler

SGLang searches the end of every answer with Python's `re`, after each token, in the process that
serves all clients. A pattern that can match in very many ways would stop them all, so the ways are
counted before: a repeat of n to m has a way for each count, alternatives add up, parts multiply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from sgl_esft.errors import BadBodyError

MAX_WAYS: Final = 1000  # of all patterns of a request together
MAX_MATCH_LENGTH: Final = 256  # characters that one pattern can match

_parser: Any = re._parser  # type: ignore[attr-defined]
_SINGLE = frozenset({_parser.LITERAL, _parser.NOT_LITERAL, _parser.IN, _parser.ANY})
_REPEATS = frozenset({_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT})
# What is counted is cut off here: a few nested repeats have more ways than a number has room for.
_MANY: Final = 1 << 20


class _RefusedError(Exception):
    """What about a pattern is refused."""


def check_patterns(patterns: Iterable[str]) -> None:
    """Raises BadBodyError for a pattern that is none, or that could take long to search for."""
    ways = 0
    for pattern in patterns:
        try:
            length, more = _measure(_parser.parse(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise BadBodyError("stop_regex must be a regular expression of Python") from error
        except _RefusedError as error:
            raise BadBodyError(f"stop_regex: {error}") from error
        if length > MAX_MATCH_LENGTH:
            raise BadBodyError(
                f"stop_regex may match {MAX_MATCH_LENGTH} characters: write {{1,20}} in place of +"
            )
        ways += more
    if ways > MAX_WAYS:
        raise BadBodyError(
            f"stop_regex may match in {MAX_WAYS} ways: use fewer and shorter repeats"
        )


def _measure(parsed: Any) -> tuple[int, int]:
    """The most characters, and the number of ways, that a pattern matches. Raises _RefusedError."""
    length, ways = 0, 1
    for token, value in parsed:
        each_length, each_ways = _measure_token(token, value)
        length = min(length + each_length, _MANY)
        ways = min(ways * each_ways, _MANY)
    return length, ways


def _measure_token(token: Any, value: Any) -> tuple[int, int]:
    if token in _SINGLE:
        return 1, 1
    if token is _parser.AT:
        return 0, 1
    if token is _parser.SUBPATTERN:
        return _measure(value[-1])
    if token is _parser.ATOMIC_GROUP:
        return _measure(value)
    if token is _parser.BRANCH:
        measured = [_measure(branch) for branch in value[1]]
        return max(length for length, _ in measured), sum(ways for _, ways in measured)
    if token in _REPEATS:
        return _measure_repeat(*value)
    raise _RefusedError("references to groups and looking around are not for clients")


def _measure_repeat(least: int, most: int, body: Any) -> tuple[int, int]:
    length, ways = _measure(body)
    if most == _parser.MAXREPEAT or most > MAX_MATCH_LENGTH:
        return _MANY, _MANY
    counts = range(least, most + 1)
    return min(length * most, _MANY), min(sum(min(ways, _MANY) ** n for n in counts), _MANY)
