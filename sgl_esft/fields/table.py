"""The fields of each open route: SGLang's names and types, joined with what we say of them.

    request_classes.route_classes --[part_of]--> ObjectFields: name -> Field(shape, bounds, refusal)
    described_fields() --> one Described for each field of each route and of each object in it

For those who look at the table from outside (documents, fuzzers) `described_fields()` is all:
frozen dataclasses of strings and numbers, and nothing of SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from sgl_esft.fields import request_classes
from sgl_esft.fields.described import (
    CONTEXT,
    DESCRIBED,
    EVERYWHERE,
    IGNORED,
    IGNORED_INSIDE,
    INTERNAL,
    MEDIA,
    NOT_FOR_CLIENTS,
    NOT_READ,
    PROMPTS,
    TOP_LEVEL,
    VOCAB,
    Bounds,
    CustomParams,
)
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.fields.shapes import ANYTHING, Shape, fields_of, shape_of_any, takes_others

Classes = tuple[type, ...]
_NONE: Final = Bounds("nothing")
# What a flag of the server lets through: the rule's name, and why not without.
_SWITCHES: Final[Mapping[str, tuple[str, str]]] = {
    "custom_logit_processor": (
        "takes_logit_processors",
        "is code: it needs a server with --enable-custom-logit-processor",
    ),
    "stop_regex": (
        "takes_stop_regex",
        "is searched for after every token, and some take for ever: it needs a server with "
        "--allow-stop-regex",
    ),
    **dict.fromkeys(MEDIA, ("takes_media", NOT_FOR_CLIENTS)),
}


@dataclass(frozen=True)
class Field:
    """One field of one kind of object."""

    name: str
    shape: Shape
    bounds: Bounds
    refusal: str | None = None  # why no client may send it
    switch: str | None = None  # the rule of the server that takes that back

    def refused(self, rules: BodyRules) -> str | None:
        """Why a client may not send it to this server."""
        is_taken = self.switch is not None and getattr(rules, self.switch)
        return None if is_taken else self.refusal

    def high(self, model: ModelBounds) -> int:
        """The greatest integer in it."""
        high = self.bounds.integers[1]
        if high == CONTEXT:
            return model.context_length
        return model.vocab_size - 1 if high == VOCAB else int(high)


@dataclass(frozen=True)
class ObjectFields:
    """What an object may have."""

    fields: Mapping[str, Field]
    is_strict: bool = False  # sent to the scheduler as it came: no 2.0 for 2
    is_open: bool = False  # a custom logit processor's own parameters stand beside these
    takes_others: bool = False  # its class says that it takes fields that it does not name


@functools.cache
def part_of(kinds: Classes) -> ObjectFields:
    """The fields of an object that is of one of these classes."""
    given: dict[str, list[tuple[type, object]]] = {}
    for kind in kinds:
        for name, annotation in fields_of(kind).items():
            given.setdefault(name, []).append((kind, annotation))
    fields = {name: _field(name, each) for name, each in given.items()}
    return ObjectFields(
        fields,
        is_strict=not set(kinds).isdisjoint(request_classes.part_classes().values()),
        is_open=CustomParams in kinds,
    )


@functools.cache
def inside(kinds: Classes) -> ObjectFields:
    """The same of an object in a document, where clients send what SGLang does not read."""
    found = part_of(kinds)
    if found.is_strict or found.is_open:
        return found
    return replace(_with(found, IGNORED_INSIDE), takes_others=any(map(takes_others, kinds)))


@functools.cache
def routes() -> Mapping[str, ObjectFields]:
    """Path -> what a document that is sent to it may have. Loads SGLang's classes."""
    found = {}
    for path, kinds in request_classes.route_classes().items():
        extra = [name for kind in kinds for name in IGNORED.get(kind.__name__, ())]
        found[path] = _with(part_of(kinds), (*EVERYWHERE, *extra))
    return found


@functools.cache
def fields_of_prompts(path: str) -> tuple[Field, ...]:
    """What a document may have once, or in a list with one for each prompt of a batch.

    Those are the scheduler's: other routes hand them on.
    """
    if path not in routes():
        return ()
    fields = routes()[path].fields.values()
    return tuple(each for each in fields if each.name in _names_of_prompts())


@functools.cache
def _names_of_prompts() -> frozenset[str]:
    parts = [routes()[path] for path in routes() if request_classes.is_batched(path)]
    fields = [each for part in parts for each in part.fields.values()]
    return frozenset(each.name for each in fields if each.shape.is_one_or_list) - PROMPTS


@functools.cache
def _documents() -> frozenset[type]:
    """The classes of whole documents, which are in no other."""
    return frozenset(kind for kinds in request_classes.route_classes().values() for kind in kinds)


def _with(part: ObjectFields, names: tuple[str, ...]) -> ObjectFields:
    fields = {
        name: Field(name, ANYTHING, NOT_READ if name not in EVERYWHERE else DESCRIBED[name])
        for name in names
    }
    return ObjectFields({**fields, **part.fields})


def _field(name: str, given: list[tuple[type, object]]) -> Field:
    owner = given[0][0]
    described = TOP_LEVEL if owner in _documents() else DESCRIBED
    bounds = described.get(f"{owner.__name__}.{name}", described.get(name))
    switch, why = _SWITCHES.get(name, (None, None))
    if name in INTERNAL or (bounds is None and why is None):
        return Field(name, ANYTHING, _NONE, NOT_FOR_CLIENTS)
    shape = shape_of_any([annotation for _, annotation in given])
    inner = request_classes.part_classes().get(name)
    if inner is not None:
        shape = _with_class(shape, inner)
    if bounds is not None and bounds.of_any_type:
        shape = ANYTHING
    return Field(name, shape, bounds or _NONE, why, switch)


def _with_class(shape: Shape, kind: type) -> Shape:
    """Where a class says only that it is an object, or a list of such."""
    lists = tuple(Shape(part=(kind,)) for each in shape.lists if each.values is not None)
    return Shape(shape.scalars, lists, (kind,), None, shape.takes_null)


@dataclass(frozen=True)
class Described:
    """One field of one route, in strings and numbers."""

    route: str
    part: str  # where in the document: "" for its own fields, else such as "sampling_params"
    name: str
    types: tuple[str, ...]  # such as "an integer", "a list of strings", "any JSON"
    low: float | None  # of its numbers; None: there are none
    high: float | str | None  # the same; or "vocab_size" (to be below), "context_length"
    max_chars: int | None
    max_items: int | None
    where: str  # what it is for: prompt, sampling, grammar, answer, identity, schedule, ...
    refusal: str | None  # why clients may not send it
    switch: str | None  # the server's rule (BodyRules) that takes the refusal back


def described_fields() -> Iterator[Described]:
    """Every field of every open route, refused ones too, less those that nothing reads."""
    for route, part in routes().items():
        yield from _described(route, "", part, frozenset())


def _described(
    route: str, where: str, part: ObjectFields, seen: frozenset[Classes]
) -> Iterator[Described]:
    for field in part.fields.values():
        low, high = _limits(field)
        yield Described(
            route,
            where,
            field.name,
            field.shape.kinds,
            low,
            high,
            field.bounds.max_chars,
            field.bounds.max_items,
            field.bounds.where,
            field.refusal,
            field.switch,
        )
        for kinds in dict.fromkeys(parts_in(field.shape)):
            if kinds not in seen:
                inner = f"{where}.{field.name}".lstrip(".")
                yield from _described(route, inner, part_of(kinds), seen | {kinds})


def parts_in(shape: Shape) -> Iterator[Classes]:
    """The classes of objects in a value of this shape."""
    if shape.part:
        yield shape.part
    for each in (*shape.lists, *([shape.values] if shape.values else [])):
        yield from parts_in(each)


def _limits(field: Field) -> tuple[float | None, float | str | None]:
    words = " ".join(field.shape.kinds)
    if "number" in words:
        return field.bounds.numbers
    return field.bounds.integers if "integer" in words else (None, None)
