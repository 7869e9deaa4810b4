"""What the next SGLang may add to its classes is seen, and opens nothing.

a class of a request, or of an object in one --[heir]--> the same, with a field that it inherits
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pydantic
import pytest

from sgl_esft.errors import BadBodyError
from sgl_esft.fields import check, request_classes, table
from sgl_esft.fields.described import INTERNAL, NOT_FOR_CLIENTS, CustomParams
from sgl_esft.fields.rules import BodyRules, ModelBounds
from sgl_esft.fields.shapes import fields_of, takes_others
from tests.fast.access import test_fields

BOUNDS = ModelBounds(vocab_size=300, context_length=1000)
WITH_FIELDS = ("model_fields", "__dataclass_fields__", "__struct_fields__")
CACHES = (
    table.part_of,
    table.inside,
    table.routes,
    table.fields_of_prompts,
    table._names_of_prompts,
)
DOCUMENTS = {kind for kinds in request_classes.route_classes().values() for kind in kinds}


def annotations_of(kind: type) -> dict[str, Any]:
    """As `fields_of`, by other means: every annotation of a class, inherited ones too."""
    models = getattr(kind, "model_fields", None)
    if models is not None:
        return {name: field.annotation for name, field in models.items()}
    return typing.get_type_hints(kind, include_extras=True)


def classes_in(annotation: Any) -> Iterator[type]:
    """The classes of SGLang's that have fields, anywhere in an annotation."""
    is_theirs = isinstance(annotation, type) and annotation.__module__.startswith("sglang.")
    if is_theirs and any(hasattr(annotation, name) for name in WITH_FIELDS):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from classes_in(inner)


def all_classes() -> set[type]:
    """Of all requests, and of all objects in them."""
    waiting = [*DOCUMENTS, *request_classes.part_classes().values()]
    found: set[type] = set()
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            for annotation in annotations_of(kind).values():
                waiting += classes_in(annotation)
    return found


# Objects in which no client names a field: of fields that none may send, of media, which SGLang
# also takes as any JSON, and of `input` of /v1/responses, which may hold any object.
NOT_LOOKED_INTO = {
    *("KvHintAction", "KvHintsEnvelope", "WatermarkRequestConfig"),
    *("ImageData", "VideoData"),
    "ResponseOutputMessage",
}
LOOKED_INTO = {
    kind
    for kind in all_classes() - {CustomParams}  # which is ours
    if kind.__qualname__ not in NOT_LOOKED_INTO
}


def heir(kind: type, name: str) -> type:
    """A class as this one, which inherits one field more."""
    base: type
    if hasattr(kind, "model_fields"):
        more: dict[str, Any] = {name: (bool, False)}
        base = pydantic.create_model(kind.__name__, __base__=kind, **more)
    elif dataclasses.is_dataclass(kind):
        base = dataclasses.make_dataclass(kind.__name__, [(name, bool, False)], bases=(kind,))
    else:
        base = msgspec.defstruct(kind.__name__, [(name, bool, False)], bases=(kind,), kw_only=True)
    return type(base)(kind.__name__, (base,), {"__module__": kind.__module__})


Install = Callable[[Mapping[type, str]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Gives classes a field more each, by name, wherever SGLang's classes name them."""

    def install(names: Mapping[type, str]) -> None:
        heirs = {kind: heir(kind, name) for kind, name in names.items()}
        monkeypatch.setattr(table, "fields_of", lambda kind: fields_of(heirs.get(kind, kind)))
        for each in CACHES:
            each.cache_clear()

    yield install
    monkeypatch.undo()
    for each in CACHES:
        each.cache_clear()


def refused() -> set[str]:
    """Fields that no client may send, as the test of what is described sees them."""
    return {row.name for row in table.described_fields() if row.refusal and not row.switch}


def test_a_field_that_any_class_inherits_is_seen_and_refused(install: Install) -> None:
    names = {kind: f"new_{number}" for number, kind in enumerate(LOOKED_INTO)}
    assert refused() == set(INTERNAL)
    install(names)
    missed = {kind.__qualname__ for kind in names if names[kind] not in refused()}
    assert missed == set()
    with pytest.raises(AssertionError, match="new_"):
        test_fields.test_every_field_of_sglangs_classes_is_described()
    for kind, name in names.items():
        with pytest.raises(BadBodyError, match=f"{name}: {NOT_FOR_CLIENTS}"):
            check._check_part(table.inside((kind,)), {name: True}, BodyRules(), BOUNDS)
    for path, kinds in request_classes.route_classes().items():
        for kind in kinds:
            with pytest.raises(BadBodyError, match=f"{names[kind]}: {NOT_FOR_CLIENTS}"):
                check.check_fields(path, {names[kind]: True}, BodyRules(), BOUNDS)


@pytest.mark.parametrize("name", ["data", "url", "options", "effort"])
def test_a_name_that_is_known_inside_opens_nothing_outside(name: str, install: Install) -> None:
    """Of a message's `url` it is known what SGLang does with it; of a request's it is not."""
    install(dict.fromkeys(DOCUMENTS, name))
    assert name in refused()
    for path in request_classes.route_classes():
        with pytest.raises(BadBodyError, match=f"{name}: {NOT_FOR_CLIENTS}"):
            check.check_fields(path, {name: True}, BodyRules(), BOUNDS)


def test_classes_that_are_not_looked_into() -> None:
    """Red when SGLang puts a new kind of object where the table does not see it."""
    waiting = list(request_classes.route_classes().values())
    reached: set[type] = set()
    while waiting:
        kinds = waiting.pop()
        if not reached.issuperset(kinds):
            reached.update(kinds)
            for field in table.part_of(kinds).fields.values():
                waiting += table.parts_in(field.shape)
    assert {kind.__qualname__ for kind in all_classes() - reached} == NOT_LOOKED_INTO


def test_what_takes_fields_that_it_does_not_name() -> None:
    """What /v1/responses holds may; a document may not, whatever its class says."""
    found = {kind.__qualname__ for kind in all_classes() if takes_others(kind)}
    assert found == {"ResponseOutputMessage", "ResponseTool", "TokenizeRequest"}
    for path in request_classes.route_classes():
        with pytest.raises(BadBodyError, match='"new" is not known here'):
            check.check_fields(path, {"new": 1}, BodyRules(), BOUNDS)
