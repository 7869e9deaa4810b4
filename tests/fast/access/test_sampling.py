"""Sampling parameters have the types that SGLang's scheduler reads, and no field of its own."""

from __future__ import annotations

import msgspec
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_esft.access.sampling import _INTERNAL, TYPES, check_types
from sgl_esft.errors import BadBodyError

GOOD = {
    "a number": [0, 0.5, -1.5],
    "a whole number": [0, 7, -1],
    "true or false": [True, False],
    "a text": ["", "x"],
    "a text or a list of texts": ["x", [], ["x", "y"]],
    "a list of whole numbers": [[], [1, 2]],
    "an object of numbers": [{}, {"1": 0.5, "2": 1}],
}
ANYTHING = [
    0,
    0.5,
    True,
    "x",
    ["x"],
    [1],
    [None],
    [True],
    [[1]],
    {"1": "x"},
    {"1": 0.5},
    {"1": None},
]


@pytest.mark.parametrize("field", sorted(TYPES))
def test_each_field_takes_its_type_only(field: str) -> None:
    kind, is_one = TYPES[field]
    for value in (*GOOD[kind], None):
        check_types({field: value, "unknown": object()})
    refused = [value for value in ANYTHING if not is_one(value)]
    assert len(refused) >= 5
    for value in refused:
        with pytest.raises(BadBodyError, match=f"{field} must be {kind}"):
            check_types({field: value})


@pytest.mark.parametrize("field", sorted(_INTERNAL))
def test_fields_of_sglangs_own_are_refused(field: str) -> None:
    with pytest.raises(BadBodyError, match=f"{field}: not for clients"):
        check_types({field: "x"})
    check_types({field: None})


def test_custom_parameters_go_with_custom_processors() -> None:
    check_types({"custom_params": {"a": 1}}, takes_custom=True)


def test_every_field_of_sglangs_is_known() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields - TYPES.keys() - _INTERNAL == set()
    assert fields >= _INTERNAL
