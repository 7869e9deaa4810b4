"""Keys are read strictly, compared as digests, and never shown."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_esft.access import keys
from sgl_esft.access.keys import Caller, KeyRing
from sgl_esft.errors import ConfigError

SECRET = "sk-0123456789-abcdefghij"
OTHER = "sk-another-0123456789-xyz"

Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(document: Any) -> Path:
        path = tmp_path / "keys.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        path.chmod(0o600)
        return path

    return write


def test_a_file_with_every_field(write: Write) -> None:
    path = write(
        {
            "keys": [
                {
                    "name": "team-a",
                    "key": SECRET,
                    "adapters": ["math", "law"],
                    "base_model": False,
                    "max_concurrency": 4,
                    "tokens_per_minute": 6000,
                },
                {
                    "name": "ops",
                    "sha256": hashlib.sha256(OTHER.encode()).hexdigest(),
                    "admin": True,
                },
            ]
        }
    )
    ring = KeyRing(keys.read_keys_file(path))
    team = Caller("team-a", False, frozenset({"math", "law"}), False, 4, 6000)
    assert ring.find(SECRET) == team
    assert ring.find(OTHER) == Caller("ops", is_admin=True)
    assert ring.has_admin
    for wrong in ("", SECRET[:-1], SECRET + "x", SECRET.upper(), "ä", "\udcff"):
        assert ring.find(wrong) is None


def one(**changes: object) -> dict[str, list[Any]]:
    entry = {"name": "a", "key": SECRET, **changes}
    return {"keys": [{k: v for k, v in entry.items() if v != "LEFT OUT"}]}


REFUSED = [
    ("[]", "not an object"),
    ("{", "not valid JSON"),
    ("{}", "at least one key"),
    ({"keys": []}, "at least one key"),
    ({"keys": [], "more": 1}, "at least one key"),
    ({"keys": {"a": SECRET}}, "at least one key"),
    ({"keys": [SECRET]}, "key 1: an object of"),
    (one(name=SECRET), "key 1: a name in it holds a key"),
    (one(adapters=["a" + SECRET]), "key 1: a name in it holds a key"),
    ({"keys": [{"name": "a" + SECRET, "key": "x" * 16}, *one()["keys"]]}, "key 1: a name in it"),
    ({"keys": [{"name": "a", SECRET: True}]}, "key 1: an object of"),
    (one(admni=True), "key 1: an object of"),
    (one(name="LEFT OUT"), "missing required field `name`"),
    (one(name="a b"), r"matching regex .* `\$\.name`"),
    (one(name=7), r"`str`, got `int` - at `\$\.name`"),
    (one(key="LEFT OUT"), "give either key, or sha256"),
    (one(sha256="0" * 64), "give either key, or sha256"),
    (one(key="LEFT OUT", sha256="0" * 63), r"matching regex .* `\$\.sha256`"),
    (one(key="LEFT OUT", sha256="G" * 64), r"matching regex .* `\$\.sha256`"),
    (one(key="short"), "16 to 256 printable"),
    (one(key=SECRET + " x"), "16 to 256 printable"),
    (one(key=SECRET + "\n"), "16 to 256 printable"),
    (one(key="x" * 257), "16 to 256 printable"),
    (one(admin="yes"), r"Expected `bool`, .* `\$\.admin`"),
    (one(admin=1), r"Expected `bool`, .* `\$\.admin`"),
    (one(base_model=None), r"Expected `bool`, .* `\$\.base_model`"),
    (one(adapters="math"), r"Expected .* `\$\.adapters"),
    (one(adapters=[7]), r"Expected .* `\$\.adapters"),
    (one(adapters=["a/b"]), "adapters: "),
    (one(max_concurrency=0), r"Expected `int` >= 1 - at `\$\.max_concurrency`"),
    (one(max_concurrency=True), r"Expected `int.* `\$\.max_concurrency`"),
    (one(tokens_per_minute=1.5), r"Expected `int.* `\$\.tokens_per_minute`"),
    (one(tokens_per_minute=1 << 31), r"Expected `int.* `\$\.tokens_per_minute`"),
    (f'{{"keys": [{{"name": "a", "name": "b", "key": "{SECRET}"}}]}}', "appears twice"),
]


@pytest.mark.parametrize(("document", "message"), REFUSED)
def test_a_file_that_is_not_right(document: Any, message: str, write: Write) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        keys.read_keys_file(write(document))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o660])
def test_a_file_that_others_can_use(mode: int, write: Write) -> None:
    path = write(one())
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.read_keys_file(path)


def test_a_file_of_another_user(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(one())
    keys.read_keys_file(path)
    theirs = list(path.stat())
    theirs[stat.ST_UID] = 4242
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result(theirs))
    with pytest.raises(ConfigError, match="must be yours and nobody else's"):
        keys.read_keys_file(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("missing", "pipe", "."):
        with pytest.raises(ConfigError):
            keys.read_keys_file(tmp_path / name)


def test_a_file_that_is_too_large(write: Write) -> None:
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        keys.read_keys_file(write(" " * (1 << 20) + json.dumps(one())))


def test_doubles_are_refused() -> None:
    first = keys.entry_for(Caller("a"), SECRET, "x")
    with pytest.raises(ConfigError, match="two keys are named 'a'"):
        KeyRing([first, keys.entry_for(Caller("a"), OTHER, "x")])
    with pytest.raises(ConfigError, match="'a' and 'b' have the same key"):
        KeyRing([first, keys.entry_for(Caller("b"), SECRET, "x")])


def test_nothing_prints_a_key() -> None:
    entry = keys.entry_for(Caller("a"), SECRET, "x")
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    shown = f"{entry} {entry!r} {KeyRing([entry])!r} {KeyRing([entry]).find(SECRET)!r}"
    assert SECRET not in shown
    assert digest not in shown
    assert repr(entry.digest) not in shown


def test_the_admin_key_of_the_environment() -> None:
    entry = keys.admin_from_environment("ADMIN", {"ADMIN": SECRET})
    assert KeyRing([entry]).find(SECRET) == Caller("admin", is_admin=True)
    for environment in ({}, {"ADMIN": ""}):
        with pytest.raises(ConfigError, match="--admin-key-env ADMIN: the variable is not set"):
            keys.admin_from_environment("ADMIN", environment)
    with pytest.raises(ConfigError, match="16 to 256") as caught:
        keys.admin_from_environment("ADMIN", {"ADMIN": "hunter2"})
    assert "hunter2" not in str(caught.value)


KEY = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=16, max_size=40)


@given(st.lists(KEY, min_size=1, max_size=5, unique=True), st.text(max_size=40))
def test_a_ring_finds_its_keys_and_no_others(known: list[str], other: str) -> None:
    ring = KeyRing(keys.entry_for(Caller(f"k{i}"), key, "x") for i, key in enumerate(known))
    for i, key in enumerate(known):
        assert ring.find(key).name == f"k{i}"
    if other not in known:
        assert ring.find(other) is None
