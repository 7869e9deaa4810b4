"""Which module of ours imports which.

working tree -> SOURCES -> [imported] -> [import_graph] -> test_imports_dag, test_style_budget
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum

from tests.repo.tree import PACKAGES, ROOT, module_name, python_files

SOURCES = {module_name(path): (ROOT / path).read_text() for path in python_files(*PACKAGES)}
PACKAGE_MODULES = {
    module_name(path) for path in python_files(*PACKAGES) if path.endswith("__init__.py")
}


class When(Enum):
    """Which imports count, each with those before it."""

    AT_IMPORT = 1  # run while the module is itself imported
    EVER = 2  # and inside functions
    NAMED = 3  # and under TYPE_CHECKING


@dataclass(frozen=True)
class Imported:
    """One imported thing: `from a import b` is ("a", "b"), `import a.b` is ("a.b", None)."""

    base: str
    name: str | None

    def module_among(self, known: Container[str]) -> str:
        """What is really imported: `a.b` where that is a module, else `a`."""
        inner = f"{self.base}.{self.name}"
        return inner if inner in known else self.base


def imported(source: str, module: str, *, is_package: bool, when: When) -> set[Imported]:
    """Everything this source imports, relative imports resolved."""
    found: set[Imported] = set()
    for node in walk_imports(ast.parse(source), when):
        if isinstance(node, ast.Import):
            found.update(Imported(alias.name, None) for alias in node.names)
        else:
            base = absolute_base(node, module, is_package)
            found.update(Imported(base, alias.name) for alias in node.names)
    return found


def walk_imports(tree: ast.AST, when: When) -> Iterable[ast.Import | ast.ImportFrom]:
    """Import statements that are run by then."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif runs(node).value <= when.value:
            yield from walk_imports(node, when)


def runs(node: ast.AST) -> When:
    """When what stands below a node is run."""
    if isinstance(node, ast.If):
        is_for_types = ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        return When.NAMED if is_for_types else When.AT_IMPORT
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    return When.EVER if is_function else When.AT_IMPORT


def absolute_base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """`from ..x import y` in a.b.c -> a.x."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def import_graph(
    sources: dict[str, str], packages: set[str], when: When = When.EVER
) -> dict[str, set[str]]:
    """Module -> modules of ours it imports.

    Every import also runs the `__init__` of the folders above; those edges are left out.
    """
    graph = {}
    for module, source in sources.items():
        found = imported(source, module, is_package=module in packages, when=when)
        names = {each.module_among(sources) for each in found}
        graph[module] = {name for name in names if name in sources} - {module}
    return graph
