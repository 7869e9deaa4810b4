"""A document against the fields of its route, before it costs work.

    document --[check_fields]--> every field of it and of the objects in it: known, of its type, in
                                 its bounds; or BadBodyError, which names the field

Messages name a field and its bounds. Of what a client sent they have an unknown field's name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from sgl_esft.errors import BadBodyError
from sgl_esft.fields.described import MAX_PARTS, VOCAB
from sgl_esft.fields.repeats import (
    MAX_REPEAT_DEPTH,
    MAX_REPEATS,
    num_bounds_in,
    num_repeats,
    patterns_in,
    repeat_depth,
)
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.fields.shapes import Shape
from sgl_esft.fields.table import Field, ObjectFields, inside, parts_in, routes

_NOTHING: Final[tuple[object, ...]] = (None, "", [], {})
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_FIELDS: Final = ObjectFields({})


def check_fields(
    path: str, document: Mapping[str, Any], rules: BodyRules, model: ModelBounds
) -> None:
    """Raises BadBodyError."""
    fields = routes().get(path, _NO_FIELDS)
    if _check_part(fields, document, rules, model) > MAX_PARTS:
        raise BadBodyError(
            f"a body may have {MAX_PARTS} messages, parts of messages and tools together"
        )


def _check_part(
    part: ObjectFields,
    document: Mapping[str, Any],
    rules: BodyRules,
    model: ModelBounds,
    *,
    is_inner: bool = False,
) -> int:
    """How many parts it has, in the sense of MAX_PARTS."""
    num = 0
    for name, value in document.items():
        field = part.fields.get(name)
        if field is None:
            is_open = part.takes_others or (part.is_open and rules.takes_logit_processors)
            if not is_open or name.startswith("__"):  # those are SGLang's own between its processes
                raise BadBodyError(_unknown(name, part))
        elif value is not None:
            _check(field, value, part, rules, model)
            num += _check_inside(field.shape, value, rules, model, is_inner=is_inner)
        elif part.is_strict and not field.shape.takes_null and field.refusal is None:
            raise BadBodyError(f"{name} must be {field.shape.words}; leave it out for the default")
    return num


def _check_inside(
    shape: Shape, value: Any, rules: BodyRules, model: ModelBounds, *, is_inner: bool
) -> int:
    """How many parts a value has: entries of lists of objects of classes, or of anything."""
    if type(value) not in (list, dict):
        return 0
    if shape.has_parts:
        num = len(value) if type(value) is list else 0
        for kinds, each in _objects(value, shape):
            num += _check_part(inside(kinds), each, rules, model, is_inner=True)
        return num
    is_anything = shape.has_lists_of_anything or (is_inner and shape.is_anything)
    return _num_listed(value) if is_anything else 0


def _num_listed(value: Any) -> int:
    """Entries of all lists in a value, at any depth."""
    if type(value) is dict:
        return sum(_num_listed(each) for each in value.values())
    if type(value) is list:
        return len(value) + sum(_num_listed(each) for each in value)
    return 0


def _check(
    field: Field, value: Any, part: ObjectFields, rules: BodyRules, model: ModelBounds
) -> None:
    # SGLang asks of its own fields whether they are None, of the others whether they hold anything.
    if field.refusal is not None and (field.switch is None or value not in _NOTHING):
        why = field.refused(rules)
        if why is not None:
            raise BadBodyError(f"{field.name}{' ' if field.switch else ': '}{why}")
    if not field.shape.fits(value, is_strict=part.is_strict):
        raise BadBodyError(f"{field.name} must be {field.shape.words}")
    if type(value) is not bool and not field.shape.is_anything:
        _check_bounds(field, value, model)


def _check_bounds(field: Field, value: Any, model: ModelBounds) -> None:
    bounds = field.bounds
    if type(value) in (list, dict):
        if bounds.max_items is not None and len(value) > bounds.max_items:
            raise BadBodyError(f"{field.name} may have {bounds.max_items} entries")
        if value == [] and not bounds.may_be_empty:
            raise BadBodyError(f"{field.name} must not be empty")
        if type(value) is dict and bounds.max_json_chars is not None:
            _check_text(field, json.dumps(value), bounds.max_json_chars)
    for each in leaves(value, field.shape):
        if type(each) is str:
            _check_text(field, each, bounds.max_chars)
        elif type(each) in (int, float):
            _check_number(field, each, model)
        elif each == [] and not bounds.may_be_empty:
            raise BadBodyError(f"{field.name} must not be empty")


def _check_text(field: Field, text: str, most: int | None) -> None:
    if most is not None and len(text) > most:
        raise BadBodyError(f"{field.name} may have {most} characters")
    if field.bounds.patterns == "itself":
        _check_repeats(field.name, num_repeats(text), [text])
    elif field.bounds.patterns == "inside":
        _check_repeats(field.name, num_bounds_in(text), patterns_in(text))


def _check_repeats(name: str, num: int, patterns: Iterable[str]) -> None:
    if num > MAX_REPEATS:
        raise BadBodyError(
            f"{name} may have {MAX_REPEATS} bounded repeats, such as {{1,9}}, or different lengths"
        )
    if any(repeat_depth(each) > MAX_REPEAT_DEPTH for each in patterns):
        raise BadBodyError(
            f"{name} may have bounded repeats, such as {{1,9}}, {MAX_REPEAT_DEPTH} deep in "
            "each other; write * or +, or repeat less"
        )


def _check_number(field: Field, value: float, model: ModelBounds) -> None:
    is_number = any("number" in kind for kind in field.shape.kinds)
    low, high = field.bounds.numbers if is_number else (field.bounds.integers[0], field.high(model))
    if low <= value <= high:
        return
    if field.bounds.integers[1] == VOCAB:
        raise BadBodyError(f"{field.name}: a token id must be from {low} to {high}")
    kind = "a number" if is_number else "an integer"
    raise BadBodyError(f"{field.name} must be {kind} from {low:g} to {high:g}")


def leaves(value: Any, shape: Shape) -> Iterator[Any]:
    """What bounds are of: scalars in a value, at any depth of lists; of integers the extremes."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is list and each:
            if set(map(type, each)) == {int}:
                yield from (min(each), max(each))
            else:
                waiting.extend(each)
        elif type(each) is dict:
            if shape.values is not None and shape.values.scalars:
                waiting.extend(each.values())
        else:
            yield each


def _objects(value: Any, shape: Shape) -> Iterator[tuple[tuple[type, ...], dict[str, Any]]]:
    """Objects of classes in a value, at any depth, with what they may be."""
    if type(value) is dict and shape.part:
        yield shape.part, value
    elif type(value) is list:
        kinds = tuple(kind for inner in shape.lists for kinds in parts_in(inner) for kind in kinds)
        for each in value:
            if type(each) is dict and kinds:
                yield kinds, each
            elif type(each) is list:
                for inner in shape.lists:
                    yield from _objects(each, inner)
    elif type(value) is dict and shape.values is not None:
        for each in value.values():
            yield from _objects(each, shape.values)


def _unknown(name: str, part: ObjectFields) -> str:
    """Names an unknown field, and the one that was meant, if it can be told."""
    if not _NAME.fullmatch(name):
        return "a field has a name that no route knows"
    known = [each.name for each in part.fields.values() if each.refusal is None]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f'"{name}" is not known here{hint}'
