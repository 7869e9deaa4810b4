"""The ledger on a stand-in for SGLang: every kind of hook, every way of not holding."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import pytest

from sgl_esft.errors import HookError
from sgl_esft.hook_ledger import Hook, HookKind, check_signature, check_version, install, verify

ENGINE = "engine_stand_in"


class Server:
    def serve(self, request: str) -> str:
        return f"served {request}"

    @classmethod
    def start(cls, port: int) -> str:
        return f"{cls.__name__} on {port}"

    @staticmethod
    def parse(line: str) -> str:
        return line.strip()


def scale(x: int, factor: int = 2) -> int:
    return x * factor


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module to hook into, and a registry that forgets everything afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    module: Any = ModuleType(ENGINE)
    module.Server = type("Server", (), dict(Server.__dict__))
    module.scale, module.LIMIT = scale, 10
    monkeypatch.setitem(sys.modules, ENGINE, module)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    before = dict(globals())
    yield module
    globals().update(before)  # the registry also renews `from engine import scale` bindings: ours


def hook(name: str, kind: HookKind, function: Any, *parameters: str) -> Hook:
    return Hook(f"{ENGINE}.{name}", kind, function, "a test", "never", parameters)


def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return "around", original(*args, **kwargs)


CALLS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda engine: engine.scale(5),
    "Server.serve": lambda engine: engine.Server().serve("a"),
    "Server.start": lambda engine: engine.Server.start(80),
    "Server.parse": lambda engine: engine.Server().parse(" x "),
    "Server.fill_value": lambda engine: engine.Server().fill_value(),
    "LIMIT": lambda engine: engine.LIMIT,
}


@pytest.mark.parametrize(
    ("name", "kind", "function", "parameters", "answer"),
    [
        ("scale", HookKind.REPLACE, lambda x, factor=3: x + factor, ("x", "factor"), 8),
        ("scale", HookKind.BEFORE, lambda x, factor=2: ((x + 1, 2), {}), ("x", "factor"), 12),
        ("Server.serve", HookKind.AROUND, around, ("self", "request"), ("around", "served a")),
        (
            "Server.serve",
            HookKind.AFTER,
            lambda out, *_: out.upper(),
            ("self", "request"),
            "SERVED A",
        ),
        ("Server.start", HookKind.AROUND, around, ("port",), ("around", "Server on 80")),
        ("Server.parse", HookKind.AROUND, around, ("line",), ("around", "x")),
        ("Server.fill_value", HookKind.ADD, lambda self: 1, (), 1),
        ("LIMIT", HookKind.CONSTANT, 20, (), 20),
    ],
)
def test_a_hook_of_each_kind(
    engine: Any, name: str, kind: HookKind, function: Any, parameters: tuple[str, ...], answer: Any
) -> None:
    hooks = [hook(name, kind, function, *parameters)]
    install(hooks)
    verify(hooks)
    assert CALLS[name](engine) == answer


def test_names_imported_elsewhere_are_renewed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    importer: Any = ModuleType("importer_stand_in")
    importer.imported = engine.scale
    monkeypatch.setitem(sys.modules, "importer_stand_in", importer)
    install([hook("scale", HookKind.REPLACE, lambda x, factor=0: 7, "x", "factor")])
    assert importer.imported(1) == 7


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (hook("scale", HookKind.REPLACE, scale, "x"), r"scale takes \('x', 'factor'\), .*\('x',\)"),
        (hook("scale", HookKind.AROUND, around, "factor", "x"), "the hook was written for"),
        (hook("scale", HookKind.REPLACE, scale), r"written for \(\)"),
        (hook("Server.serve", HookKind.AROUND, around, "request"), "Server.serve takes"),
        (hook("gone", HookKind.REPLACE, scale, "x", "factor"), r"gone: SGLang has no such name"),
        (hook("Server.gone", HookKind.AROUND, around), "Server.gone: SGLang has no such name"),
        (hook("Gone.serve", HookKind.AROUND, around), "Gone.serve: "),
        (hook("gone.module.f", HookKind.AROUND, around), "gone.module.f: "),
        (hook("GONE", HookKind.CONSTANT, 1), "GONE: SGLang has no such name"),
        (hook("scale", HookKind.ADD, scale), "scale: SGLang defines it now; remove the hook"),
        (hook("Server.serve", HookKind.ADD, scale), "Server.serve: SGLang defines it now"),
        (hook("Gone.fill", HookKind.ADD, scale), "Gone.fill: "),
    ],
)
def test_a_target_that_is_not_as_known_is_named_and_nothing_is_hooked(
    engine: Any, bad: Hook, message: str
) -> None:
    good = hook("Server.parse", HookKind.REPLACE, lambda line: "hooked", "line")
    with pytest.raises(HookError, match=message):
        check_signature(bad)
    with pytest.raises(HookError, match=message):
        install([good, hook("LIMIT", HookKind.CONSTANT, 99), bad])
    assert engine.Server.parse(" x ") == "x"
    assert engine.LIMIT == 10


def test_what_sglangs_registry_only_logs_is_an_error_here(engine: Any) -> None:
    """It refuses to wrap a class, logs that, and would go on."""
    engine.scale = type("Scale", (), {"__init__": lambda self, x: None})
    with pytest.raises(HookError, match=rf"not in place.*{ENGINE}\.scale"):
        install([hook("scale", HookKind.AROUND, around, "x")])


def installed(engine: Any) -> list[Hook]:
    hooks = [
        hook("scale", HookKind.REPLACE, lambda x, factor=0: 7, "x", "factor"),
        hook("Server.serve", HookKind.AROUND, around, "self", "request"),
        hook("LIMIT", HookKind.CONSTANT, 20),
        hook("Server.fill_value", HookKind.ADD, lambda self: 1),
    ]
    install(hooks)
    return hooks


@pytest.mark.parametrize(
    ("undo", "name"),
    [
        (lambda engine: setattr(engine, "scale", engine.scale.__wrapped__), "scale"),
        (lambda engine: setattr(engine, "scale", lambda x, factor: 7), "scale"),
        (lambda engine: setattr(engine.Server, "serve", Server.serve), "Server.serve"),
        (
            lambda engine: setattr(engine.Server, "serve", wraps(Server.serve)(lambda *_: "")),
            "Server.serve",
        ),
        (lambda engine: setattr(engine, "LIMIT", 10), "LIMIT"),
        (lambda engine: setattr(engine.Server, "fill_value", lambda self: 2), "Server.fill_value"),
    ],
)
def test_a_hook_undone_later_is_named(engine: Any, undo: Callable[[Any], None], name: str) -> None:
    hooks = installed(engine)
    verify(hooks)
    undo(engine)
    with pytest.raises(HookError) as caught:
        verify(hooks)
    assert str(caught.value).partition(": ")[2] == f"{ENGINE}.{name}"


@pytest.mark.parametrize("name", ["fill_value", "serve"])
def test_a_target_that_vanished_later_is_named(engine: Any, name: str) -> None:
    hooks = installed(engine)
    delattr(engine.Server, name)
    with pytest.raises(HookError, match=rf"{ENGINE}\.Server\.{name}"):
        verify(hooks)


def test_a_hook_that_another_plugin_wraps_is_still_in_place(engine: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    hooks = installed(engine)
    engine.scale = _wrap_fn(engine.scale, lambda out, *_: out + 1, HookType.AFTER)
    verify(hooks)
    assert engine.scale(0) == 8


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+local"])
def test_a_version_that_was_tried(version: str) -> None:
    check_version([hook("scale", HookKind.REPLACE, scale)], version)


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23rc1", "0.5.24", "0.6.0", "1.0", "0.5.3"])
def test_a_version_that_was_not_tried_is_refused(version: str) -> None:
    with pytest.raises(HookError, match=rf"{ENGINE}\.scale was tried with .*, this is {version};"):
        check_version([hook("scale", HookKind.REPLACE, scale)], version)
