"""What is sent: bodies with odd values, one field at a time and two at a time.

    GET /openapi.json of a server --[fields_of]--> every field of every open route, nested ones too
    a field --[single_cases]--> that field with each of VALUES in a small body that is right
    fields --[pair_cases]--> without end: two of a route's fields with two of VALUES

The document and the engine's class of sampling parameters name the fields, not the table that the
server checks bodies with: a field that the table forgets is sent too. Pure.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from sgl_esft.http.classes import TABLE, RouteClass

Key: TypeAlias = str | int
Path: TypeAlias = tuple[Key, ...]  # of a value in a body, from outside
Json: TypeAlias = Mapping[str, Any]

MAX_DEPTH: Final = 4
LONG: Final = "long " * 40_000  # 200 kB
MANY: Final = 50_000  # entries of a list
DEEP: Final = 60  # levels of a nested value


def _nested(inner: Any, levels: int) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


# NaN and the infinities are written as Python's json writes them, which SGLang's reader takes.
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *(bound + step for bound in (2**31, 2**32, 2**63, 2**64) for step in (-1, 0)),
    *(-(2**31), -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30),
    *("", "x", "0", "-1", "null", "\x00", "\ud800", "a" * 300, LONG),
    *([], [None], [""], ["x"], ["x", "y"], [0], [-1], [2**63], [0.5], [[]], [[0]], [["x"]]),
    *([0] * 5000, [{}], [{"a": "b"}], {}, {"a": "b"}, {"a": 1}, {"0": 1}, {"": None}),
    [{} for _ in range(MANY)],  # a pair's second value is put into one of them
    *({"a": {"b": {"c": [1]}}}, {"type": "x"}, _nested(0, DEEP), {"a": _nested("x", DEEP)}),
)

_CHAT: Final[Json] = {
    "model": "base",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 2,
}
_YES_NO: Final[Json] = {"id": "q", "type": "yes_no", "question": "x"}
_NOUL: Final[Json] = {"type": "noul", "instructions": "x"}
_FEW: Final[Json] = {"max_new_tokens": 2, "temperature": 0}
# A small body that is right, of every open route that takes one.
BODIES: Final[Mapping[str, Json]] = MappingProxyType(
    {
        "/classify": {"text": "x"},
        "/detokenize": {"model": "base", "tokens": [5, 6]},
        "/encode": {"text": "x"},
        "/generate": {"text": "x", "sampling_params": _FEW},
        "/invocations": _CHAT,
        "/parse_function_call": {"text": "x", "tools": [], "tool_call_parser": "qwen25"},
        "/separate_reasoning": {"text": "x", "reasoning_parser": "deepseek-r1"},
        "/tokenize": {"model": "base", "prompt": "x"},
        "/v1/chat/completions": _CHAT,
        "/v1/classify": {"model": "base", "input": "x"},
        "/v1/completions": {"model": "base", "prompt": "x", "max_tokens": 2},
        "/v1/decisions": {"model": "base", "input": "x", "questions": [_YES_NO]},
        "/v1/detokenize": {"model": "base", "tokens": [5, 6]},
        "/v1/embeddings": {"model": "base", "input": "x"},
        "/v1/messages": _CHAT,
        "/v1/messages/count_tokens": {"model": "base", "messages": _CHAT["messages"]},
        "/v1/responses": {"model": "base", "input": "x", "max_output_tokens": 2},
        "/v1/responses/{response_id}/cancel": {},
        "/v1/score": {"model": "base", "query": "x", "items": ["y"], "label_token_ids": [5, 6]},
        "/v1/systemone": {"model": "base", "state": "x", "questions": {"q": _NOUL}},
        "/v1/tokenize": {"model": "base", "prompt": "x"},
    }
)


# Sent to every route, whether its document has them or not.
ANYWHERE: Final = ("adaptor", "custom_labels", "priority", "rid")


@dataclass(frozen=True)
class Field:
    """A place in the bodies of a route where a value can stand."""

    route: str
    path: Path

    @property
    def name(self) -> str:
        return f"{self.route} {'.'.join(map(str, self.path))}"


@dataclass(frozen=True)
class Case:
    """One request: a route and what is put where in the small body."""

    route: str
    put: tuple[tuple[Path, Any], ...]

    @property
    def name(self) -> str:
        """To find it again: the fields with their values, shortened."""
        puts = (f"{'.'.join(map(str, path))}={value!r:.80}" for path, value in self.put)
        return f"{self.route} {', '.join(puts)}"

    def body(self) -> bytes:
        """The body, with its values in place; lone surrogates are written as escapes."""
        document: Any = copy.deepcopy(dict(BODIES[self.route]))
        for path, value in self.put:
            _put(document, path, copy.deepcopy(value))
        return json.dumps(document).encode()


def open_routes() -> list[str]:
    """Every route for clients that takes a body."""
    return sorted(
        each.path
        for each in TABLE.values()
        if each.route_class is RouteClass.CLIENT and "POST" in each.methods
    )


def fields_of(document: Json, sampling: Iterable[str]) -> list[Field]:
    """Every field of every open route of an OpenAPI document, nested ones after their parents.

    `sampling` are the names of the engine's sampling parameters, which the document does not have.
    """
    found: dict[Field, None] = {}
    for route in open_routes():
        paths = {
            (name,) for name in (*BODIES[route], "adaptor", "priority", "rid", "custom_labels")
        }
        paths |= set(_paths(_body_schema(document, route), document, ()))
        if ("sampling_params",) in paths:
            paths |= {("sampling_params", name) for name in sampling}
        found |= dict.fromkeys(Field(route, path) for path in sorted(paths, key=str))
    return list(found)


def single_cases(fields: list[Field]) -> Iterator[Case]:
    """Every field with every value; a field's cases stand far from each other, a route's too."""
    for round_number in range(len(VALUES)):
        for at, field in enumerate(fields):
            value = VALUES[(round_number + at) % len(VALUES)]
            yield Case(field.route, ((field.path, value),))


def taking_turns(singles: Iterator[Case], pairs: Iterator[Case]) -> Iterator[Case]:
    """One of each in turn, and pairs alone once the singles are over."""
    for single, pair in zip(singles, pairs, strict=False):
        yield single
        yield pair
    yield from pairs


def pair_cases(fields: list[Field], rng: random.Random) -> Iterator[Case]:
    """Without end: two fields of a route, at random, with two values."""
    routes = {route: [f for f in fields if f.route == route] for route in BODIES}
    weighted = [field.route for field in fields]
    while True:
        route = rng.choice(weighted)
        first, second = rng.choices(routes[route], k=2)
        yield Case(route, tuple((f.path, rng.choice(VALUES)) for f in (first, second)))


def _put(document: Any, path: Path, value: Any) -> None:
    """Set a value, making the objects and lists that lead to it where others stand."""
    at = document
    for key, after in pairwise(path):
        wanted = list if isinstance(after, int) else dict
        if isinstance(at, list):
            at = _element(at, wanted)
            continue
        if not isinstance(at.get(key), wanted):
            at[key] = wanted()
        at = at[key]
    if isinstance(at, list):
        at[:1] = [value]
    else:
        at[path[-1]] = value


def _element(values: list[Any], wanted: type) -> Any:
    if not values or not isinstance(values[0], wanted):
        values[:1] = [wanted()]
    return values[0]


def _body_schema(document: Json, route: str) -> Json:
    operation = document["paths"].get(route, {}).get("post", {})
    content = operation.get("requestBody", {}).get("content", {})
    schema: Json = content.get("application/json", {}).get("schema", {})
    return schema


def _paths(schema: Json, document: Json, at: Path) -> Iterator[Path]:
    """The paths of all values that a schema names, at most MAX_DEPTH keys long."""
    if len(at) > MAX_DEPTH:
        return
    for each in _alternatives(schema, document):
        for name, inner in each.get("properties", {}).items():
            yield (*at, name)
            yield from _paths(inner, document, (*at, name))
        items = each.get("items")
        if isinstance(items, dict) and at:
            yield (*at, 0)
            yield from _paths(items, document, (*at, 0))


def _alternatives(schema: Json, document: Json) -> Iterator[Json]:
    """The schema itself, or what it refers to, with everything it is one of or all of."""
    if "$ref" in schema:
        yield from _alternatives(_referred(schema["$ref"], document), document)
        return
    yield schema
    groups = (schema.get(word, ()) for word in ("anyOf", "oneOf", "allOf"))
    for group in groups:
        for each in group:
            yield from _alternatives(each, document)


def _referred(reference: str, document: Json) -> Json:
    at: Any = document
    for part in reference.removeprefix("#/").split("/"):
        at = at[part]
    found: Json = at
    return found
