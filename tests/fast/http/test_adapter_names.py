"""Which adapters a body means, and what is wrong with the names in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sgl_esft.errors import (
    AdapterNameError,
    ConfigError,
    NotAllowedError,
    TooManyAdaptersError,
    UnknownAdapterError,
)
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


@pytest.mark.parametrize("body", [{"adapter": "tone"}, {"model": "/models/base:tone"}])
def test_a_server_without_lora_says_so(body: dict[str, Any]) -> None:
    """As SGLang does, whose own tests look for these words."""
    with pytest.raises(UnknownAdapterError, match="LoRA adapters are not enabled: --enable-lora"):
        resolve("/v1/chat/completions", body, NAMES)
    with pytest.raises(UnknownAdapterError) as found:
        resolve("/v1/chat/completions", body, replace(MIXED, adapters=frozenset({"math"})))
    assert "LoRA" not in str(found.value)


# On a server that takes LoRA adapters: "tone" and "mood" are.
MIXED = replace(
    NAMES,
    adapters=frozenset({"math", "law", "tone", "mood", "new"}),
    kind_of={"math": "esft", "law": "esft", "tone": "lora", "mood": "lora"}.get,
)


@pytest.mark.parametrize(
    ("path", "body", "sent", "asked"),
    [
        ("/generate", {"text": "x", "adapter": ["math", "tone"]}, "math+tone", {"math", "tone"}),
        ("/generate", {"text": "x", "adapter": ["tone", "math"]}, "math+tone", {"math", "tone"}),
        ("/generate", {"text": "x", "lora_path": ["tone", "math"]}, "math+tone", {"math", "tone"}),
        ("/generate", {"text": "x", "adapter": "tone+math"}, "math+tone", {"math", "tone"}),
        ("/generate", {"text": "x", "adapter": ["tone"]}, "tone", {"tone"}),
        ("/generate", {"text": "x", "adapter": ["new", "tone"]}, "new+tone", {"new", "tone"}),
        (
            "/generate",
            {"text": ["x", "y", "z"], "adapter": [["tone", "law"], "math", None]},
            ["law+tone", "math", None],
            {"law", "tone", "math", None},
        ),
        ("/generate", {"text": ["x", "y"], "adapter": ["tone", "math"]}, ["tone", "math"], None),
        ("/generate", {"input_ids": [1, 2], "adapter": ["math", "mood"]}, "math+mood", None),
        ("/v1/completions", {"prompt": "x", "model": "base:math+tone"}, "math+tone", None),
        ("/v1/completions", {"prompt": "x", "model": "tone+math"}, "math+tone", None),
        (
            "/v1/completions",
            {"prompt": "x", "model": "base:tone+math", "adapter": ["math", "tone"]},
            "math+tone",
            {"math", "tone"},
        ),
    ],
)
def test_two_adapters_for_a_prompt(
    path: str, body: dict[str, Any], sent: Any, asked: set[str | None] | None
) -> None:
    found = resolve(path, body, MIXED)
    assert found.rewritten is not None
    assert found.rewritten["lora_path"] == sent
    assert "adapter" not in found.rewritten
    flat = sent if isinstance(sent, list) else [sent]
    parts = {part for name in flat for part in (name.split("+") if name else [None])}
    assert found.asked == (asked or parts), "each is one that the key must be allowed"


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ({"adapter": ["math", "law"]}, TooManyAdaptersError, "are both ESFT adapters"),
        ({"adapter": ["tone", "mood"]}, TooManyAdaptersError, "are both LoRA adapters"),
        ({"adapter": ["math", "math"]}, TooManyAdaptersError, "a prompt has one adapter, or two"),
        ({"adapter": ["math", "tone", "mood"]}, TooManyAdaptersError, "or two of different kinds"),
        ({"adapter": []}, TooManyAdaptersError, "or two of different kinds"),
        ({"adapter": "math+tone+mood"}, TooManyAdaptersError, "or two of different kinds"),
        ({"adapter": ["math", "nobody"]}, UnknownAdapterError, "'nobody' is not known"),
        ({"adapter": "math+"}, UnknownAdapterError, "'' is not known"),
        ({"adapter": [["math"], "tone"]}, AdapterNameError, "named by a string"),
        ({"adapter": ["math+tone", "mood"]}, UnknownAdapterError, "'math+tone' is not known"),
        ({"adapter": ["math", None]}, AdapterNameError, "named by a string"),
        ({"adapter": ["math", "tone"], "lora_path": "tone"}, ConfigError, "different adapters"),
        ({"model": "base:math+law"}, TooManyAdaptersError, "are both ESFT adapters"),
    ],
)
def test_what_two_adapters_cannot_be(
    body: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        resolve("/generate", {"text": "x", **body}, MIXED)
    assert said in str(raised.value)


def test_a_server_of_one_kind_takes_no_pairs() -> None:
    with pytest.raises(ConfigError, match=r"2 adapters for a single prompt"):
        resolve("/generate", {"text": "x", "adapter": ["math", "law"]}, NAMES)
    for named in ({"adapter": "math+law"}, {"model": "base:math+law"}, {"model": "math+law"}):
        with pytest.raises(UnknownAdapterError):
            resolve("/generate", {"text": "x", **named}, NAMES)


def test_a_key_must_be_allowed_both() -> None:
    own = replace(MIXED, adapters=frozenset({"math"}), of_some=True)
    with pytest.raises(NotAllowedError):
        resolve("/generate", {"text": "x", "adapter": ["math", "tone"]}, own)
