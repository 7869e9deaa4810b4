"""What JSON a Python annotation takes.

    annotation of a request class --[shape_of]--> Shape --[Shape.fits]--> a value is of it, or not

A union keeps its lists apart: `list[int] | list[str]` takes no list of both, in which pydantic
would make numbers of digits. Of objects of classes it says which; table.py looks into them.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

_SCALARS: Final[tuple[type, ...]] = (bool, int, float, str)
_LISTS: Final = (list, set, tuple, frozenset)
_NULL: Final = type(None)
# Classes of other packages are parts of a grammar, and say no more than their fields' names.
_LOOKED_INTO: Final = frozenset({"sglang", "sgl_esft"})
_WORDS: Final[Mapping[type, tuple[str, str]]] = {
    str: ("a string", "strings"),
    float: ("a number", "numbers"),
    int: ("an integer", "integers"),
    bool: ("a boolean", "booleans"),
}


@dataclass(frozen=True)
class Shape:
    """The JSON that is taken; without any of these, all of it."""

    scalars: frozenset[type] = frozenset()
    lists: tuple[Shape, ...] = ()  # of their items: one for each kind of list
    part: tuple[type, ...] = ()  # an object of one of these classes
    values: Shape | None = None  # of an object whose fields have no names here
    takes_null: bool = False

    @property
    def is_anything(self) -> bool:
        return not (self.scalars or self.lists or self.part or self.values)

    @property
    def has_parts(self) -> bool:
        """Whether an object of a class is in it, at any depth."""
        inner = (*self.lists, *([self.values] if self.values else []))
        return bool(self.part) or any(each.has_parts for each in inner)

    @property
    def has_lists_of_anything(self) -> bool:
        """Whether it may be a list of which nothing is known."""
        return any(each.is_anything for each in self.lists)

    @property
    def is_one_or_list(self) -> bool:
        """Whether it may be one value, or a list of such values."""
        return bool(self.lists) and (bool(self.scalars or self.part) or len(self.lists) > 1)

    def is_list_of(self, value: object) -> bool:
        """Whether a value is the list, where it may be one such value instead."""
        if not isinstance(value, list):
            return False
        return bool(self.scalars or self.part) or any(type(each) is list for each in value)

    @property
    def kinds(self) -> tuple[str, ...]:
        """In words, such as ("a string", "a list of strings"). A number may be an integer."""
        scalars = self.scalars - {int} if float in self.scalars else self.scalars
        found = [_WORDS[kind][0] for kind in _WORDS if kind in scalars]
        found += [f"a list of {each.plural}" for each in self.lists]
        if self.part or self.values:
            of = f" of {self.values.plural}" if self.values and self.values.scalars else ""
            found.append(f"an object{of}")
        return tuple(dict.fromkeys(found)) or ("any JSON",)

    @property
    def words(self) -> str:
        return " or ".join(self.kinds)

    @property
    def plural(self) -> str:
        if self.is_anything:
            return "any JSON"
        found = [_WORDS[kind][1] for kind in _WORDS if kind in self.scalars]
        found += ["lists of " + each.plural for each in self.lists]
        found += ["objects"] if self.part or self.values else []
        return " or ".join(dict.fromkeys(found))

    def fits(self, value: Any, *, is_strict: bool = False) -> bool:
        """Whether a value of JSON is of this, less the insides of objects of classes.

        is_strict: 2.0 is no integer; else it is, as it is for pydantic.
        """
        kind = type(value)
        if kind in self.scalars or self.is_anything:
            return True
        if kind is int:
            return float in self.scalars
        if kind is float:
            return int in self.scalars and not is_strict and value.is_integer()
        if kind is list:
            return any(each.fits_all(value) for each in self.lists)
        if kind is dict:
            return bool(self.part) or (
                self.values is not None and self.values.fits_all(list(value.values()))
            )
        return value is None and self.takes_null

    def fits_all(self, values: list[Any]) -> bool:
        """Whether each of them is; a long list of token ids costs a walk in C."""
        if self.is_anything:
            return True
        others = set(map(type, values)) - self.scalars
        return not others or all(self.fits(v, is_strict=True) for v in values if type(v) in others)


ANYTHING: Final = Shape()


def shape_of(annotation: Any) -> Shape:
    """The shape of an annotation, in which no name is left to be resolved."""
    origin = get_origin(annotation) or annotation
    inner = get_args(annotation)
    found = ANYTHING
    if origin is Annotated:
        found = shape_of(inner[0])
    elif origin in (Union, types.UnionType):
        found = _union([shape_of(each) for each in inner])
    elif origin is Literal:
        found = _union([_class(type(each)) for each in inner])
    elif origin in _LISTS:
        found = Shape(lists=(shape_of(inner[0]) if inner else ANYTHING,))
    elif origin is dict or typing.is_typeddict(annotation):
        found = Shape(values=shape_of(inner[1]) if inner else ANYTHING)
    elif isinstance(annotation, type):
        found = _class(annotation)
    return found


def shape_of_any(annotations: list[Any]) -> Shape:
    """The shape of what is of one of these annotations."""
    return _union([shape_of(each) for each in annotations])


def takes_others(kind: type) -> bool:
    """Whether a class of pydantic's keeps fields that it does not name."""
    return getattr(kind, "model_config", {}).get("extra") == "allow"


def _class(kind: type) -> Shape:
    if kind is _NULL:
        return Shape(takes_null=True)
    if kind in _SCALARS:
        return Shape(frozenset({kind}))
    if issubclass(kind, enum.Enum):
        return Shape(frozenset({str}))
    return Shape(part=(kind,)) if fields_of(kind) else ANYTHING


def _union(each: list[Shape]) -> Shape:
    """Of all but null; with anything among them, anything."""
    given = [shape for shape in each if shape != Shape(takes_null=True)]
    if any(shape.is_anything for shape in given):
        return ANYTHING
    values = [shape.values for shape in given if shape.values is not None]
    part = () if ANYTHING in values else tuple(kind for shape in given for kind in shape.part)
    return Shape(
        frozenset().union(*(shape.scalars for shape in given)),
        tuple(dict.fromkeys(item for shape in given for item in shape.lists)),
        part,
        _union(values) if values else None,
        len(given) < len(each) or any(shape.takes_null for shape in given),
    )


def fields_of(kind: type) -> dict[str, Any]:
    """A class's fields as JSON names them, and their annotations; none of another type."""
    if kind.__module__.partition(".")[0] not in _LOOKED_INTO and hasattr(kind, "model_fields"):
        return dict.fromkeys(kind.model_fields, Any)
    rebuild: Callable[[], object] | None = getattr(kind, "model_rebuild", None)
    if rebuild is not None:  # pydantic resolves names of later classes when it is asked to
        rebuild()
        models: Mapping[str, Any] = getattr(kind, "model_fields", {})
        return {field.alias or name: field.annotation for name, field in models.items()}
    names = (
        [field.name for field in dataclasses.fields(kind)]
        if dataclasses.is_dataclass(kind)
        else list(getattr(kind, "__struct_fields__", ()))
    )
    hints = typing.get_type_hints(kind, include_extras=True) if names else {}
    return {name: hints[name] for name in names}
