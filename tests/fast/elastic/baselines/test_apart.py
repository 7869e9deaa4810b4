"""The baselines use production code by its public verbs alone: no subclass, nothing private."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sgl_elastic.baselines
from sgl_elastic import coordinator

FOLDER = Path(sgl_elastic.baselines.__file__).parent
BASES = {"StrEnum", "Protocol", "NamedTuple"}


def own_private_names(tree: ast.AST) -> set[str]:
    """Private methods and functions that are defined here, and attributes that `self` is given."""
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    given = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and is_self(n.value)
    }
    return {name for name in defined | given if name.startswith("_")}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def complaints(source: str) -> list[str]:
    """What ties this module to the inside of production code, by line."""
    tree = ast.parse(source)
    own = own_private_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = {ast.unparse(base) for base in node.bases}
            found += [f"{node.lineno}: subclass of {name}" for name in sorted(names - BASES)]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            is_dunder = node.attr.startswith("__")
            if not is_dunder and not (is_self(node.value) and node.attr in own):
                found.append(f"{node.lineno}: private {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sgl_elastic"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            found += [f"{node.lineno}: imports private {name}" for name in private]
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_a_baseline_is_apart_from_production_code(path: Path) -> None:
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Mine(Coordinator):\n    pass", ["1: subclass of Coordinator"]),
        ("class Mine(m.Manager):\n    pass", ["1: subclass of m.Manager"]),
        ("def look(manager):\n    return manager._running", ["2: private manager._running"]),
        (
            "class Mine:\n    def look(self):\n        return self.manager._active",
            ["3: private self.manager._active"],
        ),
        ("class Mine:\n    def look(self):\n        return self._hmm", ["3: private self._hmm"]),
        ("from sgl_elastic.front.router import _QUIET_S", ["1: imports private _QUIET_S"]),
        (
            "class Mine(Protocol):\n    def __init__(self):\n        self._a = self._b()\n"
            "    def _b(self):\n        return 1\n",
            [],  # one's own
        ),
    ],
)
def test_the_check_finds_what_is_not_apart(source: str, found: list[str]) -> None:
    assert complaints(source) == found


def test_production_code_knows_no_baseline() -> None:
    """Only `assembly.py` picks one, and `options.py` names the strategies."""
    root = Path(coordinator.__file__).parents[1]
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "sgl_elastic.baselines" in path.read_text() and FOLDER not in path.parents
    }
    assert users == {"assembly.py", "options.py"}
