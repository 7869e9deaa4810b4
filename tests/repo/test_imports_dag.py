"""Imports form a DAG, packages keep out of each other, and few modules name SGLang."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable
from dataclasses import dataclass

from tests.repo.tree import PACKAGES, ROOT, module_name, python_files

# The modules that may import from sglang: the hook ledger's family, which the hook tests resolve
# against the installed version, and the launcher, which hands over to SGLang's own. A trailing `.`
# allows a package with all it holds. An entry that nothing needs fails.
MAY_IMPORT_SGLANG = {
    "sgl_esft.hook_ledger",
    "sgl_esft.lang.",
    "sgl_esft.launch.",
    "sgl_esft.launch_server",
    "sgl_esft.platform.",
    "sgl_esft.plugin",
    "sgl_esft.sglang_api",
}

# Package -> packages it must not import, at any depth of its code.
FORBIDDEN = {
    "sgl_esft": {"sgl_elastic", "bench", "tests", "scripts"},
    "sgl_elastic": {"sgl_esft", "bench", "tests", "scripts"},
    "sgl_esft_kernels": {"sgl_esft", "sgl_elastic", "sglang", "bench", "tests", "scripts"},
}

SOURCES = {module_name(path): (ROOT / path).read_text() for path in python_files(*PACKAGES)}
PACKAGE_MODULES = {
    module_name(path) for path in python_files(*PACKAGES) if path.endswith("__init__.py")
}


@dataclass(frozen=True)
class Imported:
    """One imported thing: `from a import b` is ("a", "b"), `import a.b` is ("a.b", None)."""

    base: str
    name: str | None

    def module_among(self, known: Container[str]) -> str:
        """What is really imported: `a.b` where that is a module, else `a`."""
        inner = f"{self.base}.{self.name}"
        return inner if inner in known else self.base


def imported(source: str, module: str, *, is_package: bool, top_level_only: bool) -> set[Imported]:
    """Everything this source imports, relative imports resolved."""
    found: set[Imported] = set()
    for node in walk_imports(ast.parse(source), top_level_only):
        if isinstance(node, ast.Import):
            found.update(Imported(alias.name, None) for alias in node.names)
        else:
            base = absolute_base(node, module, is_package)
            found.update(Imported(base, alias.name) for alias in node.names)
    return found


def walk_imports(tree: ast.AST, top_level_only: bool) -> Iterable[ast.Import | ast.ImportFrom]:
    """Import statements; top level means run at import time, so not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (top_level_only and runs_later(node)):
            yield from walk_imports(node, top_level_only)


def runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def absolute_base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """`from ..x import y` in a.b.c -> a.x."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def import_graph(sources: dict[str, str], packages: set[str]) -> dict[str, set[str]]:
    """Module -> modules of ours it imports while it is itself imported.

    Every import also runs the `__init__` of the folders above; those edges are left out.
    """
    graph = {}
    for module, source in sources.items():
        found = imported(source, module, is_package=module in packages, top_level_only=True)
        names = {each.module_among(sources) for each in found}
        graph[module] = {name for name in names if name in sources} - {module}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Some cycle as a path that ends where it began, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for following in sorted(graph[node]):
            cycle = visit(following, [*path, node])
            if cycle:
                return cycle
        done.add(node)
        return None

    return next((cycle for node in sorted(graph) if (cycle := visit(node, []))), None)


def roots_imported(source: str, module: str) -> set[str]:
    """First parts of everything imported anywhere in the source, late imports included."""
    is_package = module in PACKAGE_MODULES
    found = imported(source, module, is_package=is_package, top_level_only=False)
    return {each.base.split(".")[0] for each in found}


def allows(entry: str, module: str) -> bool:
    return module == entry.rstrip(".") or (entry.endswith(".") and module.startswith(entry))


def test_imports_form_a_dag() -> None:
    assert find_cycle(import_graph(SOURCES, PACKAGE_MODULES)) is None


def test_packages_keep_out_of_each_other() -> None:
    found = [
        f"{module} imports {root}"
        for module, source in SOURCES.items()
        for root in roots_imported(source, module) & FORBIDDEN[module.split(".")[0]]
    ]
    assert found == []


def test_only_the_hook_family_imports_sglang() -> None:
    importing = {m for m, source in SOURCES.items() if "sglang" in roots_imported(source, m)}
    strangers = {m for m in importing if not any(allows(e, m) for e in MAY_IMPORT_SGLANG)}
    assert sorted(strangers) == []
    unneeded = {e for e in MAY_IMPORT_SGLANG if not any(allows(e, m) for m in importing)}
    assert sorted(unneeded) == []


def test_checker_finds_a_cycle() -> None:
    sources = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "from .c import x",
        "p.c": "import p.a",
        "p.d": "import p.a",
    }
    assert find_cycle(import_graph(sources, {"p"})) == ["p.a", "p.b", "p.c", "p.a"]


def test_checker_leaves_late_and_typing_imports_out_of_the_graph() -> None:
    late = "def f():\n    import p.b\n"
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.b\n"
    guarded = "try:\n    import p.b\nexcept ImportError:\n    pass\n"
    for source, expected in [(late, set()), (typing_only, set()), (guarded, {"p.b"})]:
        assert import_graph({"p.a": source, "p.b": ""}, set())["p.a"] == expected


def test_checker_sees_late_imports_of_sglang() -> None:
    source = "def f():\n    from sglang.srt import x\n"
    assert roots_imported(source, "sgl_esft.a") == {"sglang"}


def test_checker_resolves_relative_imports() -> None:
    for is_package, base in [(False, "a.x"), (True, "a.b.x")]:
        found = imported("from .x import y", "a.b", is_package=is_package, top_level_only=True)
        assert found == {Imported(base, "y")}


def test_checker_tells_a_submodule_from_a_name_of_its_package() -> None:
    sources = {"p": "import p.a\n", "p.a": "from p import b\n", "p.b": ""}
    assert find_cycle(import_graph(sources, {"p"})) is None
    sources["p.a"] = "from p import value\n"
    assert find_cycle(import_graph(sources, {"p"})) == ["p", "p.a", "p"]
