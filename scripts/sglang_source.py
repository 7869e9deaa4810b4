"""SGLang's names as its source defines them, read and never imported.

    a folder with sglang/ in it --> [SourceTree.find] --> Definition: the statements that define it

A name is found where it is defined: imports of it, star imports and base classes are followed.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Statements: TypeAlias = tuple[ast.stmt, ...]

_PACKAGE = "sglang"
_MOST_STEPS = 20  # imports followed from one name; more is a circle


@dataclass(frozen=True)
class Definition:
    """What a name is: a module (no statements), or whatever statements of `module` define it.

    There are several where a condition chooses, such as the platform.
    """

    module: str
    statements: Statements

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What a caller must know; empty for a value or a module."""
        return tuple(_signature(statement) for statement in self.statements)

    @cached_property
    def body(self) -> tuple[str, ...]:
        """The code without places, docstrings and annotations of functions."""
        return tuple(_normalised(statement) for statement in self.statements)

    def text(self) -> str:
        """The code, laid out anew."""
        return "\n".join(ast.unparse(statement) for statement in self.statements)


class SourceTree:
    """The Python files below a folder that holds `sglang/`."""

    def __init__(self, root: Path) -> None:
        """Raises FileNotFoundError when there is no SGLang there."""
        if not (root / _PACKAGE / "__init__.py").is_file():
            raise FileNotFoundError(f"{root} holds no {_PACKAGE}/__init__.py")
        self.root = root
        self._read = cache(self._read_module)

    def find(self, name: str, steps: int = _MOST_STEPS) -> Definition | None:
        """A dotted name: of a module, of what one defines, of a class's attribute. None: gone."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self._path(module) is not None:
                return self._within(module, parts[end:], steps)
        return None

    def _within(self, module: str, attributes: list[str], steps: int) -> Definition | None:
        if not attributes:
            return Definition(module, ())
        found = self._in_module(module, attributes[0], steps)
        for attribute in attributes[1:]:
            found = None if found is None else self._in_classes(found, attribute, steps)
        return found

    def _in_module(self, module: str, name: str, steps: int) -> Definition | None:
        if steps == 0:
            return None
        body = self._read(module)
        own = tuple(statement for statement in body if name in _defined(statement))
        imports = [(s, a) for s in body if isinstance(s, ast.ImportFrom) for a in s.names]
        for statement, alias in () if own else imports:
            if name == (alias.asname or alias.name):
                return self._imported(module, statement, alias.name, steps)
        for statement, alias in () if own else imports:
            if alias.name == "*" and (found := self._imported(module, statement, name, steps)):
                return found
        return Definition(module, own) if own else None

    def _imported(
        self, module: str, statement: ast.ImportFrom, name: str, steps: int
    ) -> Definition | None:
        """What an import statement brings in; of other packages, that statement."""
        source = self._absolute(module, statement)
        if source.split(".")[0] == _PACKAGE:
            return self.find(f"{source}.{name}", steps - 1)
        return Definition(module, (statement,)) if statement.names[0].name != "*" else None

    def _in_classes(self, owner: Definition, name: str, steps: int) -> Definition | None:
        """An attribute of a class, its own or inherited."""
        for found in owner.statements:
            if not isinstance(found, ast.ClassDef):
                continue
            own = tuple(s for s in _flat(found.body) if name in _defined(s))
            if own:
                return Definition(owner.module, own)
            for base in map(ast.unparse, found.bases):
                above = self._within(owner.module, base.split("[")[0].split("."), steps - 1)
                inherited = above and self._in_classes(above, name, steps - 1)
                if inherited:
                    return inherited
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        is_package = (path := self._path(module)) is not None and path.name == "__init__.py"
        parts = module.split(".")
        above = parts[: len(parts) - statement.level + is_package]
        return ".".join([*above, *filter(None, [statement.module])])

    def _path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        candidates = (base.with_suffix(".py"), base / "__init__.py")
        return next((path for path in candidates if path.is_file()), None)

    def _read_module(self, module: str) -> Statements:
        path = self._path(module)
        return () if path is None else tuple(_flat(ast.parse(path.read_text()).body))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those under a condition, a `try` or a `with` included."""
    for statement in body:
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _flat(getattr(statement, inner, []))
        for handler in statement.handlers if isinstance(statement, ast.Try) else ():
            yield from _flat(handler.body)


def _defined(statement: ast.stmt) -> set[str]:
    """Names that a statement defines; those it imports from SGLang are found elsewhere."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Assign():
            targets = [node for target in statement.targets for node in ast.walk(target)]
            return {node.id for node in targets if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Import():
            return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return set()


def _signature(statement: ast.stmt) -> object:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return _parameters(statement)
    if not isinstance(statement, ast.ClassDef):
        return None
    for member in statement.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _parameters(member)
    return tuple(
        (_unparsed(member.target), _unparsed(member.value))
        for member in statement.body
        if isinstance(member, ast.AnnAssign)
    )


def _parameters(function: Function) -> tuple[object, ...]:
    """(kind, name, default) of each; annotations are for readers."""
    own = function.args
    positional = [*own.posonlyargs, *own.args]
    missing = [None] * (len(positional) - len(own.defaults))
    found = [
        ("positional", arg.arg, _unparsed(default))
        for arg, default in zip(positional, [*missing, *own.defaults], strict=True)
    ]
    found += [
        ("keyword", arg.arg, _unparsed(default))
        for arg, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)
    ]
    stars = (("*", own.vararg), ("**", own.kwarg))
    return (*found, *((kind, arg.arg, None) for kind, arg in stars if arg is not None))


def _unparsed(node: ast.AST | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _normalised(statement: ast.stmt) -> str:
    bare = copy.deepcopy(statement)
    for node in ast.walk(bare):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = _without_docstring(node.body)
    return ast.dump(bare)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body
