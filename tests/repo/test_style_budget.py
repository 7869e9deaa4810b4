"""Library code stays easy to read: budgets of lines and methods, no crumbs, one name each.

working tree -> [over_budget], [crumbs], [twice_named] -> what no entry of ALLOWED excuses
"""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath

import pytest

from tests.repo.import_graph import PACKAGE_MODULES, SOURCES, import_graph
from tests.repo.tree import PACKAGES, ROOT, module_name, python_files

MEDIAN_FUNCTION = 12
P90_FUNCTION = 40
LONGEST_FUNCTION = 80
LONGEST_FILE = 500
MOST_METHODS = 20
SHORTEST_MODULE = 70  # lines, of one that a single other module imports

# path, path:function or path:Class -> why it may be longer, have more methods, or stand alone;
# package:name -> why two modules or public classes have it. An entry that nothing needs fails.
ALLOWED: dict[str, str] = {
    "launch/tokenizer.py": "the classes that SGLang's server is started with, checked on their own",
    "sgl_elastic/engine/rank.py:EngineRank": "the one object that SGLang's hooks and loader reach",
    "sgl_elastic/memory/client.py:DeviceClient": "a method for each verb of the worker, no more",
    "sgl_elastic/memory/control.py:Hmm": "the verbs of the coordinator's port, and their undoing",
    "sgl_esft/health/engine_processes.py": "imports SGLang's processes, which only they need",
    "sgl_esft/http/tokenizing.py": "knows tokenizers, and nothing of SGLang's classes",
    "sgl_esft/platform/kv_pools.py": "must be imported after SGLang, cpu.py while it is",
    "sgl_esft/plugin/hook_table.py": "every place of SGLang's that is hooked, in one table",
    "sgl_esft/weave/plane.py:AdapterPlane": "a verb for each change of what is loaded and placed",
}

LIBRARY = python_files(*PACKAGES, "scripts")
OWN_NAMES = ("__init__.py", "__main__.py")  # every package's own


def function_lengths(source: str) -> dict[str, int]:
    """Lines of each function, decorators and docstring included, by dotted name."""
    lengths: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    lengths[name] = (child.end_lineno or first) - first + 1
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return lengths


def method_counts(source: str) -> dict[str, int]:
    """Functions in each class's body, `__init__` and its like included."""
    return {
        node.name: sum(isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def crumbs(sources: Mapping[str, str], importers: Mapping[str, set[str]]) -> list[str]:
    """Paths of modules that are too short to stand alone for the one module that imports them."""
    return [
        path
        for path, source in sources.items()
        if PurePath(path).name not in OWN_NAMES
        and source.count("\n") < SHORTEST_MODULE
        and len(importers.get(path, ())) == 1
    ]


def importers_by_path() -> dict[str, set[str]]:
    """Path of a module -> the modules of ours that import it, late or not."""
    paths = {module_name(path): path for path in python_files(*PACKAGES)}
    found: dict[str, set[str]] = defaultdict(set)
    for module, names in import_graph(SOURCES, PACKAGE_MODULES).items():
        for name in names:
            found[paths[name]].add(module)
    return found


def twice_named(sources: Mapping[str, str]) -> list[str]:
    """`package:name` of modules, and of public classes, that another in the package is called."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        package = path.split("/")[0]
        if PurePath(path).name not in OWN_NAMES:
            found[f"{package}:{PurePath(path).name}"].append(path)
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[f"{package}:{node.name}"].append(path)
    return [name for name, paths in found.items() if len(paths) > 1]


def over_budget(path: str, source: str) -> list[str]:
    """`path` or `path:function` of everything in one file that is too long."""
    found = [path] if source.count("\n") > LONGEST_FILE else []
    long = [name for name, n in function_lengths(source).items() if n > LONGEST_FUNCTION]
    large = [name for name, n in method_counts(source).items() if n > MOST_METHODS]
    return found + [f"{path}:{name}" for name in long + large]


def distribution_problems(lengths: list[int]) -> list[str]:
    """What is wrong with the lengths of all functions together."""
    median = statistics.median(lengths)
    p90 = statistics.quantiles(lengths, n=10, method="inclusive")[-1]
    found = []
    if median > MEDIAN_FUNCTION:
        found.append(f"the median function has {median} lines, the budget is {MEDIAN_FUNCTION}")
    if p90 > P90_FUNCTION:
        found.append(f"nine of ten functions should have {P90_FUNCTION} lines; p90 is {p90}")
    return found


def read(path: str) -> str:
    return (ROOT / path).read_text()


@pytest.fixture(scope="module")
def found() -> set[str]:
    """What some entry of ALLOWED has to excuse."""
    sources = {path: read(path) for path in LIBRARY}
    packaged = {path: source for path, source in sources.items() if path.split("/")[0] in PACKAGES}
    long = {entry for path, source in sources.items() for entry in over_budget(path, source)}
    return long.union(crumbs(packaged, importers_by_path()), twice_named(packaged))


def test_nothing_is_over_budget(found: set[str]) -> None:
    assert sorted(found - set(ALLOWED)) == []


def test_allow_list_is_needed_and_reasoned(found: set[str]) -> None:
    assert sorted(set(ALLOWED) - found) == []
    assert all(reason.strip() for reason in ALLOWED.values())


def test_most_functions_are_short() -> None:
    lengths = [n for path in LIBRARY for n in function_lengths(read(path)).values()]
    assert distribution_problems(lengths) == []


def test_checker_sees_nested_functions_methods_and_decorators() -> None:
    source = (
        "class A:\n    @d\n    def f(self):\n        def g():\n            pass\n        return g\n"
    )
    assert function_lengths(source) == {"A.f": 5, "A.f.g": 2}


def test_checker_finds_a_long_function_and_a_long_file() -> None:
    long_function = "def f():\n" + "    pass\n" * LONGEST_FUNCTION
    assert over_budget("a.py", long_function) == ["a.py:f"]
    assert over_budget("a.py", "x = 1\n" * (LONGEST_FILE + 1)) == ["a.py"]
    assert over_budget("a.py", "x = 1\n" * LONGEST_FILE) == []


def test_checker_counts_the_methods_of_each_class() -> None:
    nested = "    class B:\n        def f(self): ...\n        async def g(self): ...\n"
    source = f"class A:\n    x = 1\n    def __init__(self):\n        def inner(): ...\n{nested}"
    assert method_counts(source) == {"A": 1, "B": 2}


def test_checker_finds_a_class_with_too_many_methods() -> None:
    methods = [f"    def f{n}(self): ...\n" for n in range(MOST_METHODS + 1)]
    assert over_budget("a.py", "class A:\n" + "".join(methods)) == ["a.py:A"]
    assert over_budget("a.py", "class A:\n" + "".join(methods[1:])) == []


def test_checker_finds_crumbs() -> None:
    short, long = "x = 1\n" * (SHORTEST_MODULE - 1), "x = 1\n" * SHORTEST_MODULE
    sources = {"p/a.py": short, "p/b.py": long, "p/c.py": short, "p/d.py": short}
    sources["p/__init__.py"] = ""
    importers = {path: {"p.x"} for path in sources} | {"p/c.py": {"p.x", "p.y"}, "p/d.py": set()}
    assert crumbs(sources, importers) == ["p/a.py"]


def test_a_late_import_is_an_importer() -> None:
    assert "sgl_esft.launch_server" in importers_by_path()["launch/server.py"]


def test_checker_finds_two_of_one_name() -> None:
    sources = {
        "p/a/x.py": "class A: ...\nclass _B: ...\n",
        "p/b/x.py": "class B: ...\nclass _B: ...\n",
        "p/b/__init__.py": "class A: ...\n",
        "p/a/__init__.py": "",
        "q/x.py": "class B: ...\n",
    }
    assert sorted(twice_named(sources)) == ["p:A", "p:x.py"]


@pytest.mark.parametrize(
    ("lengths", "number_of_problems"),
    [([5] * 20, 0), ([20] * 20, 1), ([5] * 15 + [60] * 5, 1), ([60] * 20, 2)],
)
def test_checker_judges_the_distribution(lengths: list[int], number_of_problems: int) -> None:
    assert len(distribution_problems(lengths)) == number_of_problems
