"""Which adapters a body means, and what is wrong with the names in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sgl_esft.errors import ConfigError, NotAllowedError, UnknownAdapterError
from sgl_esft.http.adapter_names import KnownNames, resolve

NAMES = KnownNames(frozenset({"math", "law"}), frozenset({"/models/base"}))


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/generate", {"text": "x"}, {None}),
        ("/generate", {"text": "x", "adapter": "math"}, {"math"}),
        ("/generate", {"text": "x", "lora_path": "law"}, {"law"}),
        ("/generate", {"text": ["x", "y"], "lora_path": ["law", None]}, {"law", None}),
        ("/generate", {"text": ["x", "y"], "adapter": ["law", "math"]}, {"law", "math"}),
        ("/generate", {"text": ["x"], "lora_path": [None]}, {None}),
        ("/v1/completions", {"prompt": "x", "model": "base:math"}, {"math"}),
        ("/v1/completions", {"prompt": "x", "model": "law"}, {"law"}),
        ("/v1/completions", {"prompt": "x", "model": "/models/base"}, {None}),
        ("/v1/chat/completions", {"model": "default"}, {None}),
        ("/v1/responses", {"model": "base"}, {None}),
        ("/v1/embeddings", {"lora_path": "law"}, {"law"}),
        ("/v1/responses", {"model": "math"}, ConfigError),
        ("/generate", {"text": "x", "adapter": "math", "lora_path": "law"}, ConfigError),
        ("/generate", {"text": "x", "adapter": "nobody"}, UnknownAdapterError),
    ],
)
def test_what_a_body_asks_for(path: str, body: dict[str, Any], asked: Any) -> None:
    if isinstance(asked, set):
        assert resolve(path, body, NAMES, everywhere=True).asked == asked
    else:
        with pytest.raises(asked):
            resolve(path, body, NAMES, everywhere=True)


@pytest.mark.parametrize("name", ["law", "nobody"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "adapter": "{}"}),
        ("/generate", {"text": "x", "adapter": "math", "lora_path": "{}"}),
        ("/v1/completions", {"prompt": "x", "model": "base:{}"}),
        ("/v1/responses", {"input": "x", "adapter": "{}"}),
        ("/tokenize", {"prompt": "x", "model": "{}"}),
        ("/encode", {"text": "x", "lora_path": "{}"}),
    ],
)
def test_others_adapters_are_not_there(path: str, body: dict[str, Any], name: str) -> None:
    """One of others does not differ from none, whatever else is wrong."""
    named = {field: value.format(name) for field, value in body.items()}
    with pytest.raises(UnknownAdapterError):
        resolve(path, named, replace(NAMES, adapters=frozenset({"math"})), everywhere=True)


@pytest.mark.parametrize(
    ("body", "rewritten"),
    [
        ({"text": "x"}, None),
        ({"lora_path": "math"}, None),
        ({"adapter": "math", "n": 1}, {"lora_path": "math", "n": 1}),
        ({"model": "base:law"}, {"model": "base:law", "lora_path": "law"}),
        ({"adapter": None, "lora_path": "law"}, {"lora_path": "law"}),
    ],
)
def test_what_sglang_sees(body: dict[str, Any], rewritten: dict[str, Any] | None) -> None:
    assert resolve("/generate", body, NAMES).rewritten == rewritten


def test_what_others_routes_read_is_theirs_to_judge() -> None:
    """Unless it matters to a key which adapter is asked for."""
    body = {"lora_path": "nobody"}
    assert resolve("/v1/embeddings", body, NAMES).asked == frozenset()
    with pytest.raises(UnknownAdapterError):
        resolve("/v1/embeddings", body, NAMES, everywhere=True)


@pytest.mark.parametrize(
    ("of_some", "error"), [(False, UnknownAdapterError), (True, NotAllowedError)]
)
def test_the_nearest_name_is_offered_of_those_the_key_may_use(
    of_some: bool, error: type[Exception]
) -> None:
    names = KnownNames(frozenset({"caesar"}), frozenset({"/models/base"}), of_some)
    for body in ({"adapter": "ceasar"}, {"model": "base:ceasar"}, {"model": "ceasar"}):
        with pytest.raises(error, match="did you mean 'caesar'"):
            resolve("/v1/completions", body, names)
    with pytest.raises(error, match="GET /v1/models") as found:
        resolve("/v1/completions", {"adapter": "reverse"}, names)
    assert "caesar" not in str(found.value)
